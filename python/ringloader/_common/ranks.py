"""The rank of this process among those of a job. Imports no torch."""

from __future__ import annotations

import os
import sys


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
