"""The end of the worker loop in a thread: a channel over the queues between threads.

A batch is the object that the worker made.
"""

from __future__ import annotations

from typing import Any

import ringloader._native as _native
from ringloader._common import pickling
from ringloader._features.joint.parts import NOTHING, Joint, first_error
from ringloader._torch import internals
from ringloader._worker.loop import Work
from ringloader._worker.options import EpochStart


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


class JointThreadChannel(ThreadChannel):
    """A :class:`ThreadChannel` over tasks that all threads share.

    Args:
        queues: The queues of the iterator.
        worker: The worker's number.
        joint: The worker's option.
    """

    def __init__(self, queues: _native.ThreadQueues, worker: int, joint: Joint) -> None:
        super().__init__(queues, worker)
        # The run that was taken last, until its samples are made.
        self._taken: _native.ThreadRun | None = None
        joint.channel = self

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
        return self._queues.finish(self._worker, run, None)

    def collated(self, run: _native.ThreadRun, own: Any) -> None:
        """Returns None: samples of threads stay where they are."""

    def parts(self, run: _native.ThreadRun, own: Any) -> list[Any] | None:  # noqa: ARG002
        return self._queues.parts(self._worker, run)


def channel_for(queues: _native.ThreadQueues, work: Work) -> ThreadChannel:
    """Returns the channel of a worker."""
    for option in work.options:
        if isinstance(option, Joint):
            return JointThreadChannel(queues, work.worker, option)
    return ThreadChannel(queues, work.worker)
