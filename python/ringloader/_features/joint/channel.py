"""``worker_task="sample"`` in workers: the channels of processes and of threads over tasks that all share."""

from __future__ import annotations

import collections
import functools
import os
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

import ringloader._native as _native
from ringloader._features.joint.parts import NOTHING, Joint, RunChannel, first_error
from ringloader._features.threads.thread import ThreadChannel
from ringloader._log import logger
from ringloader._torch import collating
from ringloader._worker.channel import ProcessChannel
from ringloader._worker.fetch import SampleFetcher
from ringloader._worker.options import EpochStart


class ProcessJoint(Joint):
    """Makes parts of batches in a worker process.

    Args:
        fds: The descriptors of the shared tasks' memory; how to get them, on their way to a worker.
        places: Batches that may be under way at once.
        window: Bytes of one, at most.
        keeps_whole: True if each batch is made by one worker.
        timed: True if runs are timed.
    """

    def __init__(
        self,
        fds: tuple[Any, Any],
        places: int,
        window: int,
        keeps_whole: bool,
        timed: bool,
    ) -> None:
        super().__init__(keeps_whole)
        self._fds = fds
        self._places = places
        self._window = window
        self._timed = timed
        self.port: _native.JointPort
        # Makes batches of rows; None where a batch is something else.
        self.rows: _native.SampleRows | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        sent = tuple(map(reduction.DupFd, self._fds))
        return ProcessJoint, (sent, self._places, self._window, self._keeps_whole, self._timed)

    def fill(self, samples: SampleFetcher) -> None:
        super().fill(samples)
        collate = collating.collate_within(samples.collate_fn_alone, _native.Collate)
        self.rows = _native.SampleRows(collate) if collate is not None and self._makes_parts else None

    def join(self, worker: int, port: _native.Port | None, start: EpochStart) -> Callable[..., Any]:  # noqa: ARG002
        assert port is not None
        fds = [fd if isinstance(fd, int) else fd.detach() for fd in self._fds]
        try:
            words, parts = fds
            self.port = _native.JointPort(port, words, parts, self._places, self._window, self._timed)
        finally:
            for fd in fds:
                os.close(fd)
        return lambda _usual: functools.partial(JointChannel, joint=self, start=start)

    def leave_process(self) -> None:
        """Drops the memory, and the channel that has it too."""
        del self.port, self.run_channel


def answer_of(
    channel: RunChannel, claimed: _native.Claimed | None, message: tuple[Any, Any]
) -> tuple[Any, Any] | None:
    """Returns the message that a worker sends in place of another one; None: none.

    Args:
        channel: The worker's.
        claimed: The run whose samples are not made yet.
        message: A message of the worker loop.
    """
    number, data = message
    if data is NOTHING:
        return None
    if claimed is None or not isinstance(number, int):
        return message
    # The worker cannot make samples: the error is the run's.
    if not channel.finish(claimed, data):
        return None
    return number, first_error(channel.parts(claimed, data)) or data


class JointChannel(ProcessChannel):
    """A :class:`~ringloader._worker.loop.Channel` over tasks that all workers share.

    The worker begins an epoch once all batches of the one before are sent, by any worker. Until then
    it makes samples of those: a dataset is in one epoch at a time.

    Args:
        port: The process's end.
        worker: The worker's number.
        joint: The option, which has joined.
        start: The beginning of the worker's first epoch.
    """

    def __init__(self, port: _native.Port, worker: int, joint: ProcessJoint, start: EpochStart) -> None:
        super().__init__(port, worker)
        self._joint = joint
        self._shared = joint.port
        # The starts of the worker's epoch, and of the epochs that it was told to begin.
        self._starts = collections.deque([start])
        # The last claim, until its samples are sent, or kept for its batch.
        self._claimed: _native.Claimed | None = None
        # The claim of the batch that this worker collates.
        self._collating: _native.Claimed | None = None
        joint.run_channel = self

    def get(self) -> Any:
        while True:
            following = self._starts[1].of_tasks if len(self._starts) > 1 else None
            found = self._shared.get(self._starts[0].of_tasks, following)
            if found is None:
                self._starts.popleft()
                return self._starts[0]
            if isinstance(found, _native.Claimed):
                self._claimed = found
                return found.seq, found
            if not isinstance(found[0], EpochStart):
                return found[0]
            self._starts.append(found[0])

    def ahead(self) -> Any:
        """Returns the end of the main process, but no task: a worker claims one run after another."""
        return (None,) if self._port.parent_ended else None

    def put(self, message: tuple[Any, Any]) -> None:
        answer = answer_of(self, self._claimed, message)
        if answer is None:
            return
        if not self._shared.put_collated(answer):
            self._port.put(answer)
        collating, self._collating = self._collating, None
        if collating is not None:
            self._shared.note_sent(collating)

    def finish(self, claimed: _native.Claimed, samples: Any) -> bool:
        """Sends the samples of a run, or their error. Returns True if this worker collates the batch."""
        return self._is_last(claimed, self._finish(claimed, samples))

    def _is_last(self, claimed: _native.Claimed, is_last: bool) -> bool:
        self._claimed = None
        self._collating = claimed if is_last else None
        return is_last

    def _finish(self, claimed: _native.Claimed, samples: Any) -> bool:
        if self._shared.begin_last(claimed):
            return True
        rows = self._joint.rows
        try:
            if rows is not None and rows.write_rows(self._shared, claimed, samples):
                return self._shared.finish_rows(claimed)
            return self._shared.put(claimed, samples)
        except Exception as error:
            if self._shared.note_unsent():
                logger.warning(
                    "worker_task='sample': samples cannot be sent from one worker to another, so each batch "
                    "is made by one worker from now on: %s: %s",
                    type(error).__name__,
                    error,
                )
            return self._shared.put_nothing(claimed)

    def finish_without(self, claimed: _native.Claimed) -> bool:
        """Finishes a run without samples. Returns True if this worker answers for the batch."""
        is_last = self._shared.begin_last(claimed) or self._shared.put_nothing(claimed)
        return self._is_last(claimed, is_last)

    def note_time(self, claimed: _native.Claimed, seconds: float) -> None:
        self._shared.note_time(claimed, seconds)

    def collated(self, claimed: _native.Claimed, own: Any) -> Any:
        rows = self._joint.rows
        return None if rows is None else rows.over_rows(self._shared, claimed, own)

    def parts(self, claimed: _native.Claimed, own: Any) -> list[Any] | None:
        try:
            return self._shared.parts(claimed, own)
        except Exception:
            # Samples that cannot be unpickled here can be made here.
            logger.debug("worker_task='sample': a batch is made again by one worker", exc_info=True)
            return None


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
        answer = answer_of(self, self._taken, message)
        if answer is not None:
            super().put(answer)

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
