"""What a process that is started takes over from the one that starts it."""

from __future__ import annotations

import os
from multiprocessing import spawn, util
from pathlib import Path
from typing import Any

# Lines of /proc/thread-self/status that a child begins with.
_LINES = (
    *("Umask", "Uid", "Gid", "Groups", "NSpgid", "NSsid", "SigBlk", "SigIgn", "NoNewPrivs", "Seccomp"),
    *("Seccomp_filters", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "THP_enabled"),
    *("Cpus_allowed", "Mems_allowed"),
)
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid_for_children", "time_for_children", "user", "uts")


def state() -> tuple[Any, ...]:
    """All of it that /proc tells: a server's must be the same as its parent's.

    Raises:
        OSError: Where it cannot be told, or a standard stream is closed.
    """
    status = Path("/proc/thread-self/status").read_text().splitlines()
    return (
        spawn.get_executable(),
        util._args_from_interpreter_flags(),  # type: ignore[attr-defined]
        dict(os.environb),
        [line for line in status if line.startswith(tuple(f"{name}:" for name in _LINES))],
        [Path(f"/proc/self/{name}").read_text() for name in ("limits", "cgroup", "oom_score_adj")],
        [Path(f"/proc/self/ns/{name}").readlink() for name in _NAMESPACES],
        Path("/proc/self/root").stat().st_ino,
        os.getpriority(os.PRIO_PROCESS, 0),
        (os.sched_getscheduler(0), os.sched_getparam(0).sched_priority),
        [(os.fstat(fd).st_mode, os.isatty(fd)) for fd in range(3)],
    )
