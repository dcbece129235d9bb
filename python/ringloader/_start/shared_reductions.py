"""Reductions for a pickle that any number of processes read.

Descriptors have numbers, by which each process finds its own. Large arrays lie apart, in memory that a
process maps. What would hold for one process only is refused.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import mmap
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import reduction
from typing import Any

import numpy as np
import torch.multiprocessing
from torch.multiprocessing import reductions

import ringloader._native as _native

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


def own(fd: _native.OwnFd) -> _native.OwnFd:
    """Returns a descriptor that forked children close."""
    _close_in_children()
    _own.add(fd)
    return fd


class AnyPopen:
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
            owned = own(_native.OwnFd.duplicate(fd))
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


def for_all(pickler: pickle.Pickler, arrays: io.BufferedWriter, popen: AnyPopen) -> Any:
    """Makes a pickler of multiprocessing's put large arrays apart, and refuse what is for one process."""
    table = dict(pickler.dispatch_table)
    for kind, reduce in reduction.ForkingPickler._extra_reducers.items():  # type: ignore[attr-defined]
        table[kind] = _reduce_for_all(reduce, popen)
    for kind in _lock_types():
        table.setdefault(kind, lambda lock: _reduce_lock(lock, popen))
    table.setdefault(np.ndarray, lambda array: _reduce_array(array, arrays))
    pickler.dispatch_table = table
    return pickler


def _reduce_for_all(reduce: Callable[[Any], Any], popen: AnyPopen) -> Callable[[Any], Any]:
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


def _lock_types() -> tuple[type, ...]:
    module = sys.modules.get("multiprocessing.synchronize")
    if module is None:
        return ()
    return module.Lock, module.RLock, module.Semaphore, module.BoundedSemaphore


def _reduce_lock(lock: Any, popen: AnyPopen) -> Any:
    # Processes find it by its name, which goes with it.
    popen.kept.append(lock)
    return lock.__reduce_ex__(pickle.DEFAULT_PROTOCOL)


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


@contextlib.contextmanager
def received(arrays: mmap.mmap | None, fds: dict[int, Any]) -> Iterator[None]:
    """Takes the arrays and the descriptors of a pickle that is loaded in the block.

    Args:
        arrays: Memory of the arrays, which they keep.
        fds: Descriptors by number, as :class:`multiprocessing.reduction.DupFd` sends them.
    """
    global _mapped
    _received.update(fds)
    _mapped = arrays
    try:
        yield
    finally:
        _mapped = None
