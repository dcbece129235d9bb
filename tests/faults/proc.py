"""What a process holds, read from /proc: children, descriptors, mappings, shared memory."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path


def _parent_of(pid: int) -> int | None:
    try:
        # The command name stands in parentheses and may hold anything, so split behind the last one.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None


def is_running(pid: int) -> bool:
    """True if the process exists and a thread of it runs.

    The first thread of a process that is killed may be a zombie while others still hold its descriptors.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0] != "Z" or int(fields[17]) > 1
    except (OSError, IndexError):
        return False


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _children_of(pid: int) -> list[int]:
    """Children of each thread of a process. A look at all processes takes 300 times as long."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, (thread / "children").read_bytes().split())
    return found


def descendants(root: int | None = None) -> set[int]:
    """Every running process below `root`, helpers of multiprocessing left out but not their children."""
    # INVARIANT: The kernel has these files (CONFIG_PROC_CHILDREN), or nothing would ever be found.
    Path(f"/proc/self/task/{threading.get_native_id()}/children").stat()
    found: set[int] = set()
    pending = [os.getpid() if root is None else root]
    while pending:
        for child in _children_of(pending.pop()):
            pending.append(child)
            found.add(child)
    helpers = {pid for pid in found if _is_helper(pid)}
    return {pid for pid in found - helpers if is_running(pid)}


def _is_helper(pid: int) -> bool:
    """Whether multiprocessing or torch has started it once, to live as long as the process."""
    line = command_line(pid)
    if "resource_tracker" in line or "torch_shm_manager" in line:
        return True
    # What a server forks has the server's command line: the server is the one with us as parent.
    is_fork_server = "forkserver" in line and "ringloader._features.spawn_server" not in line
    is_server = is_fork_server or "programs.server" in line
    return is_server and _parent_of(pid) == os.getpid()


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def wait_without_children(seconds: float) -> dict[int, str]:
    """Waits for the last child to end; what is left after `seconds`, with command lines."""
    if wait_until(lambda: not descendants(), seconds):
        return {}
    return {pid: command_line(pid) for pid in descendants()}


def descriptors() -> dict[int, str]:
    """Open descriptors of this process and what they are, the one that lists them left out."""
    found = {}
    for name in (entry.name for entry in Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):
            found[int(name)] = str(Path(f"/proc/self/fd/{name}").readlink())
    return {fd: target for fd, target in found.items() if not target.endswith("/fd")}


def mappings() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


def shared_resident_kib() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1])
    raise RuntimeError("RssShmem is missing in /proc/self/status")


def names_in_dev_shm() -> frozenset[str]:
    folder = Path("/dev/shm")
    return frozenset(entry.name for entry in folder.iterdir()) if folder.is_dir() else frozenset()


@dataclass(frozen=True)
class Snapshot:
    """What this process holds at one moment."""

    descriptors: dict[int, str]
    mappings: int
    shared_kib: int
    named: frozenset[str]

    @staticmethod
    def take() -> Snapshot:
        # It lives as long as this process, with a pipe, from the first worker on that is not forked.
        resource_tracker.ensure_running()
        gc.collect()
        named = names_in_dev_shm()
        return Snapshot(descriptors(), len(mappings()), shared_resident_kib(), named)

    def assert_nothing_left(self, *, seconds: float = 10) -> None:
        """No child, no descriptor, no shared memory more than at this snapshot."""
        gc.collect()
        left = wait_without_children(seconds)
        assert not left, f"processes left: {left}"

        def extra_descriptors() -> list[str]:
            now = descriptors()
            return sorted(now[fd] for fd in now.keys() - self.descriptors.keys())

        gc.collect()
        wait_until(lambda: len(descriptors()) <= len(self.descriptors), 2)
        assert len(descriptors()) <= len(self.descriptors), f"descriptors left: {extra_descriptors()}"
        most_kib = self.shared_kib + 2048
        wait_until(lambda: shared_resident_kib() <= most_kib, 2)
        assert shared_resident_kib() <= most_kib, "shared memory is still resident"
        now = Snapshot.take()
        mine = {name for name in now.named - self.named if str(os.getpid()) in name}
        assert not mine, f"names left in /dev/shm: {mine}"
