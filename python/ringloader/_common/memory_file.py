"""Files in memory, without a name."""

from __future__ import annotations

import errno
import fcntl
import os

# MFD_NOEXEC_SEAL, since Linux 6.3: it is no program, and a system may refuse any other (vm.memfd_noexec=2).
_NOEXEC_SEAL = 8


_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def make(name: str) -> int:
    """The descriptor of a new one, which children do not inherit over ``exec``.

    Args:
        name: What ``/proc`` shows.

    Raises:
        OSError: When the system refuses.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, flags)


def seal_size(fd: int) -> None:
    """Fixes the size of a file for good. A read beyond the end of a mapped file ends the process."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE | fcntl.F_SEAL_SEAL)


def seal_bytes(fd: int) -> None:
    """Fixes the size and the bytes of a file for good.

    Raises:
        OSError: If some process may write to it through a mapping.
    """
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
