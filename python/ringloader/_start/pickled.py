"""Objects that are pickled once for any number of processes, in memory that all of them read.

torch pickles the arguments of its worker loop for every worker that does not fork. Here the first worker's
are pickled, and the others read them. Descriptors have numbers, by which each process finds its own. Large
arrays lie apart, in memory that a process maps. What holds for one process only is pickled for each worker,
as torch does it.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import mmap
import os
import pickle
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import context, reduction
from typing import Any

import numpy as np
import torch.multiprocessing
from torch.multiprocessing import reductions

import ringloader._native as _native
from ringloader._common import memory_file
from ringloader._start import fallback

# Shorter arrays go with the pickle: a mapping of their own costs more than a copy.
_MAPPED_FROM = 64 << 10
# The alignment of a mapped array, which is that of memory that numpy allocates itself.
_ALIGNMENT = 64

# Numbers of descriptors, in this process and in its receivers.
_fd_numbers = itertools.count()


class NotForAllError(BaseException):
    """Something must be pickled for each process. No `Exception`: no handler on the way may take it."""


_own: weakref.WeakSet[_native.OwnFd] = weakref.WeakSet()


def _close_inherited() -> None:
    """Closes descriptors in a forked child: it sends none of them, and would keep the memory for its life."""
    for fd in list(_own):
        fd.close()


@functools.cache
def _close_in_children() -> None:
    os.register_at_fork(after_in_child=_close_inherited)


def _owned(fd: _native.OwnFd) -> _native.OwnFd:
    """Returns a descriptor that forked children close."""
    _close_in_children()
    _own.add(fd)
    return fd


class _AnyPopen:
    """Stands for the process that is being started, while pickling for all of them.

    Descriptors are numbered, and sent to each process under their number. What else a reduction wants to
    know of the process would be different for another.
    """

    def __init__(self) -> None:
        self.fds: dict[int, int] = {}
        # INVARIANT: by these, what was pickled stays good, also when the objects themselves change or go.
        # None of them is an object that refers to others: a pool does not keep its loaders.
        self.kept: list[object] = []
        self._is_kept = False

    def duplicate_for_child(self, fd: int) -> int:
        if not self._is_kept:
            owned = _owned(_native.OwnFd.duplicate(fd))
            self.kept.append(owned)
            fd = owned.fd
        number = next(_fd_numbers)
        self.fds[number] = fd
        return number

    @contextlib.contextmanager
    def keeping(self, storage: torch.UntypedStorage) -> Iterator[None]:
        """Keeps a storage, which keeps its descriptor open: a second one for each tensor were too many."""
        self.kept.append(storage)
        self._is_kept = True
        try:
            yield
        finally:
            self._is_kept = False

    @property
    def DupFd(self) -> type[_NumberedFd]:  # noqa: N802
        return _NumberedFd

    def __getattr__(self, name: str) -> Any:
        raise NotForAllError(name)


# In a process: the descriptors that were sent to it. A part may be unpickled only later.
_received: dict[int, Any] = {}
# In a process, while it unpickles: where the arrays lie.
_mapped: mmap.mmap | None = None


class _NumberedFd:
    """A descriptor on its way to each process. MIRRORS multiprocessing popen_forkserver.py::_DupFd."""

    def __init__(self, number: int) -> None:
        self.number = number

    def detach(self) -> int:
        fd: int = _received.pop(self.number).detach()
        return fd


def _for_processes(pickler: pickle.Pickler, arrays: io.BufferedWriter, popen: _AnyPopen) -> Any:
    """Makes a pickler of multiprocessing's put large arrays apart, and refuse what is for one process."""
    table = dict(pickler.dispatch_table)
    for kind, reduce in reduction.ForkingPickler._extra_reducers.items():  # type: ignore[attr-defined]
        table[kind] = _reduce_for_all(reduce, popen)
    table.setdefault(np.ndarray, lambda array: _reduce_array(array, arrays))
    pickler.dispatch_table = table
    return pickler


