"""What all workers of an iterator are given, pickled once for all of them.

torch pickles the arguments of its worker loop for every worker that does not fork. Here the first worker's
are pickled into memory that the others read too. What belongs to one process alone is made again for each:
the descriptors, and arguments that differ. What cannot be treated so is pickled for each worker, as before.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
from collections.abc import Callable, Iterator
from multiprocessing import context, reduction
from typing import Any

import numpy as np
import torch.multiprocessing
from torch.multiprocessing import reductions

from ringloader._common import memory_file

# Shorter arrays go with the pickle: a mapping of their own costs more than a copy.
_MAPPED_FROM = 64 << 10
# Of the address of a mapped array, as of memory that numpy allocates itself.
_ALIGNMENT = 64

# Arguments of these types may differ from worker to worker: they refer to nothing that is shared.
_PLAIN = (int, str, type(None))


class _NotForAllError(BaseException):
    """Something must be pickled for each worker. No `Exception`: no handler on the way may take it."""


class Arguments:
    """The arguments of one worker's loop. Pickled, they are a reference to what was pickled once."""

    def __init__(self, shared: Shared, arguments: tuple[Any, ...]) -> None:
        self._shared = shared
        self._arguments = arguments

    def __iter__(self) -> Iterator[Any]:
        return iter(self._arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        sent = self._shared.send(self._arguments)
        return (tuple, (self._arguments,)) if sent is None else (_load, sent)


class Shared:
    """The arguments that are the same for all workers of an iterator, in memory until :meth:`close`.

    They are pickled when the first worker starts, so what this raises is raised where torch's pickling would.
    """

    def __init__(self) -> None:
        self._first: tuple[Any, ...] | None = None
        self._for_each = not _pickles_as_usual()
        self._pickle: _Memory | None = None
        self._arrays: _Memory | None = None
        self._fds: list[int] = []
        # What was pickled keeps the descriptors in `_fds` open, also objects that lived only for that.
        self._alive: object = None

    def send(self, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """What the process that is being started needs for its arguments; None if they must be pickled."""
        if self._for_each or context.get_spawning_popen() is None:
            return None
        if self._first is None:
            try:
                self._dump(arguments)
            except BaseException as error:
                self.close()
                if not isinstance(error, _NotForAllError):
                    raise
                self._for_each = True
                return None
        own = self._differing(arguments)
        if own is None or self._pickle is None or self._arrays is None:
            return None
        return (
            reduction.DupFd(self._pickle.fd),
            reduction.DupFd(self._arrays.fd) if self._arrays.size else None,
            [reduction.DupFd(fd) for fd in self._fds],
            own,
        )

    def _differing(self, arguments: tuple[Any, ...]) -> dict[int, Any] | None:
        """By position, those that are not the first worker's; None if that cannot be told, or sent."""
        first = self._first
        if first is None or len(first) != len(arguments):
            return None
        pairs = enumerate(zip(first, arguments, strict=True))
        own = {number: mine for number, (one, mine) in pairs if not _is_same(one, mine)}
        return own if all(type(value) in _PLAIN for value in own.values()) else None

    def _dump(self, arguments: tuple[Any, ...]) -> None:
        self._pickle = _Memory()
        self._arrays = _Memory()
        pickler = _PicklerForAll(self._pickle, self._arrays)
        popen = context.get_spawning_popen()
        stand_in = _AnyPopen()
        context.set_spawning_popen(stand_in)  # type: ignore[arg-type]
        try:
            pickler.dump(arguments)
        finally:
            context.set_spawning_popen(popen)
        # What one worker did to a file, another would find in its arguments.
        memory_file.seal_bytes(self._pickle.fd)
        memory_file.seal_bytes(self._arrays.fd)
        self._fds = stand_in.fds
        self._alive = pickler if stand_in.fds else None
        self._first = arguments

    def close(self) -> None:
        """Gives back what the workers that have started hold themselves."""
        for memory in (self._pickle, self._arrays):
            if memory is not None:
                memory.close()
        self._first = self._pickle = self._arrays = self._alive = None
        self._fds = []
        # A worker that still starts after this gets a pickle of its own.
        self._for_each = True


def _is_same(one: object, other: object) -> bool:
    if type(one) is list and type(other) is list:
        # torch's holder of the dataset: each worker has its own, with the same in it.
        return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
    return one is other


def _pickles_as_usual() -> bool:
    """Whether multiprocessing's pickling is its own: some replace it by one that can pickle more."""
    parts = (reduction.ForkingPickler, reduction.dump, reduction.DupFd)
    own = getattr(context, "reduction", None) is reduction
    return own and all(part.__module__ == reduction.__name__ for part in parts)


class _Memory:
    """A file in memory that is written from its beginning to its end."""

    def __init__(self) -> None:
        try:
            self.fd = memory_file.make("ringloader-arguments")
        except OSError as error:
            raise _NotForAllError from error
        self.size = 0

    def write(self, data: Any) -> int:
        with memoryview(data) as view, view.cast("B") as rest:
            written = 0
            while written < len(rest):
                try:
                    written += os.write(self.fd, rest[written:])
                except OSError as error:
                    raise _NotForAllError from error
            self.size += written
            return written

    def align(self) -> int:
        """The next place where an array may begin."""
        self.write(bytes(-self.size % _ALIGNMENT))
        return self.size

    def close(self) -> None:
        os.close(self.fd)


class _AnyPopen:
    """Stands for the process that is being started, while pickling for all of them.

    Descriptors are numbered, and sent to each worker under their number. What else a reduction wants to know
    of the process would be different for another.
    """

    def __init__(self) -> None:
        self.fds: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        self.fds.append(fd)
        return len(self.fds) - 1

    @property
    def DupFd(self) -> type[_NumberedFd]:  # noqa: N802
        return _NumberedFd

    def __getattr__(self, name: str) -> Any:
        raise _NotForAllError(name)


# In a worker: the descriptors that were sent to it, by number. Kept, for a part may be unpickled only later.
_received: list[Any] = []
# In a worker, while it unpickles: where the arrays lie.
_mapped: mmap.mmap | None = None


class _NumberedFd:
    """A descriptor on its way to each worker. MIRRORS multiprocessing popen_forkserver.py::_DupFd."""

    def __init__(self, number: int) -> None:
        self.number = number

    def detach(self) -> int:
        fd: int = _received[self.number].detach()
        return fd


class _PicklerForAll(reduction.ForkingPickler):
    """As multiprocessing pickles, with large arrays apart, and refusing what is for one process."""

    def __init__(self, file: _Memory, arrays: _Memory) -> None:
        super().__init__(file)
        table = dict(self.dispatch_table)
        for kind, reduce in reduction.ForkingPickler._extra_reducers.items():  # type: ignore[attr-defined]
            table[kind] = _for_all(reduce)
        table.setdefault(np.ndarray, lambda array: _reduce_array(array, arrays))
        self.dispatch_table = table


def _for_all(reduce: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A reduction that is registered for other processes, made to refuse where it is for one of them."""
    module = getattr(reduce, "__module__", None) or ""
    if module.startswith("multiprocessing."):
        return reduce
    if module != reductions.__name__:
        return _refuse
    if reduce in (reductions.reduce_typed_storage, reductions.reduce_typed_storage_child):
        # They lead to the untyped storage.
        return reduce

    def reduce_in_memory(thing: Any) -> Any:
        # A handle to another device's memory, and a file's name, are counted for each receiver.
        device = getattr(thing, "device", None)
        if (
            getattr(device, "type", None) not in ("cpu", "meta")
            or torch.multiprocessing.get_sharing_strategy() == "file_system"  # type: ignore[no-untyped-call]
        ):
            raise _NotForAllError
        return reduce(thing)

    return reduce_in_memory


def _refuse(thing: object) -> Any:
    raise _NotForAllError(type(thing))


def _reduce_array(array: np.ndarray[Any, Any], arrays: _Memory) -> Any:
    flags = array.flags
    in_order = flags.c_contiguous or flags.f_contiguous
    # Pickle gives elements back in the machine's byte order.
    as_they_are = array.dtype.isnative and not array.dtype.hasobject
    if array.nbytes < _MAPPED_FROM or not as_they_are or not in_order:
        return array.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    column_major = not flags.c_contiguous
    begin = arrays.align()
    elements = (array.T if column_major else array).reshape(-1)
    arrays.write(elements.view(np.uint8))
    # Pickle's older protocols lose that an array may not be written to.
    writable = flags.writeable or pickle.DEFAULT_PROTOCOL < 5
    return _map_array, (begin, array.shape, array.dtype, "F" if column_major else "C", writable)


def _map_array(begin: int, shape: tuple[int, ...], dtype: Any, order: Any, writable: bool) -> Any:
    assert _mapped is not None
    array = np.ndarray(shape, dtype, _mapped, begin, order=order)
    array.flags.writeable = writable
    return array


def _load(pickled: Any, arrays: Any, sent: list[Any], own: dict[int, Any]) -> tuple[Any, ...]:
    """The arguments, in the worker.

    Arrays are mapped for this worker alone: it may write to them, as to a copy, and no other process sees it.
    """
    global _mapped
    _received[:] = sent
    if arrays is not None:
        with _closing(arrays.detach()) as fd:
            _mapped = mmap.mmap(fd, 0, mmap.MAP_PRIVATE)
    try:
        with _closing(pickled.detach()) as fd:
            memory = mmap.mmap(fd, 0, mmap.MAP_PRIVATE)
        with memory:
            arguments = list(pickle.loads(memory))
    finally:
        _mapped = None
    for number, value in own.items():
        arguments[number] = value
    return tuple(arguments)


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)
