"""The decision how many workers a loader has: by measurements alone, without clocks and processes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from ringloader._features.auto.measuring import Measured, Rate, error

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
# A trial ends as soon as the gain is above the least one by the first number of standard errors, or below it
# by the second, if both rates are known. A worker too many costs less than one too few.
_STAYS, _GOES = 1.0, 2.0

# Changes come faster for the first batches and the first seconds of a loader.
RAMP_BATCHES, RAMP_SECONDS = 100, 5.0
# The least time of a look then, in seconds, and afterwards its batches and seconds.
_RAMP_LOOK = 0.05
_BATCHES, _SECONDS = 20, 2.0
# The longest time between two looks while nothing changes, in seconds.
_LONGEST = 10.0
# The time after which a trial in doubt ends, and in which a rate is measured before a trial at most.
_RAMP_TRIAL, _TRIAL = 0.5, 4.0
# The least pauses after a refusal, in seconds: one in doubt, and a clear one. Each is twice the last.
_AFTER_DOUBT, _AFTER_REFUSAL = 1.0, 10.0


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

    A worker that was added is on trial: the rate with it is compared with the rate right before, and must be
    higher by a third of the worker's share. Rates have a standard error, and the trial lasts until the
    difference is clear, or for a time after which the likelier counts. While the first batches come, several
    workers may be on trial together. A worker that did not bring enough is ended. Other programs may have
    been in the way, so that is no refusal for good: another one is tried after a pause, which doubles each
    time.

    INVARIANT: after the first :data:`RAMP_BATCHES` batches and :data:`RAMP_SECONDS` seconds there is at most
    one change in 20 batches and in 2 seconds, whichever is longer. None is added while the caller is the
    limit.

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
        # Batches and seconds of all epochs.
        self._batches, self._seconds = 0, 0.0
        # The rate since the last change.
        self._rate = Rate(self.number, _CALLER_WAITS)
        # The rate without the workers on trial.
        self._before: Rate | None = None
        # True once the rate is that of the workers that run.
        self._is_settled = True
        # True once a worker was refused: then one at a time is tried.
        self._was_refused = False
        # The time until which no worker is tried, and the pause after the next refusal.
        self._paused_until, self._pause = 0.0, _AFTER_DOUBT
        # The workers that were added after the last look.
        self._added = 0
        # The time between two looks while nothing changes.
        self._between = _SECONDS

    @property
    def is_ramping(self) -> bool:
        """True while the first batches come."""
        return self._batches < RAMP_BATCHES or self._seconds < RAMP_SECONDS

    def begin_epoch(self) -> None:
        """Begins an epoch: its start says nothing about the rate."""
        self._rate.begin_epoch()

    def is_due(self, batches: int, seconds: float) -> bool:
        """True if a look of this length is long enough to be measured."""
        if not self.is_ramping:
            return batches >= _BATCHES and seconds >= self._between
        return batches >= 1 and seconds >= _RAMP_LOOK

    def note(self, batches: int, seconds: float, waited: float) -> None:
        """Notes the totals of an epoch, as often as the caller likes: the rate is measured in between.

        Args:
            batches: The batches that were returned.
            seconds: The time, from any beginning.
            waited: Seconds for which the caller waited.
        """
        if self._rate.workers != self.number:
            self._forget_rate()
        self._rate.note(batches, seconds, waited)

    def settle(self) -> None:
        """Notes that batches come from the workers that run now. The next look begins here."""
        self._is_settled = True
        self._forget_rate()

    @property
    def is_settled(self) -> bool:
        """True if batches come from the workers that run now, since the last change of their number."""
        return self._is_settled

    def undo(self, for_good: bool) -> None:
        """Notes that a worker could not be added. ``for_good``: no other is added from now on."""
        self.number -= 1
        if for_good:
            self.most = self.bound = self.number
        self._before = None
        self._is_settled = True

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
        found = self._judged() if self._is_settled and self._before is not None else Decision(0)
        if found.change:
            self.number += found.change
            self._changed()
            return found
        found = self.decide_more(look, has_memory)
        if self._before is None and not self.is_ramping:
            self._between = min(2 * self._between, _LONGEST)
            if self._rate.seconds >= _LONGEST:
                # The rate right before a change is of interest.
                self._forget_rate()
        return found

    def decide_more(self, look: Measured, has_memory: Callable[[int], bool] = lambda _: True) -> Decision:
        """Decides if a worker follows one that was added after the same look.

        Args:
            look: As of :meth:`decide`.
            has_memory: As of :meth:`decide`.
        """
        why = self._reason_for_more(look) if self._may_be_more(look) else ""
        if not why or not has_memory(self._added + 1):
            return Decision(0)
        self._before = self._before or self._rate
        self._added += 1
        self.number += 1
        self._changed()
        return Decision(1, why)

    def _changed(self) -> None:
        self._is_settled = False
        self._between = _SECONDS

    def _forget_rate(self) -> None:
        self._rate = Rate(self.number, _CALLER_WAITS)

    @property
    def _long(self) -> float:
        """The time for which a rate is measured at most, in seconds, if it is known by then."""
        return _RAMP_TRIAL if self.is_ramping else _TRIAL

    @property
    def _is_long(self) -> bool:
        return self._rate.is_known and self._rate.seconds >= self._long

    def _judged(self) -> Decision:
        """Ends a worker on trial if they did not bring enough; ends the trial if they did."""
        now, before = self._rate, self._before
        assert before is not None
        added = self.number - before.workers
        has_enough = now.seconds >= self._long and now.waited < _CALLER_WAITS * now.seconds
        if added < 1 or has_enough:
            # Interrupted, or the caller has become the limit.
            self._before = None
            return Decision(0)
        if not now.samples:
            return Decision(0)
        gain, asked = now.value / before.value, 1 + _PART * added / before.workers
        above, doubt = math.log(gain / asked), error(before, now)
        if above >= _STAYS * doubt or (self._is_long and above >= 0):
            self._before = None
            return Decision(0)
        is_clear = before.is_known and now.is_known and above <= -_GOES * doubt
        # In doubt, more of the rate of now helps as long as it is not known much better than the one before.
        helps = now.seconds < _TRIAL and error(now) > error(before) / 2
        if not is_clear and (helps or not self._is_long):
            return Decision(0)
        if is_clear:
            self._pause = max(self._pause, _AFTER_REFUSAL)
        self._paused_until = self._seconds + self._pause
        if added == 1 or not is_clear:
            # The others stay on trial after a clear refusal.
            self._pause *= 2
            self._was_refused = True
            self._before = None
        return Decision(
            -1,
            f"{now.value:.3g} batches/s with {now.workers}, {before.value:.3g} with {before.workers}: less "
            f"than a third of {'its' if added == 1 else 'their'} share",
        )

    def _may_be_more(self, look: Measured) -> bool:
        """True if one more may be tried now."""
        if look.wait_share < _CALLER_WAITS or self.number >= self.most or self._seconds < self._paused_until:
            return False
        if self._before is not None:
            number = self._before.workers
            return (
                not self._is_settled
                and self.is_ramping
                and self.number < number + self._together(number, look)
            )
        if not self._is_settled:
            return False
        # Without a rate that is known well, a trial would tell nothing.
        part = min(self._together(self.number, look), self.most - self.number) / self.number
        told = min(math.log(1 + _PART * part), math.log((1 + part) / (1 + _PART * part)))
        if not (self._rate.is_known if self._was_refused else self._rate.samples >= 2):
            return False
        return self._is_long or error(self._rate) <= told / 2

    def _together(self, number: int, look: Measured) -> int:
        """Returns the most workers on trial together, in addition to a number of others.

        At first as many as there are, or more where they only wait.
        """
        if self._was_refused or not self.is_ramping:
            return 1
        return 3 * number if look.waiting >= _MOSTLY else number

    def _reason_for_more(self, look: Measured) -> str:
        """Returns why one more would help; nothing if it would not."""
        if look.busy < _BUSY or look.throttled > _THROTTLED:
            return ""
        if look.waiting >= _MOSTLY:
            return "the workers mostly wait"
        if self.number < self.bound and look.idle_cores >= self._added + _IDLE_CORES:
            return "processors are idle"
        return ""
