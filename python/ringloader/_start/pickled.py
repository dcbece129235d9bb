"""Objects that are pickled once for any number of processes, in memory that all of them read.

What belongs to one process alone, the descriptors, is made again for each. torch pickles the arguments of
its worker loop for every worker that does not fork. Here the first worker's are pickled, and the others read
them. What cannot be treated so is pickled for each worker, as torch does it.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import mmap
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import context, reduction
from typing import Any

import numpy as np
import torch.multiprocessing
from torch.multiprocessing import reductions

from ringloader._common import memory_file
from ringloader._start import definitions, fallback

# Shorter arrays go with the pickle: a mapping of their own costs more than a copy.
_MAPPED_FROM = 64 << 10
# The alignment of a mapped array, which is that of memory that numpy allocates itself.
_ALIGNMENT = 64

# Numbers of descriptors, in this process and in its receivers.
_fd_numbers = itertools.count()


class NotForAllError(BaseException):
    """Something must be pickled for each process. No `Exception`: no handler on the way may take it."""


class Pickled:
    """An object, pickled in its state of now. It goes with :meth:`close`, or when nothing refers to it.

    Pickled itself, for a process that is started or given work, it arrives as the object. Arrays are mapped
    for that process alone: it may write to them, as to a copy, and no other sees it.

    Args:
        thing: The object. What it refers to twice is one object in the process.
        new_pickler: Makes the pickler.
        named: Takes the definitions of the main module that the pickle names; None if they are not wanted.

    Raises:
        NotForAllError: If something holds for one process only.
        BaseException: What pickling raises.
    """

    def __init__(
        self,
        thing: object,
        new_pickler: fallback.NewPickler,
        named: dict[str, weakref.ref[Any]] | None = None,
    ) -> None:
        if not pickles_as_usual():
            raise NotForAllError
        self._pickle, self._arrays = _new_memory(), _new_memory()
        stand_in = _AnyPopen()
        self._fds, self._kept = stand_in.fds, stand_in.kept
        popen = context.get_spawning_popen()
        context.set_spawning_popen(stand_in)  # type: ignore[arg-type]
        try:
            with self._pickle.open() as file, self._arrays.open() as arrays:
                pickler = _for_all(new_pickler(file), arrays, stand_in)
                if named is not None:
                    named.clear()
                    # cloudpickle has one of its own, and names nothing of the main module.
                    if not hasattr(pickler, "reducer_override"):
                        pickler.reducer_override = definitions.recorder(named)
                pickler.dump(thing)
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

    def show(self, look: Callable[[mmap.mmap], None]) -> None:
        """Calls ``look`` with the pickle. If that raises, this is closed."""
        try:
            with mmap.mmap(self._pickle.fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as memory:
                look(memory)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Gives back what the processes that were sent it hold themselves."""
        self._pickle.close()
        self._arrays.close()
        self._fds.clear()
        self._kept.clear()


def for_all(
    thing: object,
    look: Callable[[Any], None] | None = None,
    named: dict[str, weakref.ref[Any]] | None = None,
    ways: str = "",
) -> Pickled:
    """Pickles an object for any number of processes.

    Args:
        thing: The object.
        look: Called with the pickle; raises a ``RuntimeError`` for what a process cannot find, which is then
            pickled by value where cloudpickle is installed. None if there is nothing to look for.
        named: Takes the definitions of the main module that the pickle names; None if they are not wanted.
        ways: Other ways to have workers, for an error.

    Raises:
        NotForAllError: If something holds for one process only.
        BaseException: What pickling raises, and ``look``.
    """

    def dump(new_pickler: fallback.NewPickler) -> Pickled:
        return Pickled(thing, new_pickler, named)

    pickled = fallback.attempt(thing, dump, ways)
    if look is None:
        return pickled
    try:
        pickled.show(look)
    except RuntimeError:
        by_value = fallback.by_value(dump)
        if by_value is None:
            raise
        pickled = by_value
        pickled.show(look)
    return pickled


class ForOne:
    """An object that is pickled for each process, when that is started or given work.

    Args:
        thing: The object.
        look: Called with the pickle, and may raise.
        ways: Other ways to have workers, for an error.
    """

    def __init__(self, thing: object, look: Callable[[bytes], None] | None = None, ways: str = "") -> None:
        self._thing = thing
        self._look = look
        self._ways = ways

    def __reduce__(self) -> tuple[Any, ...]:
        if not pickles_as_usual():
            return _itself, (self._thing,)
        data = fallback.attempt(self._thing, self._dump, self._ways)
        if self._look is not None:
            try:
                self._look(data)
            except RuntimeError:
                by_value = fallback.by_value(self._dump)
                if by_value is None:
                    raise
                data = by_value
                self._look(data)
        return pickle.loads, (data,)

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


