"""A thread that is a worker, and its channel."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import ringloader._native as _native
from ringloader._common import pickling
from ringloader._features import worker_info
from ringloader._torch import internals, modes
from ringloader._worker import collate, loop
from ringloader._worker.loop import Work
from ringloader._worker.options import EpochStart


def become_worker(base_seed: int, worker: int, workers: int, dataset: Any) -> None:
    """Makes this thread a worker, with torch's seeds for its number, until the thread ends."""
    seed = base_seed + worker
    # torch's word for a worker with generators of its own, which `torch.thread_safe_generator` asks for too.
    info = internals.WorkerInfo(
        id=worker,
        num_workers=workers,
        seed=seed,
        dataset=dataset,
        rng=worker_info.generators(seed, internals.generate_state(base_seed, worker)),
        worker_method="thread",
    )
    worker_info.take_over(info)


class ThreadChannel:
    """A :class:`~ringloader._worker.loop.Channel` over queues between threads.

    A batch is the object that the worker made.

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

    def ahead(self) -> Any:
        """Returns the next message in a tuple, before its turn; None if there is none. Never waits."""
        while (found := self._queues.ahead(self._worker)) is not None:
            if found[0] is None or isinstance(found[0], (tuple, EpochStart)):
                return found
            self._other(found[0])
        return None

    def begin_task(self) -> None:
        """Notes the turn of a task that was taken before it."""
        self._queues.begin_task(self._worker)

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


def _run(queues: _native.ThreadQueues, work: Work) -> None:
    """Runs the worker loop in this thread. Unlike in a process, global generators are not seeded.

    Raises:
        BaseException: An error of the dataset that is no ``Exception``: the worker ends by it.
    """
    become_worker(work.base_seed, work.worker, work.workers, work.dataset)
    make_channel: Callable[..., ThreadChannel] = ThreadChannel
    for option in work.options:
        replace = option.join(work.worker, None, work.start)
        make_channel = make_channel if replace is None else replace(make_channel)
    loop.run(make_channel(queues, work.worker), work, collate.put_native)


class WorkerThread(threading.Thread):
    """A worker, as torch's iterator uses process objects.

    Holds no reference to iterator or transport, so that they can be collected.

    Args:
        queues: Where its tasks come from.
        taken_over: What it has of the thread that made its iterator.
        work: What it does.
    """

    def __init__(self, queues: _native.ThreadQueues, taken_over: modes.OfThread, work: Work) -> None:
        super().__init__(name=f"pt_data_worker {work.worker}", daemon=True)
        self._queues = queues
        # Until it runs: its work and its context have the dataset.
        self._given: tuple[Work, modes.OfThread] | None = (work, taken_over)
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
        with worker_info.threads_put_back():
            super().start()
            self._has_begun.wait()

    def run(self) -> None:
        """Runs the worker until it is told to end."""
        given, self._given = self._given, None
        assert given is not None
        try:
            internals.set_thread_name("pt_data_worker")
            worker_info.use_one_thread()
            self._has_begun.set()
            given[1].run(_run, self._queues, given[0])
        except BaseException as error:
            self.error = error
        finally:
            self._has_begun.set()
            del given
            self._queues.note_end(self._number)

    def terminate(self) -> None:
        """Does nothing: no thread can end another. It ends when the dataset returns."""
