"""Seals of files in memory."""

from __future__ import annotations

import fcntl

_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def seal_size(fd: int) -> None:
    """Fixes the size of a file for good. A read beyond the end of a mapped file ends the process."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE | fcntl.F_SEAL_SEAL)


def seal_bytes(fd: int) -> None:
    """Fixes the size and the bytes of a file for good.

    Raises:
        OSError: If some process may write to it through a mapping.
    """
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
