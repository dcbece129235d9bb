"""Worker processes that several loaders share."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Self

import torch.multiprocessing

import ringloader._native as _native
from ringloader._features import rules
from ringloader._torch import select_path

if TYPE_CHECKING:
    from ringloader._core.make_transport import WorkerKind
    from ringloader._features.pools.crew import Crew
    from ringloader._features.table import Options
    from ringloader._torch.protocols import TorchLoader


class WorkerPool:
    """Worker processes that several loaders share: started once, and lent to one iterator after another.

    Pass the pool to loaders as ``worker_pool``. Its processes start with the first iterator. Each loader
    pickles its dataset and functions once, at its first iterator, even with ``fork``. Each process that works
    for the loader unpickles them, and keeps them until the loader is dropped.

    An iterator never waits for another iterator. It gets idle processes, and the pool starts the missing
    ones. The pool keeps at most twice ``num_workers`` idle processes. If a process is lost, the next iterator
    replaces it. Several threads may use one pool with ``spawn`` or ``forkserver``, but not with ``fork``: a
    process that is forked while another thread works may wait forever for a lock. A forked child has its own
    pool, without processes.

    As with ``persistent_workers``, workers do not see later changes of a dataset. Attributes that an epoch
    sets on a dataset in a worker are reset for the next epoch. ``worker_init_fn``, seeds and
    ``get_worker_info()`` are new for each iterator, as without ``persistent_workers``.

    Copies of a loader in the same process share its pool. A pickled loader has no pool. On macOS and Windows,
    a pool has no processes: it only sets a loader's number of workers.

    Args:
        num_workers: The largest number of workers for one loader. A loader that sets none has this number.
        start_method: ``"fork"``, ``"spawn"`` or ``"forkserver"`` (default: the default of
            ``multiprocessing``).

    Raises:
        TypeError: If ``num_workers`` is not an int, or ``start_method`` is not a string.
        ValueError: If ``num_workers`` is not positive, or the start method does not exist.
    """

    # Other modules know a pool by this mark, without an import.
    _is_worker_pool = True
    # True of a pool whose workers are elsewhere, and which makes the transports to them.
    _is_remote = False

    def __init__(self, num_workers: int, start_method: str | None = None) -> None:
        rules.integer(1)("num_workers", num_workers)
        methods = torch.multiprocessing.get_all_start_methods()
        rules.one_of(*methods, or_none=True)("start_method", start_method)
        self._num_workers = num_workers
        self._start_method = start_method
        self._begin()

    def _begin(self) -> None:
        if not _native.SUPPORTED:
            select_path.log_once(
                "a WorkerPool has no processes on this system, where each iterator starts its own workers: "
                f"{select_path.NEEDS_LINUX}"
            )
            return
        from ringloader._features.pools.crew import Crew

        self._crew = Crew(self._num_workers, self._start_method)
        # At the interpreter's exit too.
        weakref.finalize(self, self._crew.end)

    @property
    def num_workers(self) -> int:
        """The largest number of workers for one loader. A loader that sets none has this number."""
        return self._num_workers

    @property
    def start_method(self) -> str | None:
        """The start method that was given."""
        return self._start_method

    def shutdown(self) -> None:
        """Ends all processes. Iterators that still use them raise torch's error for lost workers.

        A second call does nothing. Later iterators raise ``RuntimeError``.
        """
        if _native.SUPPORTED:
            self._own().shut_down()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        method = "" if self._start_method is None else f", start_method={self._start_method!r}"
        return f"ringloader.WorkerPool({self._num_workers}{method})"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # The pool's processes are children of this process.
        return type(None), ()

    def _own(self) -> Crew:
        """Returns the crew of this process: a forked child has none of its parent's processes."""
        if self._crew.is_inherited():
            was_ended = self._crew.is_shut_down
            self._begin()
            self._crew.is_shut_down = was_ended
        return self._crew

    def _kind(self) -> WorkerKind:
        """Returns the workers of an iterator that come from this pool."""
        from ringloader._features.pools.crew import Lent

        return Lent(self, self._own())


def kind_for(loader: TorchLoader, options: Options) -> WorkerKind | None:
    """Returns the workers of an iterator that come from its loader's pool.

    None if they have a context of their own.
    """
    pool = options.worker_pool
    if pool is None or loader.multiprocessing_context is not None:
        return None
    # With `prefetch_epochs` workers that persist come from the pool too.
    if loader.persistent_workers and not options.prefetch_epochs and not pool._is_remote:
        return None
    kind: WorkerKind = pool._kind()
    return kind


def arguments_for(loader: TorchLoader, options: Options, workers: int) -> dict[str, Any]:
    """Returns the arguments of torch's that a loader's pool decides."""
    pool = options.worker_pool
    if pool is None:
        return {}
    if pool._is_remote:
        vars(loader)["check_worker_number_rationality"] = _have_cores_elsewhere
    # The next epoch begins in the processes of the one before, which the loader therefore keeps.
    persists = {"persistent_workers": True} if options.prefetch_epochs else {}
    return {"num_workers": workers or pool.num_workers, **persists}


def _have_cores_elsewhere() -> None:
    """Replaces torch's warning about more workers than cores: remote workers use none here."""
