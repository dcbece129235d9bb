"""Workers on other machines, over Ray. Needs Ray: ``pip install 'ray>=2.40'``."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ringloader._native as _native
from ringloader._features.pools.pool import WorkerPool
from ringloader._torch import select_path

if TYPE_CHECKING:
    from ringloader._core.make_transport import WorkerKind

try:
    import ray as _ray  # noqa: F401
except ImportError as error:
    raise ImportError("ringloader.ray needs Ray: pip install 'ray>=2.40'") from error

__all__ = ["Workers"]

# Options of an actor that `Workers` sets itself.
_OWN = ("max_restarts", "max_task_retries", "max_concurrency", "lifetime", "name", "get_if_exists")


class Workers(WorkerPool):
    """Workers on the machines of a Ray cluster, for several loaders. Pass them as ``worker_pool``.

    Each worker is an actor on a machine that Ray chooses. It runs the same loop as a local worker, and sends
    its batches over a TCP connection. Actors start with the first iterator, and stay for later iterators and
    other loaders. Two iterators at the same time have separate actors. All actors end with ``shutdown()``,
    the ``with`` block, the last reference, or the program.

    Batches, their order, random numbers, ``get_worker_info()`` and errors are the same as with local workers
    of the same number. You may write to a batch, and keep it.

    If an actor or its machine is lost, another actor makes the batches that have not arrived.

    Args:
        num_workers: The largest number of workers for one loader. A loader that sets none has this number.
        num_cpus: CPUs that each worker asks Ray for.
        resources: Other resources that each worker asks for, by their names.
        max_bytes: The most bytes of batches that workers make ahead. The size of a batch is not known before
            it is made, so it counts as the largest recent batch. Until the first batch has arrived, each
            worker makes one. One batch may always be made. Default: the loader's ``max_shared_bytes``.
        retries: How often a batch is tried again after its worker was lost.
        start_timeout: Seconds to wait for room in the cluster, at ``iter`` and when a lost worker is
            replaced.
        host: Address of this machine that the cluster's nodes can reach. Default: the address that Ray knows.
        **actor_options: Other options for Ray's actors, such as ``runtime_env``.

    Raises:
        TypeError: If ``num_workers``, ``retries`` or ``max_bytes`` is not an int.
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
        """Ends all actors. Iterators that still use them raise an error.

        A second call does nothing. Later iterators raise ``RuntimeError``.
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
