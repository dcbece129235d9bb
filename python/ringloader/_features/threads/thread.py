"""A thread that is a worker: its channel, its ``get_worker_info()`` and generators of its own."""

from __future__ import annotations

import dataclasses
import os
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy
import torch

import ringloader._native as _native
from ringloader._common import pickling
from ringloader._torch import internals, modes, stand_ins
from ringloader._worker import collate, loop
from ringloader._worker.loop import Work
from ringloader._worker.options import EpochStart

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
        make_channel = option.join(work.worker, None, work.start) or make_channel
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
