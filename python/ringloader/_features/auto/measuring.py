"""Measurements of a loader's workers and of the machine, from ``/proc`` and the control group."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import ringloader._native as _native
from ringloader._common import proc
from ringloader._features.auto.controller import Measured
from ringloader._features.cores import groups

_TICK = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01
_NANOSECOND = 1e-9
# The parts of the memory of a worker that must be left for one more.
_MEMORY = 1.5


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
        begun, before, idle, since, throttled_before = (
            self._begun,
            self._times,
            self._idle,
            self._waited,
            self._throttled,
        )
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
