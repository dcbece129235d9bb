"""Seals of files in memory."""

from __future__ import annotations


def seal_size(fd: int) -> None:
    """Fixes the size of a file for good. A read beyond the end of a mapped file ends the process."""
    _seal(fd, 0)


def seal_bytes(fd: int) -> None:
    """Fixes the size and the bytes of a file for good.

    Raises:
        OSError: If some process may write to it through a mapping.
    """
    import fcntl

    _seal(fd, fcntl.F_SEAL_WRITE)


def _seal(fd: int, more: int) -> None:
    # Imported here: other systems import the modules that use these functions, and lack the seals.
    import fcntl

    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | more
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
