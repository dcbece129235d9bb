"""``worker_task="sample"`` in worker threads: the channel over tasks that all of them share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import ringloader._native as _native
from ringloader._features.joint.parts import NOTHING, Joint, first_error
from ringloader._features.threads.thread import ThreadChannel
from ringloader._worker.options import EpochStart


class ThreadJoint(Joint):
    """Makes parts of batches in a worker thread."""

    def join(self, worker: int, port: Any, start: EpochStart) -> Callable[..., Any]:  # noqa: ARG002
        return lambda _usual: functools.partial(JointThreadChannel, joint=self)


class JointThreadChannel(ThreadChannel):
    """A :class:`ThreadChannel` over tasks that all threads share.

    Args:
        queues: The queues of the iterator.
        worker: The worker's number.
        joint: The worker's option.
    """

    def __init__(self, queues: _native.ThreadQueues, worker: int, joint: ThreadJoint) -> None:
        super().__init__(queues, worker)
        # The run that was taken last, until its samples are made.
        self._taken: _native.Claimed | None = None
        joint.run_channel = self

    def _other(self, call: Any) -> Any:
        if not isinstance(call, _native.Claimed):
            return super()._other(call)
        self._taken = call
        return call.seq, call

    def ahead(self) -> None:
        """Returns None: a worker claims a run once it has made the last one."""

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

    def note_time(self, run: _native.Claimed, seconds: float) -> None:
        self._queues.note_time(run, seconds)

    def finish(self, run: _native.Claimed, samples: Any) -> bool:
        self._taken = None
        return self._queues.finish(self._worker, run, samples)

    def finish_without(self, run: _native.Claimed) -> bool:
        self._taken = None
        return self._queues.finish(self._worker, run, None)

    def collated(self, run: _native.Claimed, own: Any) -> None:
        """Returns None: samples of threads stay where they are."""

    def parts(self, run: _native.Claimed, own: Any) -> list[Any] | None:  # noqa: ARG002
        return self._queues.parts(self._worker, run)
