"""The transport whose workers are threads: a batch is the object that the worker made."""

from __future__ import annotations

import atexit
import copy
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

import ringloader._native as _native
from ringloader._common import held_memory
from ringloader._log import logger
from ringloader._options.watchdog import ThreadNotes, Watchdog, WatchedThreads
from ringloader._torch import internals, modes
from ringloader._transport.protocol import Transport
from ringloader._worker import thread as worker
from ringloader._worker.loop import Work
from ringloader._worker.options import WorkerOption

_starting = threading.Lock()


def _begin_anew() -> None:
    # In a forked child no thread starts a worker.
    global _starting
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)


class _Ending:
    """The time that the end of an iterator waits for its workers: torch's time for one, for all together."""

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
        self, queues: _native.ThreadQueues, ending: _Ending, taken_over: modes.OfThread, work: Work
    ) -> None:
        super().__init__(name=f"pt_data_worker {work.worker}", daemon=True)
        self._queues = queues
        self._ending = ending
        self._taken_over = taken_over
        self._work: Work | None = work
        self._number = work.worker
        self._has_begun = threading.Event()
        # The error that ended the thread, if it was not told to end.
        self.error: BaseException | None = None

    @property
    def pid(self) -> int | None:
        """The number of this process, or None until the thread has begun."""
        return None if self.ident is None else os.getpid()

    @property
    def exitcode(self) -> int | None:
        """The exit code, as of a process: None until it has ended, then 0, or 1 if an exception ended it."""
        return None if self.ident is None or self.is_alive() else int(self.error is not None)

    def start(self) -> None:
        """Starts the worker. Its operators use one thread, as in a worker process; others' do as before."""
        # One at a time: a caller that has not asked before would take another's worker's number for its own,
        # and leave it to all threads that begin later.
        with _starting:
            threads = torch.get_num_threads()
            super().start()
            self._has_begun.wait()
            # The number that a thread sets is that of all which begin later too.
            torch.set_num_threads(threads)

    def run(self) -> None:
        """Runs the worker until it is told to end."""
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


class ThreadTransport(Transport):
    """The transport of one iterator with threads for workers."""

    engine: _native.ThreadQueues
    scheduler = _native.ThreadScheduler
    # An attribute: an iterator that lives on while modules are torn down finds their names None.
    _join_seconds = internals.JOIN_SECONDS

    def __init__(self, workers: int, options: Sequence[WorkerOption], watchdog: Watchdog | None) -> None:
        super().__init__(_native.ThreadQueues(workers), options, watchdog)
        self._threads: dict[int, WorkerThread] = {}
        self._ending = _Ending()
        _living.add(self)

    def start(self, work: Work) -> WorkerThread:
        """Starts the thread of a worker."""
        # Copies: an option that counts epochs counts those of one worker.
        work = work._replace(options=tuple(map(copy.copy, self.options)))
        thread = WorkerThread(self.engine, self._ending, modes.OfThread(), work)
        self._threads[work.worker] = thread
        thread.start()
        return thread

    def call(self, worker: int, function: Callable[[], object]) -> None:
        """Has a worker call a function behind its tasks."""
        self.engine.put(worker, function)

    def end(self, workers: Sequence[WorkerThread], told: Callable[[int], bool]) -> None:
        """Tells the threads to end, and waits as long as torch waits for one worker."""
        if self._final is not None:
            # They were ended because the interpreter exits, before torch ends iterators for that.
            return
        self.engine.set_done()
        for number in range(len(workers)):
            if told(number):
                self.send(number, None)
        for thread in workers:
            thread.join(self._join_seconds)

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
        # The iterator has waited for them, if its constructor came to an end.
        for thread in self._threads.values():
            if thread.is_alive():
                thread.join(internals.JOIN_SECONDS)
        left = [
            thread
            for thread in self._threads.values()
            if thread.is_alive() and thread is not threading.current_thread()
        ]
        if left:
            logger.warning(
                "%d of the worker threads are still in the dataset, and end when it returns: a thread cannot "
                "be killed",
                len(left),
            )
        self._threads.clear()

    def end_at_exit(self, until: float) -> None:
        """Has the workers end, and waits for them, before the interpreter goes."""
        if not self._begin_close():
            return
        self.engine.close()
        for thread in self._threads.values():
            thread.join(max(until - time.monotonic(), 0.0))


def make_transport(
    loader: Any, options: Sequence[WorkerOption] = (), watchdog: float | None = None
) -> ThreadTransport:
    """Makes the transport of one iterator of a loader with workers.

    Args:
        loader: The loader.
        options: The options that workers ask.
        watchdog: Seconds without a batch after which that is said; None: never.
    """
    held_memory.tell_of_forks()
    worker.put_worker_info_in_place()
    watching = None
    if watchdog is not None:
        notes = ThreadNotes()
        watching = Watchdog(watchdog, WatchedThreads(notes), loader.in_order)
        options = (*options, notes)
    elif loader.timeout:
        watching = Watchdog(None, WatchedThreads(None), loader.in_order)
    return ThreadTransport(loader.num_workers, options, watching)


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
