"""``worker_task="sample"`` in workers: parts of batches that all workers make.

A worker claims a run of a batch's samples, makes them, and leaves them where the others find them. The worker
that makes the last run collates the batch, and sends it.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

from ringloader._torch import internals
from ringloader._worker.fetch import Parts, SampleFetcher
from ringloader._worker.options import Fetcher, Position, WorkerOption

# The result of a run whose batch another worker collates.
NOTHING = object()
# The time of a run whose samples are made at once: it could have any number of them.
_SHORT_SECONDS = 1e-6


class Run(Protocol):
    """Some of a batch's samples that a worker has run; all of them, or none where only collation is left."""

    @property
    def is_whole(self) -> bool:
        """True if the batch has no other run."""

    @property
    def is_stale(self) -> bool:
        """True if no call waits for the batch any more."""

    @property
    def is_collation(self) -> bool:
        """True if all samples are made, and this worker must collate the batch."""

    def whole_index(self) -> Any:
        """The index of the batch."""

    def run_index(self) -> Any:
        """The index of the run, as that of a batch."""

    def with_samples(self, samples: Parts) -> Any:
        """Returns samples in place of the batch's index, with its places."""


class RunChannel(Protocol):
    """The calls with which a worker makes runs, beyond its :class:`~ringloader._worker.loop.Channel`."""

    def failure(self) -> Any:
        """Wraps the error that is being handled."""

    def note_time(self, run: Any, seconds: float) -> None:
        """Notes the time that the samples of a run took."""

    def finish(self, run: Any, samples: Any) -> bool:
        """Leaves the samples of a run, or their error. Returns True if this worker collates the batch."""

    def finish_without(self, run: Any) -> bool:
        """Finishes a run without samples. Returns True if this worker answers for the batch."""

    def collated(self, run: Any, own: Any) -> Any:
        """Returns the batch, if the samples of all runs lie in its rows; else None.

        ``own`` are the worker's last samples.
        """

    def parts(self, run: Any, own: Any) -> list[Any] | None:
        """Returns the samples of all runs; None if they are lost. ``own`` are the worker's last."""


class Joint(WorkerOption):
    """Makes parts of batches in a worker.

    Args:
        keeps_whole: True if each batch is made by one worker.
    """

    position = Position.JOINT
    # Set before an epoch begins, where the worker's channel is made.
    run_channel: RunChannel

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

    def __init__(self, fetcher: Fetcher, channel: RunChannel, makes_parts: bool, are_at_once: bool) -> None:
        self._fetcher = fetcher
        self._channel = channel
        self._makes_parts = makes_parts
        self._are_at_once = are_at_once

    def begin(self, run: Run) -> Any:
        """Begins the samples of a run, if they may be begun before it is fetched. Returns what has begun."""
        if run.is_stale or run.is_collation or not self._makes_parts:
            return None
        begun: Any = self._fetcher.begin(run.run_index())  # type: ignore[attr-defined]
        return begun

    def fetch(self, run: Run, /) -> Any:
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

    def _collated(self, run: Run, own: Any) -> Any:
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
