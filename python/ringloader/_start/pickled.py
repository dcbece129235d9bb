"""Objects that are pickled once for any number of processes, in memory that all of them read.

What belongs to one process alone, the descriptors, is made again for each. torch pickles the arguments of
its worker loop for every worker that does not fork. Here the first worker's are pickled, and the others read
them. What cannot be treated so is pickled for each worker, as torch does it.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
from collections.abc import Iterator
from multiprocessing import context, reduction
from typing import Any

import ringloader._native as _native
from ringloader._common import memory_file
from ringloader._start import fallback, shared_reductions
from ringloader._start.shared_reductions import AnyPopen, NotForAllError


class Pickled:
    """An object, pickled in its state of now. It goes with :meth:`close`, or when nothing refers to it.

    Pickled itself, for a process that is started or given work, it arrives as the object. Arrays are mapped
    for that process alone: it may write to them, as to a copy, and no other sees it.

    Args:
        thing: The object. What it refers to twice is one object in the process.
        new_pickler: Makes the pickler.

    Raises:
        NotForAllError: If something holds for one process only.
        BaseException: What pickling raises.
    """

    def __init__(self, thing: object, new_pickler: fallback.NewPickler) -> None:
        if not pickles_as_usual():
            raise NotForAllError
        self._pickle, self._arrays = _new_memory(), _new_memory()
        stand_in = AnyPopen()
        self._fds, self._kept = stand_in.fds, stand_in.kept
        popen = context.get_spawning_popen()
        try:
            context.set_spawning_popen(stand_in)  # type: ignore[arg-type]
            with _open(self._pickle) as file, _open(self._arrays) as arrays:
                shared_reductions.for_all(new_pickler(file), arrays, stand_in).dump(thing)
                self._has_arrays = arrays.tell() > 0
            # If one process changed a file, the objects of another would change.
            memory_file.seal_bytes(self._pickle.fd)
            memory_file.seal_bytes(self._arrays.fd)
        except OSError as error:
            self.close()
            # No more memory, or an error of an object that is raised when it is pickled for a process.
            raise NotForAllError from error
        except BaseException:
            self.close()
            raise
        finally:
            context.set_spawning_popen(popen)
        if not self._has_arrays:
            self._arrays.close()

    def __reduce__(self) -> tuple[Any, ...]:
        arrays = reduction.DupFd(self._arrays.fd) if self._has_arrays else None
        fds = {number: reduction.DupFd(fd) for number, fd in self._fds.items()}
        return _load, (reduction.DupFd(self._pickle.fd), arrays, fds)

    def names_main(self) -> bool:
        """True if it may name something of the main module."""
        with mmap.mmap(self._pickle.fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as memory:
            return memory.find(b"__main__") >= 0

    def close(self) -> None:
        """Gives back what the processes that were sent it hold themselves."""
        self._pickle.close()
        self._arrays.close()
        self._fds.clear()
        self._kept.clear()


def for_all(thing: object, ways: str = "", *, finds_main: bool = True) -> Pickled:
    """Pickles an object for any number of processes.

    Args:
        thing: The object.
        ways: Other ways to have workers, for an error.
        finds_main: True if the processes have the main module.

    Raises:
        NotForAllError: If something holds for one process only.
        BaseException: What pickling raises.
    """
    return fallback.attempt(lambda new_pickler: Pickled(thing, new_pickler), ways, finds_main=finds_main)


class ForOne:
    """An object that is pickled for each process, when that is started or given work.

    Args:
        thing: The object.
        ways: Other ways to have workers, for an error.
        finds_main: True if the process has the main module.
    """

    def __init__(self, thing: object, ways: str = "", *, finds_main: bool = True) -> None:
        self._thing = thing
        self._ways = ways
        self._finds_main = finds_main

    def __reduce__(self) -> tuple[Any, ...]:
        if not pickles_as_usual():
            return _itself, (self._thing,)
        return pickle.loads, (fallback.attempt(self._dump, self._ways, finds_main=self._finds_main),)

    def _dump(self, new_pickler: fallback.NewPickler) -> bytes:
        file = io.BytesIO()
        new_pickler(file).dump(self._thing)
        return file.getvalue()


def _itself(thing: object) -> object:
    return thing


def pickles_as_usual() -> bool:
    """True if multiprocessing's pickling is its own: some replace it by one that can pickle more."""
    parts = (reduction.ForkingPickler, reduction.dump, reduction.DupFd)
    own = getattr(context, "reduction", None) is reduction
    return own and all(part.__module__ == reduction.__name__ for part in parts)


def _new_memory() -> _native.OwnFd:
    try:
        return shared_reductions.own(_native.OwnFd.memory("ringloader-arguments"))
    except OSError as error:
        raise NotForAllError from error


def _open(fd: _native.OwnFd) -> io.BufferedWriter:
    return open(fd.fd, "wb", closefd=False)


def _load(pickled: Any, arrays: Any, fds: dict[int, Any]) -> Any:
    """Returns the object of a :class:`Pickled`, in a process that it was sent to."""
    mapped = None
    if arrays is not None:
        with _closing(arrays.detach()) as fd:
            mapped = mmap.mmap(fd, 0, mmap.MAP_PRIVATE)
    # Mapped: those who are sent the descriptor share one position in the file.
    with _closing(pickled.detach()) as fd:
        memory = mmap.mmap(fd, 0, mmap.MAP_PRIVATE)
    with memory, shared_reductions.received(mapped, fds):
        return pickle.Unpickler(memory).load()


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)
