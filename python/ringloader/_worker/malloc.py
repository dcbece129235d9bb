"""The memory of large arrays that are freed in a worker, which its allocator keeps.

By default glibc maps arrays of more than 32 MB anew each time and gives freed memory back at once, which
costs a page fault for every 4 KB of every batch. A worker keeps some of it instead.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

# Numbers of mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_MOST = 256 << 20
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


def keep_freed(share: int) -> Callable[[], object]:
    """Lets this process's allocator keep freed arrays of up to 256 MiB, or an eighth of ``share`` bytes.

    Does nothing with ``RINGLOADER_MALLOC=0``, where the user has tuned glibc, for a ``share`` so small that
    glibc's own rule keeps more, and where the C library has no ``mallopt``.

    Returns:
        What gives back the memory that was kept and is not used: glibc does not find the best place for an
        array at first, and what it tried before would stay. A function that does nothing if nothing is kept.
    """
    if os.environ.get("RINGLOADER_MALLOC") == "0" or any(name in os.environ for name in _USERS):
        return bool
    # At worst glibc holds several arrays' worth of pieces until they are given back.
    kept = min(share // 8, _MOST)
    libc = ctypes.CDLL(None)
    if kept <= _GLIBCS_OWN or not hasattr(libc, "mallopt") or not hasattr(libc, "malloc_trim"):
        return bool
    # Setting one ends glibc's adjustment of both, so only a pair makes sense.
    if not libc.mallopt(_M_MMAP_THRESHOLD, kept) or not libc.mallopt(_M_TRIM_THRESHOLD, kept):
        return bool
    return lambda: libc.malloc_trim(0)
