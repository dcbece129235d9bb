"""The decision how many workers a loader has: by measurements alone, without clocks and processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

# The caller is the limit where it waits for less than this part of the time.
_CALLER_WAITS = 0.1
# Workers mostly wait where they neither run nor are ready for this part of the time.
_MOSTLY = 0.6
# The least idle time of processors that is room for one more worker, in processors.
_IDLE_CORES = 0.5
# The part of the time that the control group may be throttled without being short of processors.
_THROTTLED = 0.05
# The part of the time for which workers must have had tasks.
_BUSY = 0.75
# Workers must raise the rate by this part of their share.
_PART = 1 / 3

# Changes come faster for the first batches and the first seconds of a loader.
RAMP_BATCHES, RAMP_SECONDS = 100, 5.0
# The least length of a look: its rounds of as many batches as there are workers, and its seconds.
_ROUNDS, _RAMP_SECONDS = 4, 0.25
# Its least batches and seconds afterwards.
_BATCHES, _SECONDS = 20, 2.0
# The pause after the first refusal, in seconds. Each is twice the last.
_PAUSE = 1.0


@dataclasses.dataclass(frozen=True)
class Measured:
    """The figures of a look: of the time since the last one.

    Attributes:
        seconds: Its length.
        batches: Batches that were returned in it.
        waited: Seconds for which the caller waited for batches.
        busy: The part of the time for which each worker had a task, of the worker that had the fewest.
        running: The part of the time for which workers ran, on average.
        waiting: The part of the time for which they neither ran nor were ready to, on average.
        idle_cores: Processors that had nothing to do, on average.
        throttled: The part of the time for which the control group might not run.
    """

    seconds: float
    batches: int
    waited: float
    busy: float = 1.0
    running: float = 0.0
    waiting: float = 0.0
    idle_cores: float = 0.0
    throttled: float = 0.0

    @property
    def rate(self) -> float:
        """Batches per second."""
        return self.batches / self.seconds if self.seconds > 0 else 0.0

    @property
    def wait_share(self) -> float:
        """The part of the time for which the caller waited."""
        return min(self.waited / self.seconds, 1.0) if self.seconds > 0 else 0.0

    def __str__(self) -> str:
        return (
            f"{self.rate:.3g} batches/s, the caller waits {self.wait_share:.0%} of the time, workers run "
            f"{self.running:.0%} and wait {self.waiting:.0%}, {self.idle_cores:.1f} processors are idle"
            + (f", throttled {self.throttled:.0%}" if self.throttled else "")
        )


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of the number of workers.

    Attributes:
        at: The time, in nanoseconds of the monotonic clock.
        number: The number from then on.
        why: The reason, with what was measured.
    """

    at: int
    number: int
    why: str


@dataclasses.dataclass(frozen=True)
class Decision:
    """A decision.

    Attributes:
        change: 1 to add a worker, -1 to end one, 0 to change nothing.
        why: The reason, for the log.
    """

    change: int
    why: str = ""


