"""The transport of one iterator whose workers are threads, and the context that torch's iterator uses."""

from __future__ import annotations

import atexit
import copy
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

import ringloader._native as _native
from ringloader._common import forks
from ringloader._main.epochs import step_in
from ringloader._main.queues import DoneEvent, RememberingTaskQueue, ResultQueue, TaskQueue
from ringloader._main.watchdog import Watchdog
from ringloader._threads import watched, worker, worker_info
from ringloader._torch import internals, modes
from ringloader._worker.fetch import Step

_logger = logging.getLogger("ringloader")

_starting = threading.Lock()


def _begin_anew() -> None:
    # In a forked child no thread starts a worker.
    global _starting
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)


class _Ending:
    """How long the end of an iterator waits for its workers: torch's time for one, for all together."""

    def __init__(self) -> None:
        self._until: float | None = None

    def left(self, timeout: float) -> float:
        now = time.monotonic()
        if self._until is None:
            self._until = now + internals.JOIN_SECONDS
        return min(timeout, max(self._until - now, 0.0))


class WorkerThread(threading.Thread):
    """A worker, as torch's iterator uses process objects.

    It has neither the iterator nor the transport, so that these go when their last user does.

    Args:
        queues: Where its tasks come from.
        ending: How long its end is awaited.
        taken_over: What it has of the thread that made its iterator.
        work: What it does.
    """

    def __init__(
        self, queues: _native.ThreadQueues, ending: _Ending, taken_over: modes.OfThread, work: worker.Work
    ) -> None:
        super().__init__(name=f"pt_data_worker {work.worker}", daemon=True)
        self._queues = queues
        self._ending = ending
        self._taken_over = taken_over
        self._work: worker.Work | None = work
        self._number = work.worker
        self._has_begun = threading.Event()
        # What ended it, where it was not told to end.
        self.error: BaseException | None = None

    @property
    def pid(self) -> int | None:
        """The process's."""
        return None if self.ident is None else os.getpid()

    @property
    def exitcode(self) -> int | None:
        """As a process's: None until it has ended, then 0, or 1 if an exception ended it."""
        return None if self.ident is None or self.is_alive() else int(self.error is not None)

    def start(self) -> None:
        """Starts it. As in a worker process, its operators use one thread; others' do as before."""
        # One at a time: a caller that has not asked before would take another's worker's number for its own,
        # and leave it to all threads that begin later.
        with _starting:
            threads = torch.get_num_threads()
            super().start()
            self._has_begun.wait()
            # The number that a thread sets is that of all which begin later too.
            torch.set_num_threads(threads)

    def run(self) -> None:
        """Is a worker until it is told to end."""
        work, self._work = self._work, None
        assert work is not None
        try:
            internals.set_thread_name("pt_data_worker")
            # A thread takes the number of all threads when it first asks, or works: before, not after.
            torch.get_num_threads()
            torch.set_num_threads(1)
            self._has_begun.set()
            self._taken_over.run(worker.run, self._queues, work)
        except BaseException as error:
            self.error = error
        finally:
            self._has_begun.set()
            del work
            self._queues.note_end(self._number)

    def join(self, timeout: float | None = None) -> None:
        """Waits for its end; once nothing more is wanted, no longer than for all workers together."""
        if timeout is not None and self._queues.is_done():
            timeout = self._ending.left(timeout)
        # The last reference to an iterator may go in one of its own workers.
        if self is not threading.current_thread():
            super().join(timeout)

    def terminate(self) -> None:
        """Does nothing: no thread can end another. It ends when the dataset returns."""


