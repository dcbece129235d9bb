"""Facts that the launcher of a distributed job tells its processes."""

from __future__ import annotations

import os


def local_world_size() -> int:
    """Processes of the job on this machine; 1 without a launcher."""
    try:
        return max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    except ValueError:
        return 1
