"""Words in memory that the workers of an iterator share with the main process: a record for each worker."""

from __future__ import annotations

import mmap
import os
from multiprocessing import reduction
from typing import Any, Self

import ringloader._native as _native
from ringloader._common import memory_file


class SharedWords:
    """The records of all workers, in one memory file. A forked worker inherits them; to any other it is sent.

    Args:
        own: The memory file.
        size: Words of a record.
        workers: How many records there are.
    """

    def __init__(self, own: _native.OwnFd, size: int, workers: int) -> None:
        self._own = own
        self.size = size
        self.workers = workers
        self._map = mmap.mmap(own.fd, self.nbytes)
        self.words = memoryview(self._map).cast("q")

    @classmethod
    def make(cls, name: str, size: int, workers: int, behind: int = 0) -> Self:
        """Makes the memory file, with room for some bytes after the records.

        Raises:
            OSError: If there is no memory, or no descriptor.
        """
        own = _native.OwnFd.memory(name)
        # Filled, so that no later write finds the memory full.
        os.write(own.fd, bytes(8 * size * workers))
        os.ftruncate(own.fd, 8 * size * workers + behind)
        memory_file.seal_size(own.fd)
        return cls(own, size, workers)

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.fd), self.size, self.workers)

    @property
    def fd(self) -> int:
        """The descriptor of the memory file."""
        return self._own.fd

    @property
    def nbytes(self) -> int:
        """The length of all records in bytes."""
        return 8 * self.size * self.workers

    def get(self, worker: int, number: int) -> int:
        """Returns a word of a worker's record."""
        return self.words[worker * self.size + number]

    def set(self, worker: int, number: int, value: int) -> None:
        """Sets a word of a worker's record."""
        self.words[worker * self.size + number] = value

    def close(self) -> None:
        """Gives the memory back."""
        self.words.release()
        self._map.close()
        self._own.close()


def _received(sent: Any, size: int, workers: int) -> SharedWords:
    fd: int = sent.detach()
    try:
        return SharedWords(_native.OwnFd.duplicate(fd), size, workers)
    finally:
        os.close(fd)
