"""The processors that this process may use: by its affinity, and by the quotas of its control groups."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def cores() -> int:
    """Returns the number of processors that this process may use.

    That is the least of its affinity and of the quotas of its control groups, rounded up.
    """
    found = _affinity()
    most = cpu_quota()
    return found if most is None else min(found, max(math.ceil(most), 1))


def _affinity() -> int:
    """Returns the number of processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    # From Python 3.13 on.
    count = getattr(os, "process_cpu_count", os.cpu_count)
    return count() or 1


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Returns the processors whose time the control groups of this process may take; None without a quota.

    Args:
        root: Directory of ``proc``, and of the file systems that it names.
    """
    quotas = map(_of_group, groups(root))
    return min((one for one in quotas if one is not None), default=None)


def groups(root: Path = Path("/")) -> list[Path]:
    """Returns the directories of the control groups that bound this process: its own, and those above them.

    Args:
        root: Directory of ``proc``, and of the file systems that it names.
    """
    try:
        own = os.fsdecode((root / "proc/self/cgroup").read_bytes())
        mounts = os.fsdecode((root / "proc/self/mountinfo").read_bytes())
    except OSError:
        return []
    return list(_groups(own, mounts, root))


def _groups(own: str, mounts: str, root: Path) -> Iterator[Path]:
    """Yields the directories of the groups that bound this process: its own, and those above them.

    Args:
        own: The text of ``/proc/self/cgroup``.
        mounts: The text of ``/proc/self/mountinfo``.
        root: Directory of the mounted file systems.
    """
    for line in own.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        for top, at in _mounts(mounts, is_unified=not controllers):
            mount = root / at.lstrip("/")
            # In a container, a path may be that of the host: the mount's root is then the container's group.
            below = PurePosixPath(path)
            inside = below.relative_to(top) if below.is_relative_to(top) else PurePosixPath()
            yield from (mount / one for one in (inside, *inside.parents))
            break


def _mounts(mounts: str, is_unified: bool) -> Iterator[tuple[str, str]]:
    """Yields the top group and the directory of each mounted hierarchy that has quotas of processors."""
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.partition(" ")
        options = options.rpartition(" ")[2]
        if (kind == "cgroup2") if is_unified else (kind == "cgroup" and "cpu" in options.split(",")):
            _, _, _, top, at, *_ = fields.split(" ")
            yield _unescaped(top), _unescaped(at)


def _unescaped(path: str) -> str:
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, char)
    return path


def _of_group(group: Path) -> float | None:
    """Returns the processors whose time a group may take; None without a quota."""
    try:
        words = (group / "cpu.max").read_text().split()
    except (OSError, ValueError):
        words = []
    try:
        most, period = words or [
            (group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")
        ]
        processors = int(most) / int(period)
    # No such file, "max", or what no kernel writes.
    except (OSError, ValueError, ZeroDivisionError):
        return None
    # -1 is no quota.
    return processors if processors > 0 else None
