"""The transport whose workers are processes: batches travel over shared-memory rings."""

from __future__ import annotations

import pickle
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

# torch seeds it in each worker, where numpy would import it otherwise: it does so at the first use.
import numpy.random  # noqa: F401

import ringloader._native as _native
from ringloader._common.protocols import Handle
from ringloader._start import guard, processes
from ringloader._start.processes import Starter
from ringloader._torch import internals
from ringloader._transport import overdue
from ringloader._transport.overdue import Late, LostWorker
from ringloader._transport.protocol import Transport
from ringloader._transport.segment_cache import Beside, SegmentCache
from ringloader._worker import channel
from ringloader._worker.loop import Work
from ringloader._worker.options import WorkerOption

# torch's, in dataloader.py::_MultiProcessingDataLoaderIter.__init__.
_PICKLE_WARNING = (
    "Got pickle error when attempting to start a worker Process. "
    "This might be because the worker Process arguments are not picklable. "
    "Python 3.14+ changed the multiprocessing start method in non-Mac POSIX platforms "
    "to 'forkserver', which requires the worker Process arguments to be picklable. "
    "You can also try multiprocessing.set_start_method('fork')."
)


class ProcessTransport(Transport):
    """The transport of one iterator with worker processes.

    Attributes:
        beside: The object of a feature that goes with the memory.
    """

    engine: _native.Engine
    path = "native"
    about = "native scheduling over shared-memory rings"
    scheduler = _native.Scheduler
    # Attributes: an iterator that lives on while modules are torn down finds their names None.
    _group = processes.Group
    _join_seconds = internals.JOIN_SECONDS

    def __init__(
        self,
        engine: _native.Engine,
        beside: Beside | None,
        starter: Starter,
        workers: int,
        cache: SegmentCache,
        options: Sequence[WorkerOption],
        features: Sequence[Any],
    ) -> None:
        super().__init__(engine, options, features)
        self.beside = beside
        self._cache = cache
        self._starter = starter
        self._workers = workers
        self._processes: dict[int, Any] = {}
        self._calls = threading.RLock()
        self._tag = 0

    def start(self, work: Work) -> Any:
        """Starts the process of a worker."""
        try:
            return self._begin(work, self._end_of(work.worker))
        except (TypeError, AttributeError, pickle.PicklingError):
            if internals.warns_of_pickle_errors():
                warnings.warn(_PICKLE_WARNING, stacklevel=2)
            raise

    def _end_of(self, worker: int, *begin: Any) -> channel.WorkerEndpoint:
        return channel.WorkerEndpoint(self.engine, worker, self.options, *begin)

    def _begin(self, work: Work, worker_end: channel.WorkerEndpoint) -> Any:
        process = self._starter.worker(worker_end, work)
        # Before it starts: what an interrupt leaves is ended with the rest.
        self._processes[work.worker] = process
        self._starter.start(process)
        assert process.pid is not None, "it has started"
        self.engine.watch_worker(work.worker, process.pid)
        if len(self._processes) == self._workers:
            self._starter.note_all_started()
        return process

    def call(self, worker: int, fd: int, make: Callable[[int], object]) -> bool:
        """Sends a worker a call, after its tasks, with a descriptor, which stays the caller's.

        Args:
            worker: The worker.
            fd: The descriptor.
            make: Makes the call of the tag by which the worker takes the descriptor.

        Returns:
            False if there is no room for the descriptor now.
        """
        # INVARIANT: of two calls, the one with the lower tag is sent first.
        with self._calls:
            self._tag += 1
            if not self.engine.send_fd(worker, fd, self._tag):
                return False
            self.engine.put_call(worker, make(self._tag))
            return True

    def start_later(self, work: Work) -> Any:
        """Starts the process of a worker while others run. It gets the dataset as it is now here."""
        worker = work.worker
        # One that was to end is told again.
        self._ended.discard(worker)
        worker_end = self._end_of(worker, self.engine.succeed(worker))
        try:
            with processes.one_start_at_a_time():
                process = self._begin(work, worker_end)
        except BaseException:
            # INVARIANT: no two processes are at the rings of one worker.
            self._group([self._processes[worker]]).kill()
            raise
        if self.engine.is_done():
            # Another thread, or a signal handler, has ended the workers meanwhile, without this one.
            processes.kill(process)
        return process

    def has_left(self, worker: int, handle: Handle) -> bool:
        # Asked first: one that lives on may end right after.
        is_alive = handle.is_alive()
        return not is_alive and (self._starter.lives_on(handle) or self.engine.has_ended(worker))

    def retire(self, worker: int, handle: Handle) -> None:
        if self._starter.lives_on(handle):
            self.engine.note_left(worker)

    def lost(self, lost: LostWorker) -> Any:
        """Returns the process that succeeds a lost worker, and runs; None if there may be none."""
        lost.handle.join(1.0)
        return None if self._is_without_guard(lost.handle) else super().lost(lost)

    def _is_without_guard(self, process: Any) -> bool:
        """True if a process has ended because the main file has no guard: so would any other."""
        return guard.is_missing(self._starter.context.get_start_method(), process.exitcode)

    def error_of_lost(self, _worker: int, handle: Any, in_hand: Late | None, *notes: str) -> RuntimeError:
        """Returns torch's error for a worker whose process has ended, or ours if the guard is missing."""
        handle.join(1.0)
        if self._is_without_guard(handle):
            return guard.error_of(self._starter.context.get_start_method(), self._starter.fork)
        return overdue.error_of_lost(handle, in_hand, *notes)

    def end(self, workers: Sequence[Any], told: Callable[[int], bool]) -> None:
        """Ends the processes, suspended ones too. Kills the ones that still live after torch's timeout."""
        # No other code knows of a process whose start was interrupted: it is killed.
        group = self._group([process for process in self._processes.values() if process.pid is not None])
        try:
            self.engine.set_done()
            for worker in range(len(workers)):
                if told(worker):
                    self.send(worker, None)
            for process in workers:
                group.join(process, self._join_seconds)
        finally:
            try:
                for process in workers:
                    if process.is_alive():
                        group.terminate()
                        group.join(process, self._join_seconds)
            finally:
                group.kill()

    def close(self, may_keep: bool = False) -> None:
        """Gives back all memory that no tensor holds. A forked child that inherited this does nothing.

        Args:
            may_keep: Whether another epoch may find it warm: some of it then stays with the loader.
        """
        if not self._begin_close():
            return
        # Processes that an interrupted end has left.
        self._group(list(self._processes.values())).kill()
        self._close_features()
        beside, self.beside = self.beside, None
        if may_keep and self._ended_well():
            for worker, process in self._processes.items():
                self.retire(worker, process)
            self._cache.store(self.engine, beside)
        else:
            self.engine.close()
            if beside is not None:
                beside.close()
        self._starter.close()
        self._processes.clear()

    def _ended_well(self) -> bool:
        started = self._processes.values()
        return self.sound and bool(started) and all(one.exitcode == 0 for one in started)
