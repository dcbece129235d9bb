"""Threads that are workers: their transport, and in each of them its channel and its ``get_worker_info()``.

A batch is the object that the worker made.
"""

from __future__ import annotations

import atexit
import copy
import dataclasses
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy
import torch

import ringloader._native as _native
from ringloader._common import held_memory, pickling
from ringloader._late.watchdog import ThreadWatchdog, Watchdog
from ringloader._log import logger
from ringloader._options import worker_task
from ringloader._options.table import Options
from ringloader._torch import internals, modes, stand_ins
from ringloader._transport.protocol import Transport
from ringloader._worker import collate, loop
from ringloader._worker.loop import Work
from ringloader._worker.options import EpochStart, WorkerOption, in_order
from ringloader._worker.sharing import NOTHING, Sharing, first_error

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

# The worker that a thread is, as `noted`.
_local = threading.local()
# True once `get_worker_info` asks for it.
_is_put = False
_starting = threading.Lock()


def _begin_anew() -> None:
    # In a forked child no thread starts a worker.
    global _starting
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)


class ThreadChannel:
    """A :class:`~ringloader._worker.loop.Channel` over queues between threads.

    Args:
        queues: The queues of the iterator.
        worker: The worker's number.
    """

    shares_dataset = True

    def __init__(self, queues: _native.ThreadQueues, worker: int) -> None:
        self._queues = queues
        self._worker = worker

    def get(self) -> Any:
        while True:
            message = self._queues.get(self._worker)
            if message is None or isinstance(message, (tuple, EpochStart)):
                return message
            message = self._other(message)
            if message is not None:
                return message

    def _other(self, call: Any) -> Any:
        """Makes a call, which answers where it wants to. Returns None."""
        call()

    def put(self, message: tuple[Any, Any]) -> None:
        self._queues.reply(self._worker, message)

    def is_done(self) -> bool:
        return self._queues.is_done()

    def failure(self) -> Any:
        wrapper = internals.ExceptionWrapper(where=f"in DataLoader worker thread {self._worker}")
        return pickling.whole(wrapper, is_sent=False)


class SharingThreadChannel(ThreadChannel):
    """A :class:`ThreadChannel` over tasks that all threads share.

    Args:
        queues: The queues of the iterator.
        worker: The worker's number.
        sharing: The worker's option.
    """

    def __init__(self, queues: _native.ThreadQueues, worker: int, sharing: Sharing) -> None:
        super().__init__(queues, worker)
        # The run that was taken last, until its samples are there.
        self._taken: _native.ThreadRun | None = None
        sharing.channel = self

    def _other(self, call: Any) -> Any:
        if not isinstance(call, _native.ThreadRun):
            return super()._other(call)
        self._taken = call
        return call.seq, call

    def put(self, message: tuple[Any, Any]) -> None:
        number, data = message
        if data is NOTHING:
            return
        taken = self._taken
        if taken is not None and isinstance(number, int):
            # The worker cannot make samples: the error is the run's.
            if not self.finish(taken, data):
                return
            message = number, first_error(self.parts(taken, data)) or data
        super().put(message)

    def note_time(self, run: _native.ThreadRun, seconds: float) -> None:
        self._queues.note_time(run, seconds)

    def finish(self, run: _native.ThreadRun, samples: Any) -> bool:
        self._taken = None
        return self._queues.finish(self._worker, run, samples)

    def finish_without(self, run: _native.ThreadRun) -> bool:
        self._taken = None
        return run.finish_without()

    def collated(self, run: _native.ThreadRun, own: Any) -> None:
        """Returns None: samples of threads are in nobody's way where they are."""

    def parts(self, run: _native.ThreadRun, own: Any) -> list[Any]:  # noqa: ARG002
        return self._queues.parts(self._worker, run)


def _channel(queues: _native.ThreadQueues, work: Work) -> ThreadChannel:
    for option in work.options:
        if isinstance(option, Sharing):
            return SharingThreadChannel(queues, work.worker, option)
    return ThreadChannel(queues, work.worker)


def _run(queues: _native.ThreadQueues, work: Work) -> None:
    """Runs the worker loop in this thread. Unlike in a process, global generators are not seeded.

    Raises:
        BaseException: An error of the dataset that is no ``Exception``: the worker ends by it.
    """
    become_worker(work.base_seed, work.worker, work.workers, work.dataset)
    for option in work.options:
        option.join(work.worker, None)
    loop.run(_channel(queues, work), work, collate.put_native)


@dataclasses.dataclass(frozen=True, slots=True)
class RNG:
    """Generators of a worker's own. MIRRORS torch worker.py::_RNG, for versions that have none."""

    random_generator: random.Random
    torch_generator: torch.Generator
    numpy_generator: numpy.random.Generator | None = None


