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
# A worker must raise the rate by this part of its share.
_PART = 1 / 3

# While the first batches of a loader come, up to this many, changes come faster.
RAMP_BATCHES = 100
# The time between two changes then, in seconds, and afterwards the batches and seconds.
_RAMP_SECONDS = 0.05
_BATCHES, _SECONDS = 20, 2.0
# The time in which a rate is measured while changes come fast, in seconds.
_RATE_SECONDS = 0.2
# The longest time between two measurements while nothing changes, in seconds.
_LONGEST = 10.0


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

    A worker that was added is on trial until the rate of batches with it is known. It stays if all workers on
    trial raised the rate by a third of their share, or if the caller has become the limit. While the first
    batches come, several may be on trial together.

    INVARIANT: after the first :data:`RAMP_BATCHES` batches there is at most one change in 20 batches and in 2
    seconds, whichever is longer; there is none while the caller is the limit.

    Args:
        bound: The most workers for work that needs processors.
        most: The most workers for work that waits.

    Attributes:
        number: The number of workers. The caller does what is decided, or calls :meth:`undo`.
    """

    def __init__(self, bound: int, most: int) -> None:
        self.bound = bound
        self.most = most
        self.number = 1
        # Batches of all epochs.
        self._batches = 0
        # The number of workers without those on trial, and the rate with it.
        self._before: tuple[int, float] | None = None
        # True once the workers on trial have returned batches, so that the rate is theirs too.
        self._is_settled = True
        # The last rate that is known of the workers that run; and the batches and seconds of the next one.
        self._rate: float | None = None
        self._rated, self._rated_seconds = 0, 0.0
        # The rate with which one more worker was ended; None where none was.
        self._refused: float | None = None
        # True for a worker that was refused while the first batches came, in a short time.
        self._is_provisional = False
        # The time between two measurements while nothing changes.
        self._pause = _SECONDS

    @property
    def is_ramping(self) -> bool:
        """True while the first batches come."""
        return self._batches < RAMP_BATCHES

    def begin_epoch(self) -> None:
        """Begins an epoch: its start says nothing about the rate."""
        self._rated, self._rated_seconds = 0, 0.0

    def is_due(self, batches: int, seconds: float) -> bool:
        """True if a look of so many batches and seconds is long enough to be measured."""
        if not self.is_ramping:
            return batches >= _BATCHES and seconds >= self._pause
        return batches >= 1 and seconds >= _RAMP_SECONDS

    def settle(self) -> None:
        """Notes that the workers on trial have returned batches by now. The next look begins here."""
        self._is_settled = True
        self._forget_rate()

    @property
    def is_settled(self) -> bool:
        """True if no worker on trial has yet to return a batch."""
        return self._is_settled

    def undo(self, for_good: bool) -> None:
        """Notes that a worker could not be added. ``for_good``: no other is added from now on."""
        self.number -= 1
        if for_good:
            self.most = self.bound = self.number
        self._drop_trial()

    def decide(self, look: Measured, has_memory: Callable[[], bool] = lambda: True) -> Decision:
        """Decides after a look, which is due.

        Args:
            look: What was measured.
            has_memory: True if memory is left for one more worker. Asked where nothing else is against one.
        """
        self._batches += look.batches
        self._rated += look.batches
        self._rated_seconds += look.seconds
        if self._is_rated():
            self._rate = self._rated / self._rated_seconds
            self._rated, self._rated_seconds = 0, 0.0
        found = self._decided(look, has_memory)
        if found.change:
            self.number += found.change
            self._forget_rate()
            self._pause = _SECONDS
        elif self._is_settled and self._before is None:
            self._pause = min(2 * self._pause, _LONGEST)
        return found

    def _decided(self, look: Measured, has_memory: Callable[[], bool]) -> Decision:
        if look.wait_share < _CALLER_WAITS:
            # The workers on trial have brought what could be brought.
            if self._is_settled:
                self._drop_trial()
            return Decision(0)
        if self._is_settled and self._before is not None:
            if self._rate is None:
                return Decision(0)
            refused = self._judged(self._rate)
            if refused is not None:
                return refused
        if self.number >= self.most or not self._may_be_more(look):
            return Decision(0)
        why = self._reason_for_more(look)
        if not why or not has_memory():
            return Decision(0)
        if self._before is None:
            rate = self._rated / self._rated_seconds if self._rate is None else self._rate
            self._before = self.number, rate
        self._is_settled = False
        return Decision(1, why)

    def _is_rated(self) -> bool:
        if self.is_ramping:
            return self._rated >= 2 * self.number and self._rated_seconds >= _RATE_SECONDS
        return self._rated >= max(_BATCHES, self.number) and self._rated_seconds >= _SECONDS

    def _forget_rate(self) -> None:
        self._rate = None
        self._rated, self._rated_seconds = 0, 0.0

    def _judged(self, now: float) -> Decision | None:
        """Ends a worker on trial that did not bring enough; else no worker is on trial any more."""
        assert self._before is not None
        number, rate = self._before
        added = self.number - number
        if now >= rate * (1 + _PART * added / number):
            self._drop_trial()
            self._refused = None
            return None
        why = (
            f"{now:.3g} batches/s with {self.number}, {rate:.3g} with {number}: less than a third of "
            f"{'its' if added == 1 else 'their'} share"
        )
        self._refused, self._is_provisional = now, self.is_ramping
        if added == 1:
            self._drop_trial()
        return Decision(-1, why)

    def _drop_trial(self) -> None:
        self._before = None
        self._is_settled = True

    def _may_be_more(self, look: Measured) -> bool:
        """True if one more may be tried now."""
        if self._refused is not None:
            if self._is_provisional and not self.is_ramping:
                # The worker was ended after a short time.
                self._refused = None
            elif self._rate is None or self._rate > self._refused / 2:
                return False
        if not self._is_settled:
            # Several are tried together only at first: as many as there are, or more where they only wait.
            assert self._before is not None
            together = self._before[0] * (3 if look.waiting >= _MOSTLY else 1)
            return self.is_ramping and self.number - self._before[0] < together
        return True

    def _reason_for_more(self, look: Measured) -> str:
        """Returns why one more would help; nothing if it would not."""
        if look.busy < _BUSY or look.throttled > _THROTTLED:
            return ""
        if look.waiting >= _MOSTLY:
            return "the workers mostly wait"
        if self.number < self.bound and look.idle_cores >= _IDLE_CORES:
            return "processors are idle"
        return ""
