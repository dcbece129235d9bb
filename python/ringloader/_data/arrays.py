"""A numpy array in shared memory."""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import operator
import os
from collections.abc import Callable, Iterable
from multiprocessing import context, reduction
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

import ringloader._native as _native
from ringloader._log import logger

if _native.SUPPORTED:
    from ringloader._common import memory_file

# Bytes that are written between two looks at what the system has left.
_LOOK = 16 << 20
# Below this many bytes, the size is not the reason why the system refuses.
_LARGE = 1 << 30

_NDArray = np.ndarray[Any, np.dtype[Any]]


class _Memory:
    """A memfd of a fixed size, mapped. The descriptor stays open for processes that are started.

    On other systems than Linux: memory of this process, without a descriptor.
    """

    fd = -1
    map: mmap.mmap | bytearray

    def __init__(self, fd: int, nbytes: int = 0, written: bytearray | None = None) -> None:
        """Takes the descriptor over, unless this raises."""
        # An empty object cannot be mapped.
        self.map = written or mmap.mmap(fd, nbytes)
        self.fd = fd

    def __del__(self) -> None:
        # The mapping is closed by its last array.
        if self.fd >= 0:
            os.close(self.fd)


class SharedArray(_NDArray):
    """A numpy array in shared memory: all processes that have it see each other's changes.

    A ``SharedArray`` is a ``numpy.ndarray``. Indices, slices, computations and copies (``copy()``,
    ``astype()``) return a plain ``numpy.ndarray``; views keep the memory. A new process gets only a
    descriptor, with any start method. Any other pickle, and a copy, contains the elements, in separate
    memory.

    Every process that has the array may write to it. There are no locks: if several processes write to the
    same elements, your program must coordinate them. To protect the array, set
    ``array.flags.writeable = False`` before the loader starts its workers.

    On macOS and Windows, each process has its own array. A new process gets a copy, and the log says so once.

    The memory is freed with the last array and view in the last process. A forked child keeps it until it
    ends. Each process keeps two file descriptors for it.

    Args:
        array_or_shape: An integer or a tuple is the shape of an array of zeros. Anything else is copied, as
            ``numpy.asarray`` reads it.
        dtype: The type of the elements. Default: the type of the copied elements; ``float64`` for zeros.

    Raises:
        TypeError: If the elements are Python objects: use ``SharedList``.
        ValueError: If a dimension is negative.
        MemoryError: If the machine or a control group has too little memory for the copied elements, or if
            the system refuses memory of that size. An array of zeros takes memory only when it is written to.
        OSError: If the system refuses memory or a descriptor.
    """

    _memory: _Memory | None

    if TYPE_CHECKING:

        def __init__(self, array_or_shape: Any, dtype: npt.DTypeLike | None = None) -> None: ...

    def __new__(cls, array_or_shape: Any, dtype: npt.DTypeLike | None = None) -> Self:
        if isinstance(array_or_shape, (int, np.integer, tuple)) and not isinstance(array_or_shape, bool):
            return cls._over(_new(), array_or_shape, np.dtype(float if dtype is None else dtype))
        source = np.asarray(array_or_shape, dtype)
        if source.nbytes >= _LOOK:
            _require(source.nbytes, 0)
        made = cls._over(_new(), source.shape, source.dtype)
        np.copyto(made, source)
        return made

    @classmethod
    def from_rows(cls, rows: Iterable[Any], dtype: npt.DTypeLike | None = None) -> Self:
        """Returns an array of rows that are read one by one, with private memory for only a row and 1 MiB.

        Args:
            rows: Arrays of one shape. Without rows, the array has the shape ``(0,)``.
            dtype: The type of the elements. Default: the type of the first row.

        Raises:
            ValueError: If a row has another shape than the first.
            TypeError: If the elements are Python objects, or a row cannot be cast safely.
            MemoryError: If the machine or a control group has too little memory; the message has the figures.
        """
        fd = _new()
        count = unseen = 0
        first: _NDArray | None = None
        written = bytearray()
        try:
            with contextlib.ExitStack() as opened:
                write: Callable[[Any], object] = written.extend
                if fd >= 0:
                    write = opened.enter_context(open(fd, "wb", buffering=1 << 20, closefd=False)).write
                for count, given in enumerate(rows, 1):
                    row = np.asarray(given, dtype)
                    if first is None:
                        first = row
                        _check(first.dtype)
                    if row.shape != first.shape:
                        raise ValueError(
                            f"row {count - 1} has the shape {row.shape}, and row 0 has {first.shape}"
                        )
                    row = row.astype(first.dtype, order="C", casting="safe", copy=False)
                    unseen += row.nbytes
                    if unseen >= _LOOK:
                        _require(row.nbytes, (count - 1) * row.nbytes)
                        unseen = 0
                    if row.size:
                        write(row.reshape(-1).view(np.uint8).data)
        except BaseException:
            _close(fd)
            raise
        if first is None:
            return cls._over(fd, (0,), np.dtype(float if dtype is None else dtype))
        return cls._over(fd, (count, *first.shape), first.dtype, written)

    @classmethod
    def _over(cls, fd: int, shape: Any, dtype: np.dtype[Any], written: bytearray | None = None) -> Self:
        """An array over a memfd that is not mapped yet, and which it takes over.

        Without a memfd, over what was ``written``, or new memory.
        """
        try:
            _check(dtype)
            sizes = _sizes(shape)
            nbytes = math.prod(sizes) * dtype.itemsize
            try:
                # An empty file cannot be mapped.
                if fd >= 0:
                    os.ftruncate(fd, max(1, nbytes))
                    memory_file.seal_size(fd)
                memory = _Memory(fd, max(1, nbytes), written)
            except (OSError, OverflowError, ValueError) as error:
                if nbytes < _LARGE:
                    raise
                raise MemoryError(
                    f"the system refuses shared memory for an array of the shape {sizes}, {nbytes} bytes "
                    f"({error}); use a smaller shape or dtype"
                ) from error
        except BaseException:
            _close(fd)
            raise
        made = np.ndarray.__new__(cls, sizes, dtype, memory.map)
        made._memory = memory
        return made

    def __array_finalize__(self, source: Any) -> None:
        memory = getattr(source, "_memory", None)
        # A copy has memory of its own, and must not keep this.
        is_view = memory is not None and np.may_share_memory(self, source)
        self._memory = memory if is_view else None

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        if array is self:
            # The result of an operation in place.
            return array
        plain = np.asarray(array)
        # numpy before 2.0 does not say whether it wants a scalar.
        return plain[()] if return_scalar or plain.ndim == 0 else plain

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _without_copies(super().__array_function__(func, types, args, kwargs))

    def __getitem__(self, key: Any) -> Any:
        return self.view(np.ndarray)[key]

    def __iter__(self) -> Any:
        return iter(self.view(np.ndarray))

    def __deepcopy__(self, memo: Any) -> Any:
        return type(self)(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        memory = self._memory
        if memory is None:
            return self.view(np.ndarray).__reduce_ex__(protocol)
        if not _native.SUPPORTED and context.get_spawning_popen() is not None:
            _log_copy()
        if not _native.SUPPORTED or context.get_spawning_popen() is None:
            return type(self), (self.view(np.ndarray).copy(),)
        whole = np.frombuffer(memory.map, np.uint8)
        offset = self.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
        layout = (self.shape, self.dtype, offset if self.size else 0, self.strides, self.flags.writeable)
        return _of_descriptor, (type(self), reduction.DupFd(memory.fd), layout)


def _without_copies(result: Any) -> Any:
    """Makes a copy that numpy has given this class a plain array. A view stays as it is."""
    if isinstance(result, SharedArray) and result._memory is None:
        return result.view(np.ndarray)
    if type(result) in (tuple, list):
        return type(result)(_without_copies(one) for one in result)
    return result


def _method_without_copies(name: str) -> Any:
    method = getattr(np.ndarray, name)

    @functools.wraps(method)
    def called(self: SharedArray, *args: Any, **kwargs: Any) -> Any:
        return _without_copies(method(self, *args, **kwargs))

    return called


# Methods of numpy's that give a copy the class of the array, always or by its layout. numpy's other methods
# give views, or go by `__array_wrap__`.
for _name in (
    "astype", "byteswap", "choose", "compress", "conj", "conjugate", "copy", "cumprod", "cumsum", "diagonal",
    "flatten", "ravel", "repeat", "reshape", "round", "take",
):  # fmt: skip
    setattr(SharedArray, _name, _method_without_copies(_name))
del _name


def _new() -> int:
    """Returns a new memfd; -1 on other systems than Linux."""
    return _native.OwnFd.memory("ringloader-array").detach() if _native.SUPPORTED else -1


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


@functools.cache
def _log_copy() -> None:
    logger.warning(
        "a new process gets a copy of a SharedArray on this system, where no memory is shared: it does not "
        "see what others write later, and others do not see what it writes"
    )


def _require(needed: int, built: int) -> None:
    """Checks free memory first: at a cgroup's limit the kernel would kill this process."""
    if not _native.SUPPORTED:
        return
    available = _native.available_memory()
    if needed + _LOOK > available:
        raise MemoryError(
            f"an array in shared memory has {built} bytes and needs {needed} more, and {_LOOK} to spare, but "
            f"only {available} are available on the machine and in its control groups; use a smaller array, "
            "or raise the limit"
        )


def _sizes(shape: Any) -> tuple[int, ...]:
    sizes = tuple(operator.index(size) for size in (shape if isinstance(shape, tuple) else (shape,)))
    if any(size < 0 for size in sizes):
        raise ValueError(f"an array cannot have the shape {sizes}: a dimension is negative")
    return sizes


def _check(dtype: np.dtype[Any]) -> None:
    if dtype.hasobject:
        raise TypeError(f"dtype {dtype} refers to Python objects, which no memory can share: use SharedList")


def _of_descriptor(kind: type[SharedArray], sent: Any, layout: tuple[Any, ...]) -> SharedArray:
    shape, dtype, offset, strides, writeable = layout
    fd = sent.detach()
    try:
        memory = _Memory(fd)
    except BaseException:
        os.close(fd)
        raise
    made = np.ndarray.__new__(kind, shape, dtype, memory.map, offset, strides)
    made._memory = memory
    made.flags.writeable = writeable
    return made


SharedArray.__module__ = "ringloader"
