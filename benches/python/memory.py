"""Memory of a process tree, counting shared pages once and files in flight too."""

from __future__ import annotations

import os
from pathlib import Path


def tree_bytes(pids: list[int], template: int | None) -> int:
    """Proportional memory (PSS) of the processes, and shared-memory files that are open but mapped by none.

    PSS alone misses what torch has in flight: a segment that its worker has unmapped and its consumer has
    not yet mapped lives only as a file descriptor.

    Args:
        pids: the processes.
        template: the process of which they are copies, where it still runs. It takes its part of every page
            that they have in common: that part is added, what it has for itself is not.
    """
    total = (
        0
        if template is None
        else _sizes(template, "Pss") - _sizes(template, "Private_Clean", "Private_Dirty")
    )
    mapped: set[tuple[int, int]] = set()
    in_flight: dict[tuple[int, int], int] = {}
    for pid in pids:
        total += _sizes(pid, "Pss")
        mapped |= _mapped_files(pid)
        in_flight |= _open_shared_memory(pid)
    return total + sum(size for file, size in in_flight.items() if file not in mapped)


def _sizes(pid: int, *names: str) -> int:
    """The sum of these lines, in bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    missing = [name for name in names if name not in sizes]
    if missing:
        raise RuntimeError(
            f"/proc/{pid}/smaps_rollup has no line {missing[0]!r}; memory cannot be measured on this kernel"
        )
    return sum(sizes[name] for name in names)


def _mapped_files(pid: int) -> set[tuple[int, int]]:
    files = set()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        _, _, _, device, inode, *_ = line.split(maxsplit=5)
        major, minor = device.split(":")
        files.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    return files


def _open_shared_memory(pid: int) -> dict[tuple[int, int], int]:
    files = {}
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if str(descriptor.readlink()).startswith(("/dev/shm/", "/memfd:")):
                status = descriptor.stat()
                files[status.st_dev, status.st_ino] = status.st_blocks * 512
        except FileNotFoundError:  # closed between the listing and the look
            continue
    return files
