"""``worker_task="sample"`` in workers: parts of batches that all workers make, of processes and of threads.

A worker claims a run of a batch's samples, makes them, and leaves them where the others find them. The worker
that makes the last run collates the batch, and sends it.
"""

from __future__ import annotations

import collections
import functools
import os
import time
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

import ringloader._native as _native
from ringloader._features.threads.thread import ThreadChannel
from ringloader._log import logger
from ringloader._torch import collating, internals
from ringloader._worker.channel import ProcessChannel
from ringloader._worker.fetch import Parts, SampleFetcher
from ringloader._worker.options import EpochStart, Fetcher, Position, WorkerOption

# The result of a run whose batch another worker collates.
NOTHING = object()
# The time of a run whose samples are made at once: it could have any number of them.
_SHORT_SECONDS = 1e-6


class Joint(WorkerOption):
    """Makes parts of batches in a worker.

    Args:
        keeps_whole: True if each batch is made by one worker.
    """

    position = Position.JOINT
    # Set before an epoch begins, where the worker's channel is made.
    run_channel: JointChannel | JointThreadChannel

    def __init__(self, keeps_whole: bool) -> None:
        self._keeps_whole = keeps_whole
        # True if the samples of a run are made at once: a run has as many as an even share then.
        self._are_at_once = False
        # True if the batches of the epoch are made in parts.
        self._makes_parts = False

    def fill(self, samples: SampleFetcher) -> None:
        self._are_at_once = samples.ahead is not None
        self._makes_parts = samples.makes_parts = not self._keeps_whole and samples.is_by_index
        if self._makes_parts:
            samples.use("worker_task='sample'")

    def wrap(self, fetcher: Fetcher) -> Fetcher:
        return _JointFetcher(fetcher, self.run_channel, self._makes_parts, self._are_at_once)


def first_error(parts: list[Any] | None) -> Any:
    """Returns the error of the batch's first samples that have one; None if there is none."""
    wrapped = internals.ExceptionWrapper
    return next((part for part in parts or () if isinstance(part, wrapped)), None)


class _JointFetcher:
    """In front of the fetchers of all other options: makes runs, and collates.

    Args:
        fetcher: Makes runs, and collates their samples.
        channel: The worker's.
        makes_parts: False for whole batches.
        are_at_once: True if the samples of a run are made at once.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        channel: JointChannel | JointThreadChannel,
        makes_parts: bool,
        are_at_once: bool,
    ) -> None:
        self._fetcher = fetcher
        self._channel = channel
        self._makes_parts = makes_parts
        self._are_at_once = are_at_once

    def begin(self, run: _native.Claimed) -> Any:
        """Begins the samples of a run, if they may be begun before it is fetched. Returns what has begun."""
        if run.is_stale or run.is_collation or not self._makes_parts:
            return None
        begun: Any = self._fetcher.begin(run.run_index())  # type: ignore[attr-defined]
        return begun

    def fetch(self, run: _native.Claimed, /) -> Any:
        if run.is_stale:
            return None if self._channel.finish_without(run) else NOTHING
        if not self._makes_parts:
            if not self._channel.finish_without(run):
                return NOTHING
            return self._fetcher.fetch(run.whole_index())
        own: Any = None
        if run.is_collation:
            self._channel.finish_without(run)
        else:
            begun = time.perf_counter()
            try:
                own = self._fetcher.fetch(run.run_index())
            except Exception:
                own = self._channel.failure()
            took = time.perf_counter() - begun
            self._channel.note_time(run, min(took, _SHORT_SECONDS) if self._are_at_once else took)
            if not self._channel.finish(run, own):
                return NOTHING
        return self._collated(run, own)

    def _collated(self, run: _native.Claimed, own: Any) -> Any:
        if isinstance(own, internals.ExceptionWrapper) and run.is_whole:
            return own
        if run.is_whole and not run.is_collation:
            parts = [own]
        else:
            try:
                batch = self._channel.collated(run, own)
            except Exception:
                # Raised again below, where errors are handled.
                batch = None
            if batch is not None:
                return batch
            parts = self._channel.parts(run, own) or [self._fetcher.fetch(run.whole_index())]
            error = first_error(parts)
            if error is not None:
                return error
        del own
        # With the places of the batch: generators are set by the first one.
        return self._fetcher.fetch(run.with_samples(Parts(parts, run.whole_index().index)))


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
    channel: JointChannel | JointThreadChannel, claimed: _native.Claimed | None, message: tuple[Any, Any]
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
        """Notes the time that the samples of a run took."""
        self._shared.note_time(claimed, seconds)

    def collated(self, claimed: _native.Claimed, own: Any) -> Any:
        """Returns the batch, if the samples of all runs lie in its rows; else None."""
        rows = self._joint.rows
        return None if rows is None else rows.over_rows(self._shared, claimed, own)

    def parts(self, claimed: _native.Claimed, own: Any) -> list[Any] | None:
        """Returns the samples of all runs; None if they are lost. ``own`` are the worker's last."""
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
