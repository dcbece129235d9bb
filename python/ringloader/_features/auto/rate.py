"""The rate at which a number of workers makes batches, and how well it is known."""

from __future__ import annotations

import math

# The least time of a sample, in seconds.
_SECONDS = 0.05
# The rounds after which a sample may end within a round.
_ROUNDS = 4
# The assumption before there are samples: their standard deviation as a part of their mean, and the
# number of samples that this assumption is worth.
_DEVIATION, _WORTH = 0.3, 2
# The samples and batches of a rate that is known.
_SAMPLES, _BATCHES = 2, 8
# A caller that takes more than this many times the usual time of a batch was doing something else.
_ELSE = 2


class Rate:
    """The rate of batches with a number of workers, in samples.

    A sample is the time of whole rounds, as many batches as there are workers: in order, batches often come
    in bursts of a round. It does not count if the caller hardly waited, or did something else for long: then
    workers may have had nothing to do.

    Args:
        workers: The number of workers.
        waits: The part of a sample's time for which the caller must have waited.

    Attributes:
        workers: The number of workers.
        samples: The samples that count.
        seconds: The time of all samples.
        waited: Seconds of it for which the caller waited.
    """

    def __init__(self, workers: int, waits: float) -> None:
        self.workers = workers
        self.samples = 0
        self.seconds = self.waited = 0.0
        self._waits = waits
        # The totals at the end of the last sample: batches, seconds, and seconds of waiting.
        self._last: tuple[int, float, float] | None = None
        # The samples in which the caller did something else. If they are many, it is what it does.
        self._strange = 0
        # Batches and seconds of the samples that count; sums of their times for a batch, and of the squares.
        self._batches, self._counted = 0, 0.0
        self._times, self._squares = 0.0, 0.0

    def begin_epoch(self) -> None:
        """Begins with new totals."""
        self._last = None

    def note(self, batches: int, seconds: float, waited: float) -> None:
        """Notes totals.

        Args:
            batches: The batches that were returned.
            seconds: The time.
            waited: Seconds for which the caller waited.
        """
        if self._last is None:
            self._last = batches, seconds, waited
            return
        count, time, waiting = batches - self._last[0], seconds - self._last[1], waited - self._last[2]
        is_whole = count % self.workers == 0 or count >= _ROUNDS * self.workers
        if count <= 0 or time < _SECONDS or not is_whole:
            return
        self._last = batches, seconds, waited
        self.seconds += time
        self.waited += waiting
        if waiting < self._waits * time:
            return
        if self._strange < self.samples and (time - waiting) * self.value > _ELSE * count:
            self._strange += 1
            return
        self.samples += 1
        self._batches += count
        self._counted += time
        self._times += time / count
        self._squares += (time / count) ** 2

    @property
    def is_known(self) -> bool:
        """True if there are enough samples and batches to see how much they vary."""
        return self.samples >= _SAMPLES and self._batches >= _BATCHES

    @property
    def value(self) -> float:
        """Batches per second. There must be a sample."""
        return self._batches / self._counted

    @property
    def deviations(self) -> float:
        """The sum of the squares of the samples' deviations from their mean, as parts of it."""
        if self.samples < 2:
            return 0.0
        mean = self._times / self.samples
        return max(self._squares / mean**2 - self.samples, 0.0)


def error(*rates: Rate) -> float:
    """Returns the standard error of the logarithm of a rate, or of the quotient of two, which vary alike."""
    freedom = _WORTH + sum(max(rate.samples - 1, 0) for rate in rates)
    variance = (_WORTH * _DEVIATION**2 + sum(rate.deviations for rate in rates)) / freedom
    return math.sqrt(variance * sum(1 / rate.samples for rate in rates))