def put_worker_info_in_place() -> None:
    """Makes torch's ``get_worker_info`` look at the thread too, from now on. Changes nothing else.

    In such a thread torch's collation, and others', would allocate shared memory: there it is private.
    """
    global _is_put
    with _starting:
        if not _is_put:
            stand_ins.replace_worker_info(_of_thread)
            stand_ins.replace_new_shared(_private_in_threads)
            _is_put = True


def become_worker(base_seed: int, worker: int, workers: int, dataset: Any) -> None:
    """Makes this thread a worker, with torch's seeds for its number, until the thread ends."""
    outside = torch.utils.data.get_worker_info()
    seed = base_seed + worker
    # torch's word for a worker with generators of its own, which `torch.thread_safe_generator` asks for too.
    info = internals.WorkerInfo(
        id=worker,
        num_workers=workers,
        seed=seed,
        dataset=dataset,
        rng=_generators(base_seed, worker, seed),
        worker_method="thread",
    )
    _local.noted = (outside, info)


def _generators(base_seed: int, worker: int, seed: int) -> Any:
    return (internals.RNG or RNG)(
        random_generator=random.Random(seed),
        torch_generator=torch.Generator().manual_seed(seed),
        numpy_generator=numpy.random.default_rng(internals.generate_state(base_seed, worker)),
    )


def _of_thread(of_process: Any) -> Any:
    noted = getattr(_local, "noted", None)
    # A process that was forked by the thread, and became a worker of torch's, is that worker.
    return of_process if noted is None or noted[0] is not of_process else noted[1]


def _private_in_threads(torchs_own: Callable[..., Any]) -> Callable[..., Any]:
    def _new_shared(cls: Any, size: int, *, device: Any = "cpu") -> Any:
        info = torch.utils.data.get_worker_info()
        is_threads = info is not None and getattr(_local, "noted", (None, None))[1] is info
        if is_threads and torch.device(device).type == "cpu":
            return cls(size)
        return torchs_own(cls, size, device=device)

    return _new_shared


class WorkerThread(threading.Thread):
    """A worker, as torch's iterator uses process objects.

    It has neither the iterator nor the transport, so that these go when their last user does.

    Args:
        queues: Where its tasks come from.
        taken_over: What it has of the thread that made its iterator.
        work: What it does.
    """

    def __init__(self, queues: _native.ThreadQueues, taken_over: modes.OfThread, work: Work) -> None:
        super().__init__(name=f"pt_data_worker {work.worker}", daemon=True)
        self._queues = queues
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
            self._taken_over.run(_run, self._queues, work)
        except BaseException as error:
            self.error = error
        finally:
            self._has_begun.set()
            del work
            self._queues.note_end(self._number)

    def terminate(self) -> None:
        """Does nothing: no thread can end another. It ends when the dataset returns."""


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

    def __init__(self, workers: int, options: Sequence[WorkerOption], watchdog: Watchdog | None) -> None:
        super().__init__(_native.ThreadQueues(workers), options, watchdog)
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
        self.engine.begin_worker(work.worker)
        return self.start(work)

    def has_left(self, worker: int) -> bool:
        """True once the thread of a worker that was told to end has ended."""
        return not self._threads[worker].is_alive()

    def retire(self, worker: int) -> None:
        """Does nothing: a thread that has ended is nowhere else."""

    def process_of(self, worker: int) -> Any:
        """Returns the thread that was started last as a worker; None before."""
        return self._threads.get(worker)

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


def make_transport(
    loader: TorchLoader,
    options: Options,
    worker_options: Sequence[WorkerOption],
    clocks: Sequence[_native.WorkerClock],
) -> ThreadTransport:
    """Makes the transport of one iterator of a loader with workers.

    Args:
        loader: The loader.
        options: Its options.
        worker_options: The options that workers ask.
        clocks: The clocks of the workers, if times are noted.
    """
    held_memory.tell_of_forks()
    put_worker_info_in_place()
    watching = None
    shares = options.worker_task == "sample"
    if loader.timeout or options.watchdog is not None:
        watching = ThreadWatchdog(options.watchdog, turn_is_known=loader.in_order and not shares)
        worker_options = in_order(*worker_options, *watching.options)
    if shares:
        whole = worker_task.keeps_whole(loader)
        worker_options = in_order(*worker_options, Sharing(whole))
    made = ThreadTransport(loader.num_workers, worker_options, watching)
    if shares:
        made.shared_tasks = worker_task.most_tasks(loader)
        made.engine.share_tasks(not whole)
    if clocks:
        made.engine.time(clocks)
    return made


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
