"""The memory of large arrays that are freed in a worker, which its allocator keeps.

By default glibc maps arrays of more than 32 MB anew each time and gives freed memory back at once, which
costs a page fault for every 4 KB of every batch. A worker keeps some of it instead.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable

# Numbers of mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_MOST = 256 << 20
# Between two times that an idle worker gives memory back: then the faults that follow cost little.
_IDLE_TRIM_SECONDS = 1.0
# glibc raises its threshold by itself up to here.
_GLIBCS_OWN = 32 << 20
# A user that sets one of these has decided what the allocator does.
_USERS = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_MMAP_MAX_",
    "GLIBC_TUNABLES",
)


def keep_freed(share: int) -> Callable[[], object] | None:
    """Lets this process's allocator keep freed arrays of up to 256 MiB, or an eighth of ``share`` bytes.

    Does nothing with ``RINGLOADER_MALLOC=0``, where the user has tuned glibc, for a ``share`` so small that
    glibc's own rule keeps more, and where the C library has no ``mallopt``.

    Returns:
        What gives back the memory that was kept and is not used: glibc does not find the best place for an
        array at first, and what it tried before would stay. None if nothing is kept.
    """
    if os.environ.get("RINGLOADER_MALLOC") == "0" or any(name in os.environ for name in _USERS):
        return None
    # At worst glibc holds several arrays' worth of pieces until they are given back.
    kept = min(share // 8, _MOST)
    libc = ctypes.CDLL(None)
    if kept <= _GLIBCS_OWN or not hasattr(libc, "mallopt") or not hasattr(libc, "malloc_trim"):
        return None
    # Setting one ends glibc's adjustment of both, so only a pair makes sense.
    if not libc.mallopt(_M_MMAP_THRESHOLD, kept) or not libc.mallopt(_M_TRIM_THRESHOLD, kept):
        return None
    return lambda: libc.malloc_trim(0)


class Trimming:
    """Gives unused memory back: at the 8th task, the 16th, the 32nd and so on, and when idle."""

    def __init__(self, trim: Callable[[], object] | None) -> None:
        self._trim = trim
        self._tasks = 0
        self._next = 8
        self._last = 0.0

    def note_task(self) -> None:
        """Counts a task. Call it before each task."""
        self._tasks += 1
        if self._tasks == self._next:
            self._next *= 2
            self.trim()

    def until_trim(self) -> float:
        """Returns the seconds that an idle worker should wait before it calls ``trim``."""
        return max(self._last + _IDLE_TRIM_SECONDS - time.monotonic(), 0.0)

    def trim(self) -> None:
        """Gives unused memory back."""
        self._last = time.monotonic()
        if self._trim is not None:
            self._trim()
