"""The times of batches where they are made: in workers, or without them here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ringloader._native as _native
from ringloader._worker.options import Fetcher, Position, WorkerOption, collator_of


class Timing(WorkerOption):
    """Lets a worker's clock record the moments of each batch, which travel with it.

    Args:
        clocks: The clocks of threads, by their workers; None for processes, which make their own.
    """

    position = Position.CLOCK

    def __init__(self, clocks: Sequence[_native.WorkerClock] | None = None) -> None:
        self._clocks = clocks

    def join(self, worker: int, port: _native.Port | None) -> None:
        if port is None:
            assert self._clocks is not None
            self._clock = self._clocks[worker]
        else:
            self._clock = _native.WorkerClock()
            port.time(self._clock)

    def finish(self, fetcher: Any) -> None:
        _time_collation(self._clock, fetcher)
        # The time until now was no wait for a task.
        self._clock.begin()


class TimingHere(WorkerOption):
    """Notes the times of each batch that the caller's process makes.

    Args:
        recorder: Where they are noted.
        is_iterable: True for a dataset without indices.
    """

    position = Position.CLOCK

    def __init__(self, recorder: _native.Recorder, is_iterable: bool) -> None:
        self._recorder = recorder
        self._clock = _native.WorkerClock()
        self._is_iterable = is_iterable

    def wrap(self, fetcher: Fetcher) -> Fetcher:
        return _native.TimedFetch(self._recorder, self._clock, fetcher, self._is_iterable)

    def finish(self, fetcher: Any) -> None:
        _time_collation(self._clock, fetcher)


def _time_collation(clock: _native.WorkerClock, fetcher: Any) -> None:
    """Puts a clock before the ``collate_fn`` of torch's fetcher; another one may have none."""
    collator = collator_of(fetcher)
    collate = getattr(collator, "collate_fn", None)
    if collate is not None:
        collator.collate_fn = _native.TimedCollate(clock, collate)