class Controller:
    """Decides how many workers there are, by one more or one fewer at a time.

    It adds a worker where the caller waits, all workers are busy, and processors are idle or the workers
    mostly wait. The next look compares the rates: a worker that did not raise the rate by a third of its
    share is ended. Other programs may have been in the way, so that is no refusal for good: another one is
    tried after a pause, which doubles each time. While the first batches come, several workers may be added
    after one look.

    INVARIANT: after the first :data:`RAMP_BATCHES` batches and :data:`RAMP_SECONDS` seconds there is at most
    one change in 20 batches and in 2 seconds, whichever is longer. None is added while the caller is the
    limit.

    Args:
        bound: The most workers for work that needs processors.
        most: The most workers for work that waits.

    Attributes:
        number: The number of workers. The caller does what is decided, or calls :meth:`undo`.
        is_settled: True if batches come from the workers that run now, since the last change of their number.
    """

    def __init__(self, bound: int, most: int) -> None:
        self.bound = bound
        self.most = most
        self.number = 1
        self.is_settled = True
        # Batches and seconds of all epochs.
        self._batches, self._seconds = 0, 0.0
        # The number, and the rate, without the workers on trial.
        self._before: tuple[int, float] | None = None
        # True once a worker was refused: then one at a time is tried.
        self._was_refused = False
        # The time until which no worker is tried, and the pause after the next refusal.
        self._paused_until, self._pause = 0.0, _PAUSE
        # The workers that were added after the last look.
        self._added = 0

    @property
    def is_ramping(self) -> bool:
        """True while the first batches come."""
        return self._batches < RAMP_BATCHES or self._seconds < RAMP_SECONDS

    def is_due(self, batches: int, seconds: float) -> bool:
        """True if a look of this length is long enough to be measured."""
        # In order, batches often come in bursts of a round.
        rounds = _ROUNDS * self.number
        if self.is_ramping:
            return batches >= rounds and seconds >= _RAMP_SECONDS
        return batches >= max(rounds, _BATCHES) and seconds >= _SECONDS

    def settle(self) -> None:
        """Notes that batches come from the workers that run now. The next look begins here."""
        self.is_settled = True

    def undo(self, for_good: bool) -> None:
        """Notes that a worker could not be added. ``for_good``: no other is added from now on."""
        self.number -= 1
        if for_good:
            self.most = self.bound = self.number
        self._before = None
        self.is_settled = True

    def decide(self, look: Measured, has_memory: Callable[[int], bool] = lambda _: True) -> Decision:
        """Decides after a look, which is due.

        Args:
            look: What was measured.
            has_memory: True if memory is left for that many more workers. Asked where nothing else is against
                one.
        """
        self._batches += look.batches
        self._seconds += look.seconds
        self._added = 0
        if not self.is_settled:
            return Decision(0)
        if self._before is not None and (why := self._reason_for_fewer(look, *self._before)):
            self._was_refused = True
            self._paused_until = self._seconds + self._pause
            if self.number - self._before[0] == 1:
                # The others stay on trial after a refusal of several.
                self._before = None
                self._pause *= 2
            self.number -= 1
            self.is_settled = False
            return Decision(-1, why)
        self._before = None
        return self.decide_more(look, has_memory)

    def decide_more(self, look: Measured, has_memory: Callable[[int], bool] = lambda _: True) -> Decision:
        """Decides if a worker follows one that was added after the same look.

        Args:
            look: As of :meth:`decide`.
            has_memory: As of :meth:`decide`.
        """
        most = min(self.number - self._added + self._together(look), self.most)
        why = "" if self.number >= most else self._reason_for_more(look)
        if not why or not has_memory(self._added + 1):
            return Decision(0)
        self._before = self._before or (self.number, look.rate)
        self._added += 1
        self.number += 1
        self.is_settled = False
        return Decision(1, why)

    def _together(self, look: Measured) -> int:
        """Returns the most workers that are added after one look.

        At first as many as there are, or more where they only wait.
        """
        if self._was_refused or not self.is_ramping:
            return 1
        return (3 if look.waiting >= _MOSTLY else 1) * (self.number - self._added)

    def _reason_for_fewer(self, look: Measured, number: int, rate: float) -> str:
        """Returns why one on trial is too many; nothing if it is not.

        Args:
            look: What was measured.
            number: The number without those on trial.
            rate: The rate with that number.
        """
        added = self.number - number
        if added < 1 or look.wait_share < _CALLER_WAITS or look.rate >= rate * (1 + _PART * added / number):
            # Interrupted, or the caller has become the limit, or they bring enough.
            return ""
        return (
            f"{look.rate:.3g} batches/s with {self.number}, {rate:.3g} with {number}: less than a third of "
            f"{'its' if added == 1 else 'their'} share"
        )

    def _reason_for_more(self, look: Measured) -> str:
        """Returns why one more would help; nothing if it would not."""
        if look.wait_share < _CALLER_WAITS or self._seconds < self._paused_until:
            return ""
        if look.busy < _BUSY or look.throttled > _THROTTLED:
            return ""
        if look.waiting >= _MOSTLY:
            return "the workers mostly wait"
        if self.number < self.bound and look.idle_cores >= self._added + _IDLE_CORES:
            return "processors are idle"
        return ""