_own: weakref.WeakSet[_OwnFd] = weakref.WeakSet()


def _close_inherited() -> None:
    """Closes descriptors in a forked child: it sends none of them, and would keep the memory for its life."""
    for fd in list(_own):
        fd.close()


os.register_at_fork(after_in_child=_close_inherited)


class _OwnFd:
    """A descriptor that is closed by ``close``, or when nothing refers to it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.close = weakref.finalize(self, os.close, fd)
        self.close.atexit = False
        _own.add(self)

    def open(self) -> io.BufferedWriter:
        """Returns a file for writing to it."""
        return open(self.fd, "wb", closefd=False)


def _new_memory() -> _OwnFd:
    try:
        return _OwnFd(memory_file.make("ringloader-arguments"))
    except OSError as error:
        raise NotForAllError from error


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
            own = _OwnFd(os.dup(fd))
            self.kept.append(own)
            fd = own.fd
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


def _for_all(pickler: pickle.Pickler, arrays: io.BufferedWriter, popen: _AnyPopen) -> Any:
    """Makes a pickler of multiprocessing's put large arrays apart, and refuse what is for one process."""
    table = dict(pickler.dispatch_table)
    for kind, reduce in reduction.ForkingPickler._extra_reducers.items():  # type: ignore[attr-defined]
        table[kind] = _reduce_for_all(reduce, popen)
    for kind in _lock_types():
        table.setdefault(kind, lambda lock: _reduce_lock(lock, popen))
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


def _lock_types() -> tuple[type, ...]:
    module = sys.modules.get("multiprocessing.synchronize")
    if module is None:
        return ()
    return module.Lock, module.RLock, module.Semaphore, module.BoundedSemaphore


def _reduce_lock(lock: Any, popen: _AnyPopen) -> Any:
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


def _load(pickled: Any, arrays: Any, fds: dict[int, Any]) -> Any:
    """Returns the object of a :class:`Pickled`, in a process that it was sent to."""
    global _mapped
    _received.update(fds)
    if arrays is not None:
        with _closing(arrays.detach()) as fd:
            _mapped = mmap.mmap(fd, 0, mmap.MAP_PRIVATE)
    try:
        # Mapped: those who are sent the descriptor share one position in the file.
        with _closing(pickled.detach()) as fd:
            memory = mmap.mmap(fd, 0, mmap.MAP_PRIVATE)
        with memory:
            return pickle.Unpickler(memory).load()
    finally:
        _mapped = None


class Shared:
    """The work of all workers of an iterator, pickled when the first of them starts, until :meth:`close`.

    So what pickling raises is raised where torch's pickling would.

    Args:
        look: Called with each pickle, and may raise; None if there is nothing to look for.
    """

    def __init__(self, look: Callable[[Any], None] | None = None) -> None:
        self._look = look
        self._pickled: Pickled | None = None
        # True: what is still to start gets a pickle of its own.
        self._is_closed = False

    def pickled(self, work: Any) -> Pickled | ForOne:
        """Returns the work of all, pickled once from the first one, or what is pickled for each process."""
        if self._pickled is None and not self._is_closed and context.get_spawning_popen() is not None:
            try:
                self._pickled = for_all(work, self._look, ways=fallback.WITHOUT_PICKLE)
            except NotForAllError:
                self._is_closed = True
        return self._pickled or ForOne(work, self._look, fallback.WITHOUT_PICKLE)

    def close(self) -> None:
        """Gives back what the workers that have started hold themselves."""
        if self._pickled is not None:
            self._pickled.close()
        self._pickled, self._is_closed = None, True


class SharedWork:
    """The work of one worker. Pickled, it is a reference to that of all, with the number of this worker."""

    def __init__(self, shared: Shared, work: Any) -> None:
        self._shared = shared
        self._work = work

    def __reduce__(self) -> tuple[Any, ...]:
        return _with_number, (self._shared.pickled(self._work), self._work.worker)


def _with_number(work: Any, worker: int) -> Any:
    """Returns the work of a worker, in the worker."""
    return work._replace(worker=worker)


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)
