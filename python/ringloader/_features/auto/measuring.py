"""Measurements: the rate of batches, a loader's workers, and the machine, from ``/proc``."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import ringloader._native as _native
from ringloader._common import proc
from ringloader._features.cores import groups

_TICK = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01
_NANOSECOND = 1e-9
# The parts of the memory of a worker that must be left for one more.
_MEMORY = 1.5
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


class _Times(NamedTuple):
    """The times of a process, in seconds.

    Attributes:
        ran: The time for which it ran.
        ready: The time for which it was ready and did not run.
        is_ready: True if it runs or is ready now. The system adds a time to ``ready`` only when it has ended.
    """

    ran: float
    ready: float
    is_ready: bool


class Meter:
    """Measures from one look to the next. The first begins at once.

    Args:
        pids: The processes of the workers.
        waited: Seconds for which the caller has waited until now.
    """

    def __init__(self, pids: Iterable[int], waited: float) -> None:
        self._begin(pids, waited)
        self._busy: list[Sequence[int]] = []

    def _begin(self, pids: Iterable[int], waited: float) -> None:
        self._begun = time.monotonic()
        self._waited = waited
        self._times = {pid: times_of(pid) for pid in pids}
        self._idle = idle()
        self._throttled = throttled()

    def note_tasks(self, unanswered: Sequence[int]) -> None:
        """Notes how many tasks each worker has that it has not answered."""
        self._busy.append(unanswered)

    def look(self, pids: Sequence[int], waited: float, batches: int) -> Measured:
        """Returns what was measured since the last look, and begins the next.

        Args:
            pids: The processes of the workers.
            waited: Seconds for which the caller has waited until now.
            batches: The batches that were returned since.
        """
        begun, before, idle, since = self._begun, self._times, self._idle, self._waited
        throttled_before = self._throttled
        busy, self._busy = self._busy, []
        self._begin(pids, waited)
        seconds = max(self._begun - begun, 1e-9)
        idle_cores = max(self._idle - idle, 0.0) / seconds
        ran, ready = [], []
        for pid, now in self._times.items():
            was = before.get(pid)
            if now is None or was is None:
                continue
            part = min(max(now.ran - was.ran, 0.0) / seconds, 1.0)
            ran.append(part)
            # For how long it has been ready is not known: perhaps for all the time that it did not run.
            rest = seconds if now.is_ready else max(now.ready - was.ready, 0.0)
            ready.append(min(rest / seconds, 1.0 - part))
        running, is_ready = _mean(ran), _mean(ready)
        return Measured(
            seconds=seconds,
            batches=batches,
            waited=waited - since,
            busy=_busy_share(busy, len(pids)),
            running=running,
            # Workers of which nothing is known count as running.
            waiting=max(1.0 - running - is_ready, 0.0) if ran else 0.0,
            idle_cores=idle_cores,
            throttled=min(max(self._throttled - throttled_before, 0.0) / seconds, 1.0),
        )


def _busy_share(noted: Sequence[Sequence[int]], workers: int) -> float:
    """Returns for how many of the looks the worker that was busy least often had a task."""
    if not noted:
        return 1.0
    had = [sum(one[worker] > 0 for one in noted if worker < len(one)) for worker in range(workers)]
    return min(had, default=len(noted)) / len(noted)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def times_of(pid: int) -> _Times | None:
    """Returns the times of a process; None if it has ended, or the system does not tell."""
    # Before the times: a wait for a processor that ends in between is in both, and never in neither.
    is_ready = proc.state_of(pid) == "R"
    try:
        ran, ready, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
        return _Times(int(ran) * _NANOSECOND, int(ready) * _NANOSECOND, is_ready)
    except (OSError, ValueError):
        return None


def idle(root: Path = Path("/")) -> float:
    """Returns the seconds for which the processors of this process had nothing to do, all together.

    Programs of a low priority count as nothing, unless this one is of a low priority too. Where the kernel
    does not put them last, as those of another session or container, a worker is added that brings nothing,
    and is ended.

    Args:
        root: Directory of ``proc``.
    """
    own = os.sched_getaffinity(0)
    is_low = os.getpriority(os.PRIO_PROCESS, 0) > 0
    found = 0.0
    try:
        for line in (root / "proc/stat").read_text().splitlines():
            name, _, rest = line.partition(" ")
            if not name.startswith("cpu") or not name[3:].isdigit() or int(name[3:]) not in own:
                continue
            fields = rest.split()
            # Idle, and idle while something waits for a device.
            found += (int(fields[3]) + int(fields[4]) + (0 if is_low else int(fields[1]))) * _TICK
    except (OSError, ValueError, IndexError):
        return 0.0
    return found


def throttled(root: Path = Path("/")) -> float:
    """Returns the seconds for which the control groups of this process were not allowed to run.

    Args:
        root: Directory of ``proc``, and of the file systems that it names.
    """
    found = 0.0
    for group in groups(root):
        try:
            lines = (group / "cpu.stat").read_text().splitlines()
        except (OSError, ValueError):
            continue
        for line in lines:
            name, _, value = line.partition(" ")
            scale = {"throttled_usec": 1e-6, "throttled_time": _NANOSECOND}.get(name)
            if scale is not None and value.isdigit():
                # Of a group and those above it: one that is not allowed to run is enough.
                found = max(found, int(value) * scale)
    return found


def has_memory(pids: Iterable[int], more: int = 1, available: int | None = None) -> bool:
    """True if memory is left for more workers: for each, 1.5 times what a worker has of its own.

    Args:
        pids: The processes of the workers.
        more: The number of workers that are to be added. Those of a moment ago have not taken theirs.
        available: Bytes that are left; None to ask the system.
    """
    left = _native.available_memory() if available is None else available
    return left >= more * _MEMORY * max((own_memory(pid) for pid in pids), default=0)


def own_memory(pid: int) -> int:
    """Returns the bytes that a process shares with no other; 0 if that cannot be read."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))
    except (OSError, ValueError, IndexError):
        return 0
