"""Facts about processes: their states from ``/proc``, and ranks in a job. Imports no torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def stat_of(pid: int | None) -> list[str]:
    """Returns the fields of ``/proc/PID/stat`` from the state on, or none if it cannot be read."""
    try:
        # The command name stands in parentheses and may hold anything, so split after the last one.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return []


def state_of(pid: int | None) -> str:
    """The letter of its state; "?" if it cannot be read."""
    return next(iter(stat_of(pid)), "?")


def start_of(pid: int) -> int:
    """Returns when it began, in the kernel's units; 0 if that cannot be read."""
    try:
        return int(stat_of(pid)[19])
    except (IndexError, ValueError):
        return 0


def local_world_size() -> int:
    """Processes of the job on this machine; 1 without a launcher."""
    try:
        return max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    except ValueError:
        return 1


def in_group() -> tuple[int, int] | None:
    """Returns the rank, and the number of ranks, in torch's group of processes; None without a group."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed.get_rank(), distributed.get_world_size()


def ranks() -> tuple[int, int]:
    """Returns the rank, and the number of ranks: those of torch's group, or of the environment."""
    found = in_group()
    if found is not None:
        return found
    try:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1
    return (rank, world_size) if 0 <= rank < world_size else (0, 1)
