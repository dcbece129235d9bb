"""A thread that is a worker: its channel and collation, and what ``get_worker_info()`` returns in it."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy
import torch

import ringloader._native as _native
from ringloader._common import pickling
from ringloader._torch import internals, stand_ins
from ringloader._worker import fetcher_collate, loop

# The worker that a thread is, as `noted`; and whether `get_worker_info` asks for it.
_local = threading.local()
_lock = threading.Lock()
_is_put = False


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
            if message is None or isinstance(message, (tuple, loop.Resume)):
                return message
            # A call, which answers where it wants to.
            message()
            del message

    def put(self, message: tuple[Any, Any]) -> None:
        self._queues.reply(self._worker, message)

    def is_done(self) -> bool:
        return self._queues.is_done()

    def failure(self) -> Any:
        wrapper = internals.ExceptionWrapper(where=f"in DataLoader worker thread {self._worker}")
        return pickling.whole(wrapper, is_sent=False)


def run(queues: _native.ThreadQueues, work: loop.Work) -> None:
    """Runs the worker loop in this thread. Unlike in a process, global generators are not seeded.

    Raises:
        BaseException: An error of the dataset that is no ``Exception``: the worker ends by it.
    """
    become_worker(work.base_seed, work.worker, work.workers, work.dataset)
    for option in work.options:
        option.join(work.worker, None)
    loop.run(ThreadChannel(queues, work.worker), work, fetcher_collate.put_native)


@dataclasses.dataclass(frozen=True, slots=True)
class RNG:
    """Generators of a worker's own. MIRRORS torch worker.py::_RNG, for versions that have none."""

    random_generator: random.Random
    torch_generator: torch.Generator
    numpy_generator: numpy.random.Generator | None = None


def put_worker_info_in_place() -> None:
    """Has torch's ``get_worker_info``, from now on, ask for the thread too. Nothing else is changed by it.

    In such a thread torch's collation, and others', would allocate shared memory: there it is private.
    """
    global _is_put
    with _lock:
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
