"""The memory of this process and its workers, in which shared pages count once."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

from ringloader._common import proc


def of_tree() -> int | None:
    """Returns the bytes of this process and all below it, or None where the system does not tell.

    That is their proportional memory (PSS), and files of shared memory that are open but not mapped: those of
    torch's batches that are on their way.
    """
    try:
        total = _template_share()
        mapped: set[tuple[int, int]] = set()
        files: dict[tuple[int, int], int] = {}
        for pid in tree(os.getpid()):
            total += _sizes(pid)["Pss"]
            mapped.update(_mapped_files(pid))
            files.update(_open_shared_memory(pid))
    except (OSError, KeyError):
        return None
    return total + sum(size for file, size in files.items() if file not in mapped)


def tree(root: int) -> list[int]:
    """Returns a process and all below it; without ``/proc`` nothing but the process."""
    children: dict[int, list[int]] = {}
    for pid in (int(path.name) for path in Path("/proc").glob("[0-9]*")):
        fields = proc.stat_of(pid)
        if fields:
            children.setdefault(int(fields[1]), []).append(pid)
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def _template_share() -> int:
    """The fork server's part of the pages that this process has in common with it."""
    asked_by = multiprocessing.parent_process()
    if asked_by is None or asked_by.pid == os.getppid():
        return 0
    sizes = _sizes(os.getppid())
    return sizes["Pss"] - sizes["Private_Clean"] - sizes["Private_Dirty"]


def _sizes(pid: int) -> dict[str, int]:
    lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return {name.rstrip(":"): int(size) * 1024 for name, size, _ in lines}


def _mapped_files(pid: int) -> Iterator[tuple[int, int]]:
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        _, _, _, device, inode, *_ = line.split(maxsplit=5)
        major, minor = device.split(":")
        yield os.makedev(int(major, 16), int(minor, 16)), int(inode)


def _open_shared_memory(pid: int) -> Iterator[tuple[tuple[int, int], int]]:
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if str(descriptor.readlink()).startswith(("/dev/shm/", "/memfd:")):
                status = descriptor.stat()
                yield (status.st_dev, status.st_ino), status.st_blocks * 512
        except FileNotFoundError:
            # Closed between the listing and the look.
            continue
