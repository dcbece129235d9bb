"""Starts the workers of an iterator: the protocol ``Starter``, and new processes, which share one pickle."""

from __future__ import annotations

from multiprocessing import context
from typing import TYPE_CHECKING, Any, Protocol

import torch.multiprocessing

from ringloader._start import fallback, guard, processes, spawn
from ringloader._start.pickled import ForOne, NotForAllError, Pickled, for_all
from ringloader._worker import entry

if TYPE_CHECKING:
    from ringloader._common.protocols import Handle
    from ringloader._torch.protocols import TorchLoader


class Starter(Protocol):
    """Starts the workers of one iterator.

    Attributes:
        fork: The argument that makes them fork, as an error names it.
    """

    fork: str

    @property
    def context(self) -> Any:
        """The context of ``multiprocessing`` that starts the processes."""

    def worker(self, worker_end: Any, work: Any) -> Handle:
        """Returns the handle of a worker that does not run yet: its end of the transport, and its work."""

    def start(self, handle: Handle) -> None:
        """Starts a worker.

        Raises:
            BaseException: An error of the start. It does not run then.
        """

    def lives_on(self, handle: Handle) -> bool:
        """True if a worker has left the iterator's memory, and its process lives on."""

    def note_all_started(self) -> None:
        """Gives back what workers share as they start: one that starts later gets its own."""

    def close(self) -> None:
        """Ends what is kept for workers that start later."""


class NewProcesses:
    """Starts a process for each worker.

    Args:
        loader: The iterator's loader.

    Raises:
        RuntimeError: If the main file is being run by a worker that was just started.
    """

    fork = guard.FORK

    def __init__(self, loader: TorchLoader) -> None:
        self.context = loader.multiprocessing_context or torch.multiprocessing
        guard.refuse_in_import(self.context)
        processes.preload_fork_server(self.context)
        spawn.prepare(loader)
        # A forked process is sent nothing.
        self._shared = None if self.context.get_start_method() == "fork" else Shared()

    def worker(self, worker_end: Any, work: Any) -> Any:
        """Returns the process of a worker."""
        args: tuple[Any, Any] = worker_end, work
        if self._shared is not None:
            args = self._shared.for_one(worker_end), SharedWork(self._shared, work)
        made = self.context.Process(target=entry.run_worker, args=args)
        made.daemon = True
        return spawn.by_server(made)

    def start(self, handle: Any) -> None:
        """Starts the process of a worker."""
        with guard.explaining_missing_guard(self.context):
            handle.start()
        processes.record_start(handle)

    def lives_on(self, _handle: Handle) -> bool:
        """False: it has ended."""
        return False

    def note_all_started(self) -> None:
        """Gives back the pickled work of all workers."""
        if self._shared is not None:
            self._shared.close()

    close = note_all_started


class Shared:
    """The work of all workers of an iterator, pickled when the first of them starts, until :meth:`close`.

    So what pickling raises is raised where torch's pickling would.
    """

    def __init__(self) -> None:
        self._finds_main = fallback.main_is_found()
        self._pickled: Pickled | None = None
        # True: what is still to start gets a pickle of its own.
        self._is_closed = False

    def pickled(self, work: Any) -> Pickled | ForOne:
        """Returns the work of all, pickled once from the first one, or what is pickled for each process."""
        if self._pickled is None and not self._is_closed and context.get_spawning_popen() is not None:
            try:
                self._pickled = for_all(work, fallback.WITHOUT_PICKLE, finds_main=self._finds_main)
            except NotForAllError:
                self._is_closed = True
        return self._pickled or self.for_one(work)

    def for_one(self, thing: object) -> ForOne:
        """Returns what is pickled for each process."""
        return ForOne(thing, fallback.WITHOUT_PICKLE, finds_main=self._finds_main)

    def close(self) -> None:
        """Gives back what the workers that have started hold themselves."""
        if self._pickled is not None:
            self._pickled.close()
        self._pickled, self._is_closed = None, True


class SharedWork:
    """The work of one worker. Pickled, it is a reference to that of all, with the number of this worker."""

    def __init__(self, shared: Shared, work: Any) -> None:
        self._shared = shared
        self._work = work

    def __reduce__(self) -> tuple[Any, ...]:
        return _with_number, (self._shared.pickled(self._work), self._work.worker)


def _with_number(work: Any, worker: int) -> Any:
    """Returns the work of a worker, in the worker."""
    return work._replace(worker=worker)
