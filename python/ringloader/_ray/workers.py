"""``Workers``: workers of loaders on the machines of a Ray cluster."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ringloader._native as _native
from ringloader._features.pools.pool import WorkerPool
from ringloader._torch import select_path

if TYPE_CHECKING:
    from ringloader._core.make_transport import WorkerKind

# Options of an actor that `Workers` sets itself.
_OWN = ("max_restarts", "max_task_retries", "max_concurrency", "lifetime", "name", "get_if_exists")


class Workers(WorkerPool):
    """Workers on the machines of a Ray cluster, for several loaders: pass them as ``worker_pool``.

    Each worker is an actor, wherever Ray has room for it. It runs the same loop as a local worker, and sends
    its batches over a TCP connection. Nothing starts before the first iterator. Actors stay between iterators
    and loaders; two iterators at once have actors of their own. They end with ``shutdown()``, with the
    ``with`` block, when the last reference goes, and with the program.

    Batches, their order, random numbers, ``get_worker_info()`` and errors are torch's, as with as many local
    workers. A batch is writable, and the caller's to keep.

    A worker that is lost, with its process or its machine, is replaced: another actor does the tasks that
    have no answer.

    Args:
        num_workers: The default number of workers of a loader, and the largest.
        num_cpus: CPUs that each worker asks Ray for.
        resources: Other resources that each worker asks for, by their names.
        max_bytes: Bytes of batches that are being made, or made and not yet taken by the loader, each
            counted as the largest so far. Until the first has arrived, each worker makes one. One batch may
            always be made. None: as many as the loader's ``max_shared_bytes`` takes.
        retries: How often a worker may be lost in the same batch and be replaced.
        start_timeout: Seconds to wait for room in the cluster, at ``iter`` and where a worker is replaced.
        host: Address of this machine that the cluster's nodes can reach. None: the one that Ray knows.
        **actor_options: Other options for Ray's actors, such as ``runtime_env``.

    Raises:
        TypeError: If ``num_workers``, ``retries`` or ``max_bytes`` is no int.
        ValueError: If ``num_workers`` or ``max_bytes`` is below 1, ``retries`` below 0, ``start_timeout`` not
            positive, or an option of actors is not supported.
    """

    _is_remote = True

    def __init__(
        self,
        num_workers: int,
        *,
        num_cpus: float = 1,
        resources: Mapping[str, float] | None = None,
        max_bytes: int | None = None,
        retries: int = 2,
        start_timeout: float = 300.0,
        host: str | None = None,
        **actor_options: Any,
    ) -> None:
        _check_int("num_workers", num_workers, 1)
        _check_int("retries", retries, 0)
        if max_bytes is not None:
            _check_int("max_bytes", max_bytes, 1)
        if not start_timeout > 0:
            raise ValueError(f"start_timeout must be positive, not {start_timeout!r}")
        _check_options(actor_options)
        self._num_workers = num_workers
        self._start_method = None
        self._max_bytes = max_bytes
        self._retries = retries
        self._start_timeout = float(start_timeout)
        self._host = host
        options = {"num_cpus": num_cpus, **actor_options}
        if resources is not None:
            options["resources"] = dict(resources)
        if not _native.SUPPORTED:
            select_path.log_once(
                "Workers on a cluster have no actors on this system, where each iterator starts its own "
                f"workers: {select_path.NEEDS_LINUX}"
            )
            return
        from ringloader._ray.crew import Crew

        self._actors = Crew(num_workers, options)
        # At the interpreter's exit too.
        weakref.finalize(self, self._actors.end)

    def shutdown(self) -> None:
        """Ends all actors. Iterators that still have some raise an error.

        Calling it again does nothing. An iterator that begins afterwards raises ``RuntimeError``.
        """
        if _native.SUPPORTED:
            self._actors.end()

    def __repr__(self) -> str:
        return f"{type(self).__module__}.{type(self).__qualname__}({self._num_workers})"

    def _kind(self) -> WorkerKind:
        """Returns the workers of an iterator that are this one's actors."""
        from ringloader._ray.transport import Actors, Settings

        settings = Settings(self._max_bytes, self._retries, self._start_timeout, self._host)
        return Actors(self, self._actors, settings)


def _check_options(options: Mapping[str, Any]) -> None:
    """Raises a ``ValueError`` for options that actors cannot have."""
    for name in _OWN:
        if name in options:
            raise ValueError(
                f"{name}={options[name]!r} cannot be passed to the actors of Workers: lost "
                "workers are replaced by others (retries=), and end with the program; leave it out"
            )


def _check_int(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