def _reduce_for_all(reduce: Callable[[Any], Any], popen: _AnyPopen) -> Callable[[Any], Any]:
    """A reduction that is registered for other processes, made to refuse where it is for one of them."""
    module = getattr(reduce, "__module__", None) or ""
    if module.startswith("multiprocessing."):
        return reduce
    if module != reductions.__name__:
        return _refuse
    if reduce in (reductions.reduce_typed_storage, reductions.reduce_typed_storage_child):
        # Both lead to the untyped storage.
        return reduce

    def reduce_in_memory(thing: Any) -> Any:
        # A handle to another device's memory, and a file's name, are counted for each receiver.
        device = getattr(thing, "device", None)
        if (
            getattr(device, "type", None) not in ("cpu", "meta")
            or torch.multiprocessing.get_sharing_strategy() == "file_system"  # type: ignore[no-untyped-call]
        ):
            raise NotForAllError
        if isinstance(thing, torch.UntypedStorage):
            with popen.keeping(thing):
                return reduce(thing)
        return reduce(thing)

    return reduce_in_memory


def _refuse(thing: object) -> Any:
    raise NotForAllError(type(thing))


def _reduce_array(array: np.ndarray[Any, Any], arrays: io.BufferedWriter) -> Any:
    flags = array.flags
    in_order = flags.c_contiguous or flags.f_contiguous
    # Pickle gives elements back in the machine's byte order.
    as_they_are = array.dtype.isnative and not array.dtype.hasobject
    if array.nbytes < _MAPPED_FROM or not as_they_are or not in_order:
        return array.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    column_major = not flags.c_contiguous
    arrays.write(bytes(-arrays.tell() % _ALIGNMENT))
    begin = arrays.tell()
    elements = (array.T if column_major else array).reshape(-1)
    arrays.write(elements.view(np.uint8).data)
    # Pickle's older protocols lose that an array may not be written to.
    writable = flags.writeable or pickle.DEFAULT_PROTOCOL < 5
    return _map_array, (begin, array.shape, array.dtype, "F" if column_major else "C", writable)


def _map_array(begin: int, shape: tuple[int, ...], dtype: Any, order: Any, writable: bool) -> Any:
    assert _mapped is not None
    array = np.ndarray(shape, dtype, _mapped, begin, order=order)
    array.flags.writeable = writable
    return array


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
        self._pickle, self._arrays = _new_memory(), _new_memory()
        stand_in = _AnyPopen()
        self._fds, self._kept = stand_in.fds, stand_in.kept
        popen = context.get_spawning_popen()
        try:
            context.set_spawning_popen(stand_in)  # type: ignore[arg-type]
            with _open(self._pickle) as file, _open(self._arrays) as arrays:
                _for_processes(new_pickler(file), arrays, stand_in).dump(thing)
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
        return pickle.loads, (fallback.attempt(self._dump, self._ways, finds_main=self._finds_main),)

    def _dump(self, new_pickler: fallback.NewPickler) -> bytes:
        file = io.BytesIO()
        new_pickler(file).dump(self._thing)
        return file.getvalue()


def _new_memory() -> _native.OwnFd:
    try:
        return _owned(_native.OwnFd.memory("ringloader-arguments"))
    except OSError as error:
        raise NotForAllError from error


def _open(fd: _native.OwnFd) -> io.BufferedWriter:
    return open(fd.fd, "wb", closefd=False)


def _load(pickled: Any, arrays: Any, fds: dict[int, Any]) -> Any:
    """Returns the object of a :class:`Pickled`, in a process that it was sent to."""
    global _mapped
    _mapped = None if arrays is None else _map(arrays.detach())
    _received.update(fds)
    try:
        # Mapped: processes that get the descriptor share one position in the file.
        with _map(pickled.detach()) as memory:
            return pickle.Unpickler(memory).load()
    finally:
        _mapped = None


def _map(fd: int) -> mmap.mmap:
    """Maps a file for this process alone, and closes the descriptor."""
    try:
        return mmap.mmap(fd, 0, mmap.MAP_PRIVATE)
    finally:
        os.close(fd)