class ThreadTransport:
    """Everything of one iterator that must be ended."""

    # The functions themselves: an iterator that lives on while modules are torn down finds their names None.
    _process_identity = staticmethod(_native.process_identity)
    scheduler = _native.ThreadScheduler
    shares_dataset = True

    def __init__(self, loader: Any, steps: Sequence[Step], watchdog: Watchdog | None) -> None:
        self.engine = _native.ThreadQueues(loader.num_workers)
        self.sound = True
        self.watchdog = watchdog
        self._dataset = loader.dataset
        self.steps = steps
        # Tasks of a worker that are on their way at once, at most: for an error of one that is late.
        factor = loader.prefetch_factor if isinstance(loader.prefetch_factor, int) else 0
        self._remembered = factor * loader.num_workers if watchdog is not None else 0
        self._owner = self._process_identity()
        self._queues: list[TaskQueue] = []
        self._threads: dict[int, WorkerThread] = {}
        self._steps_of: dict[int, Sequence[Step]] = {}
        self._ending = _Ending()
        self._results_made = False
        self._closed = False
        self._final: dict[str, int] = {}
        _living.add(self)

    def Queue(self) -> ResultQueue | TaskQueue:  # noqa: N802
        """The first is for results, the others are the workers' in order."""
        if not self._results_made:
            self._results_made = True
            return ResultQueue(self.engine, _NoteEnd(weakref.ref(self)))
        number = len(self._queues)
        if self._remembered:
            made: TaskQueue = RememberingTaskQueue(self.engine, number, self._remembered)
        else:
            made = TaskQueue(self.engine, number)
        self._queues.append(made)
        return made

    def index_of(self, number: int, task: int) -> Any:
        """The index of a task that torch's iterator has sent to a worker; None if that was not remembered."""
        queue = self._queues[number]
        return queue.index_of(task) if isinstance(queue, RememberingTaskQueue) else None

    def Event(self) -> DoneEvent:  # noqa: N802
        """The event that ends the workers."""
        return DoneEvent(self.engine)

    def Process(self, *, target: Any, args: tuple[Any, ...]) -> Any:  # noqa: N802
        """A thread that does what torch's worker loop does with ``args`` in a process."""
        del target
        kind, _, _, _, _, auto_collation, collate_fn, drop_last, *others = args
        base_seed, init_fn, number, workers, *_ = others
        # Copies: what counts epochs counts those of one worker.
        steps = self._steps_of[number] = tuple(map(copy.copy, self.steps))
        work = worker.Work(
            kind,
            self._dataset,
            auto_collation,
            collate_fn,
            drop_last,
            base_seed,
            init_fn,
            number,
            workers,
            steps,
        )
        thread = WorkerThread(self.engine, self._ending, modes.OfThread(), work)
        self._threads[number] = thread
        return thread

    @staticmethod
    def end_workers(_iterator: Any, shut_down: Callable[[], None]) -> None:
        """Has torch's shutdown of an iterator end its workers."""
        shut_down()

    def epoch_note(self, number: int, epoch: int) -> Callable[[], None]:
        """What a worker calls to know that its next epoch is this one. The dataset was told here."""
        step = step_in(self._steps_of[number])
        return _do_nothing if step is None else functools.partial(step.count_from, epoch)

    def note_end(self, number: int) -> bool:
        """Looks at a worker that has ended. Returns whether it should not have."""
        if self._queues[number].ended or self.engine.is_done():
            return False
        self._threads[number].join(1.0)
        return True

    def lost(self, number: int) -> RuntimeError:
        """The error for a worker that has ended and should not have, with what ended it."""
        thread = self._threads[number]
        thread.join(1.0)
        made = RuntimeError(f"DataLoader worker thread {number} exited unexpectedly")
        made.__cause__ = thread.error
        return made

    def unregister(self) -> None:
        """Does nothing: a device's driver has nothing of it."""

    def is_inherited(self) -> bool:
        """Whether this process is a forked child of the one that made it."""
        return self._process_identity() != self._owner

    def counters(self) -> dict[str, int]:
        """Batches that the workers have made."""
        return dict(self._final) if self._closed else dict(self.engine.counters())

    def close(self, may_keep: bool = False) -> None:  # noqa: ARG002
        """Drops what is in the queues; then the workers end, those in the dataset once it returns."""
        if self._closed or self.is_inherited():
            return
        self._final = dict(self.engine.counters())
        self._closed = True
        self.engine.close()
        # torch has waited for them, but where its constructor did not come to an end.
        for thread in self._threads.values():
            if thread.is_alive():
                thread.join(internals.JOIN_SECONDS)
        left = [
            thread
            for thread in self._threads.values()
            if thread.is_alive() and thread is not threading.current_thread()
        ]
        if left:
            _logger.warning(
                "%d of the worker threads are still in the dataset, and end when it returns: a thread cannot "
                "be killed",
                len(left),
            )
        self._threads.clear()

    def end_at_exit(self, until: float) -> None:
        """Has the workers end, and waits for them, before the interpreter goes."""
        if self._closed or self.is_inherited():
            return
        self._final = dict(self.engine.counters())
        self._closed = True
        self.engine.close()
        for thread in self._threads.values():
            thread.join(max(until - time.monotonic(), 0.0))


def _do_nothing() -> None:
    pass


class _NoteEnd:
    """:meth:`ThreadTransport.note_end`, without a cycle: everything goes as soon as the iterator does."""

    def __init__(self, transport: weakref.ref[ThreadTransport]) -> None:
        self._transport = transport

    def __call__(self, number: int) -> bool:
        transport = self._transport()
        return transport is not None and transport.note_end(number)


def make_transport(loader: Any, steps: Sequence[Step] = (), watchdog: float | None = None) -> ThreadTransport:
    """The transport for one iterator of a loader with workers, whose waits are said after so many seconds."""
    forks.tell_native()
    worker_info.put_in_place()
    watching = None
    if watchdog is not None:
        notes = watched.Notes()
        watching = Watchdog(watchdog, watched.Threads(notes), loader.in_order)
        steps = (*steps, notes)
    elif loader.timeout:
        watching = Watchdog(None, watched.Threads(None), loader.in_order)
    return ThreadTransport(loader, steps, watching)


_living: weakref.WeakSet[ThreadTransport] = weakref.WeakSet()


def _end_all() -> None:
    until = time.monotonic() + internals.JOIN_SECONDS
    for transport in list(_living):
        transport.end_at_exit(until)


# What waits natively when the interpreter goes must not come back to it. What is in the dataset by then, the
# interpreter ends in its next step.
if _native.SUPPORTED:
    atexit.register(_native.note_exit)
    atexit.register(_end_all)
