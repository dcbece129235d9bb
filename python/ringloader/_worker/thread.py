"""A thread that is a worker."""

from __future__ import annotations

from typing import Any

import ringloader._native as _native
from ringloader._common import whole_errors
from ringloader._torch import internals
from ringloader._worker import fetcher_collate, loop
from ringloader._worker import thread_info as worker_info


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
        return whole_errors.whole(wrapper, is_sent=False)


def run(queues: _native.ThreadQueues, work: loop.Work) -> None:
    """Runs the worker loop in this thread. Unlike in a process, global generators are not seeded.

    Raises:
        BaseException: An error of the dataset that is no ``Exception``: the worker ends by it.
    """
    worker_info.note(work.base_seed, work.worker, work.workers, work.dataset)
    for option in work.options:
        option.join(work.worker, None)
    loop.run(ThreadChannel(queues, work.worker), work, fetcher_collate.put_native)
