"""The transport of an iterator whose workers are threads."""

from __future__ import annotations

import atexit
import contextlib
import copy
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import ringloader._native as _native
from ringloader._common import held_memory
from ringloader._core.feature import Feature, Options, Setup
from ringloader._core.make_transport import WorkerKind
from ringloader._features import worker_info
from ringloader._features.rules import THREAD
from ringloader._features.threads.thread import WorkerThread
from ringloader._log import logger
from ringloader._torch import internals, modes, select_path
from ringloader._torch.select_path import Reason
from ringloader._transport.protocol import Transport
from ringloader._worker.loop import Work
from ringloader._worker.options import EpochStart, WorkerOption

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader


class ThreadTransport(Transport):
    """The transport of one iterator with threads for workers."""

    engine: _native.ThreadQueues
    path = "threads"
    about = "native scheduling, with threads for workers"
    scheduler = _native.ThreadScheduler
    # Attributes: an iterator that lives on while modules are torn down finds their names None.
    _join_seconds = internals.JOIN_SECONDS
    _monotonic = staticmethod(time.monotonic)
    _current_thread = staticmethod(threading.current_thread)

    def __init__(self, workers: int, options: Sequence[WorkerOption], features: Sequence[Feature]) -> None:
        held_memory.tell_of_forks()
        worker_info.put_in_place()
        super().__init__(_native.ThreadQueues(workers), options, features)
        self._threads: dict[int, WorkerThread] = {}
        # When the time is over that the end of an iterator waits for its workers, once it has begun.
        self._until: float | None = None
        _living.add(self)

    def start(self, work: Work) -> WorkerThread:
        """Starts the thread of a worker."""
        # Copies: an option keeps what it has of the worker's epoch.
        work = work._replace(options=tuple(map(copy.copy, self.options)))
        thread = WorkerThread(self.engine, modes.OfThread(), work)
        self._threads[work.worker] = thread
        thread.start()
        return thread

    def start_later(self, work: Work) -> WorkerThread:
        """Starts the thread of a worker that never ran, or has ended and owed nothing, while others run."""
        self._ended.discard(work.worker)
        self.engine.begin_worker(work.worker, work.start.of_tasks)
        return self.start(work)

    def send(self, worker: int, message: EpochStart | None) -> None:
        """Sends a message after the tasks of a worker: None to end it. Never waits."""
        if message is not None and self.joint_tasks is not None:
            self.engine.begin(worker, message, message.of_tasks)
        else:
            super().send(worker, message)

    def call(self, worker: int, function: Callable[[], object]) -> None:
        """Sends a worker a call, after its tasks."""
        self.engine.put(worker, function)

    def end(self, workers: Sequence[WorkerThread], told: Callable[[int], bool]) -> None:
        """Tells the threads to end, and waits as long as torch waits for one worker."""
        if self.counters.are_final:
            # The exit of the interpreter has ended the threads, before torch ends iterators for it.
            return
        self.engine.set_done()
        for number in range(len(workers)):
            if told(number):
                self.send(number, None)
        # Not for one whose start was interrupted: it was not told.
        self._join(workers)

    def _join(self, threads: Iterable[WorkerThread]) -> list[WorkerThread]:
        """Waits for all threads as long as torch waits for one worker. Returns the ones that still run."""
        if self._until is None:
            self._until = self._monotonic() + self._join_seconds
        # The last reference to an iterator may go in one of its own workers.
        here = self._current_thread()
        others = [thread for thread in threads if thread is not here and thread.is_alive()]
        for thread in others:
            thread.join(max(self._until - self._monotonic(), 0.0))
        return [thread for thread in others if thread.is_alive()]

    def error_of_lost(self, worker: int, handle: WorkerThread, _in_hand: Any, *_notes: str) -> RuntimeError:
        """Returns the error for a worker that has ended and should not have, with its cause."""
        handle.join(1.0)
        made = RuntimeError(f"DataLoader worker thread {worker} exited unexpectedly")
        made.__cause__ = handle.error
        return made

    def close(self, may_keep: bool = False) -> None:  # noqa: ARG002
        """Drops what is in the queues; then the workers end, those in the dataset once it returns."""
        if not self._begin_close():
            return
        self.engine.close()
        left = self._join(self._threads.values())
        if left:
            logger.warning(
                "%d of the worker threads are still in the dataset, and end when it returns: a thread cannot "
                "be killed",
                len(left),
            )
        self._threads.clear()

    def end_at_exit(self, until: float) -> None:
        """Ends the workers, and waits for them, before the interpreter goes."""
        if self._begin_close():
            self.engine.close()
            self._until = until
            self._join(self._threads.values())


class Threads(WorkerKind):
    """The workers of an iterator that are threads."""

    path = "threads"

    def reason_for_torch(self, loader: TorchLoader, get_iterator: Any) -> Reason | None:
        return select_path.reason_against_threads(loader, get_iterator)

    def refuse(self, reason: Reason) -> None:
        raise RuntimeError(f"worker_method='thread' cannot be used: {reason.text}; leave worker_method out")

    def while_made(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def transport(
        self,
        _loader: TorchLoader,
        _options: Options,
        setup: Setup,
        worker_options: Sequence[WorkerOption],
        features: Sequence[Feature],
    ) -> ThreadTransport:
        return ThreadTransport(setup.workers, worker_options, features)


def kind_for(_loader: TorchLoader, options: Any) -> Threads | None:
    """Returns the kind of workers that are threads; None where the options say otherwise."""
    return Threads() if options.worker_method == THREAD else None


_living: weakref.WeakSet[ThreadTransport] = weakref.WeakSet()


def _end_all() -> None:
    until = time.monotonic() + internals.JOIN_SECONDS
    for transport in list(_living):
        transport.end_at_exit(until)


# A thread that waits natively when the interpreter goes must not come back to it. If a thread is in the
# dataset by then, the interpreter ends it in its next step.
if _native.SUPPORTED:
    atexit.register(_native.note_exit)
    atexit.register(_end_all)
