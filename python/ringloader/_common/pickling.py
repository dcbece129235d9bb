"""Pickles of batches and errors, and answers to the native encoder about numpy's arrays and about classes."""

from __future__ import annotations

import contextlib
import copyreg
import functools
import importlib
import io
import pickle
import sys
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.multiprocessing import reductions

from ringloader._common.attributes import shown
from ringloader._torch import internals

# The place of a leaf's content, for the native encoder: object to keep, address, bytes, itemsize, whether
# column-major and whether read-only, dtype tag, shape.
_ArrayParts = tuple[object, int, int, int, tuple[bool, bool], bytes, list[int]]

Leaves = Callable[[object], Any]

# The protocol of a queue's pickles. Some objects arrive different with another one.
_PROTOCOL = pickle.DEFAULT_PROTOCOL

_BY_NAME = b"s"
_BY_PICKLE = b"p"


class _BatchPickler(ForkingPickler):
    """Pickles a batch whose tensors, arrays and storages travel on their own, as numbered leaves."""

    def __init__(self, file: io.BytesIO, leaves: Leaves) -> None:
        super().__init__(file, _PROTOCOL)
        if self.dispatch_table.get(torch.Tensor) is reductions.reduce_tensor:
            self.dispatch_table = {**self.dispatch_table, torch.Tensor: _reduce_tensor}
        # An attribute of the instance is called by the C pickler without a Python frame in between. Not its
        # `persistent_id`, which is asked for each number and string too.
        self.reducer_override = leaves  # type: ignore[method-assign]


def _reduce_tensor(tensor: Any) -> Any:
    if tensor.is_quantized:
        # torch's reduction for other processes loses scale and zero point.
        return tensor.__reduce_ex__(2)
    return reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]


def leaf(number: int) -> object:
    """The leaf of that number, in a pickle. The unpickler puts a function of its own in its place."""
    raise pickle.UnpicklingError(f"leaf {number} of a batch is not in its pickle")


class _BatchUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, leaves: list[object]) -> None:
        super().__init__(file)
        self._leaf = leaves.__getitem__

    def find_class(self, module: str, name: str) -> Any:
        if name == "leaf" and module == __name__:
            return self._leaf
        return super().find_class(module, name)


def dumps(batch: object, leaves: Leaves) -> bytes:
    """Pickles ``batch``.

    Args:
        batch: Any object that ``multiprocessing`` can pickle.
        leaves: Asked for each object but numbers, strings and plain containers: how the leaf that stands for
            it is pickled, which is :func:`leaf` with its number, or NotImplemented.

    Raises:
        Exception: What pickling raises for what cannot be pickled.
    """
    if type(batch) is internals.ExceptionWrapper:
        batch = whole(batch)
    file = io.BytesIO()
    _BatchPickler(file, leaves).dump(batch)
    return file.getvalue()


class WholeError(internals.ExceptionWrapper):  # type: ignore[misc]
    """A ``RuntimeError`` with name, message, notes, causes and traceback of another error."""

    def __init__(self, wrapper: Any) -> None:
        self.exc_type = RuntimeError
        self.exc_msg = wrapper.exc_msg
        self.where = wrapper.where
        self.name = wrapper.exc_type.__name__

    def reraise(self) -> None:
        """Raises it in torch's words."""
        raise RuntimeError(_text(self, self.name))


def _text(wrapper: Any, name: str) -> str:
    """MIRRORS torch _utils.py::ExceptionWrapper.reraise."""
    return f"Caught {name} {wrapper.where}.\nOriginal {wrapper.exc_msg}"


def whole(wrapper: Any, is_sent: bool = True) -> Any:
    """Returns torch's wrapper of a worker's error, or a stand-in if torch would lose the error on its way.

    torch loses one whose class cannot be sent, or not be made of a text.

    Args:
        wrapper: Made by torch, in the worker.
        is_sent: True if it goes to another process.
    """
    kind = wrapper.exc_type
    try:
        if is_sent:
            ForkingPickler.dumps(kind)
        # torch makes the error again by these calls. It expects no error of the first, such as
        # ExceptionGroup's. Older versions expect only a TypeError of the second.
        text = _text(wrapper, kind.__name__)
        if getattr(kind, "message", None):
            kind(message=text)
        elif kind.__module__ != "builtins":
            with contextlib.suppress(TypeError):
                kind(text)
    except Exception:
        return WholeError(wrapper)
    return wrapper


class _ExactPickler(pickle.Pickler):
    """Pickles a sample without its leaves: by value, so that any process can unpickle it, again and again."""

    def __init__(self, file: io.BytesIO, leaves: Leaves) -> None:
        super().__init__(file, 5)
        # So the storage in a tensor of another class is a leaf. torch's own reduction saves it as a file.
        self.dispatch_table = {
            **copyreg.dispatch_table,
            torch.TypedStorage: reductions.reduce_typed_storage,
            np.ndarray: _reduce_array,
            np.memmap: _reduce_array,
        }
        self.reducer_override = leaves  # type: ignore[method-assign]


def _reduce_array(array: np.ndarray[Any, Any]) -> Any:
    if not _is_reversed(array):
        return array.__reduce_ex__(5)
    # A leaf, and numpy's own pickle, would lose the reversal, and torch would take an array that it refuses.
    axes = tuple(slice(None, None, -1 if stride < 0 else 1) for stride in array.strides)
    # A memory map's own indexing makes a plain array of one without a file.
    turned = np.ndarray.__getitem__
    return turned, (turned(array, axes), axes)


def exact_dumps(sample: object, leaves: Leaves) -> bytes:
    """Pickles ``sample`` as :func:`dumps` does, but as it is, and by value.

    Raises:
        Exception: What pickling raises for what cannot be pickled, or only for a process that starts.
    """
    file = io.BytesIO()
    _ExactPickler(file, leaves).dump(sample)
    return file.getvalue()


def loads(data: bytes, leaves: list[object]) -> object:
    """Unpickles what :func:`dumps` or :func:`exact_dumps` made, with the leaves by their numbers."""
    return _BatchUnpickler(io.BytesIO(data), leaves).load()


class _CopyingPickler(ForkingPickler):
    """Pickles tensors with their bytes. torch's reductions for other processes can be unpickled once only."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, _PROTOCOL)
        theirs = reductions.__name__
        self.dispatch_table = {
            kind: reduce
            for kind, reduce in self.dispatch_table.items()
            if getattr(reduce, "__module__", None) != theirs
        }


def dumps_index(index: object, again: bool = False) -> bytes:
    """Pickles the index of a task, or a whole message.

    Args:
        index: It.
        again: Whether it may be unpickled more than once.

    Raises:
        TypeError: When it cannot be pickled, in the main process and not, as with a queue's thread, never.
    """
    try:
        if again:
            file = io.BytesIO()
            _CopyingPickler(file).dump(index)
            return file.getvalue()
        return bytes(ForkingPickler.dumps(index))
    except Exception as error:
        raise TypeError(
            f"the index {shown(index, 200)} that the sampler yielded cannot be sent to a worker process "
            f"({type(error).__name__}: {error}); yield something that can be pickled, or use num_workers=0"
        ) from error


def loads_index(data: bytes) -> object:
    """Unpickles what :func:`dumps_index` made."""
    return pickle.loads(data)


def _is_its_bytes(dtype: np.dtype[Any]) -> bool:
    """True if an item's content is its own bytes, and not the address of something else."""
    return not dtype.hasobject and dtype.kind in "biufcmMSUV"


def _dtype_tag(dtype: np.dtype[Any]) -> bytes | None:
    """Returns the tag of ``dtype``, or None if its items are not their bytes."""
    if not _is_its_bytes(dtype):
        return None
    if dtype.kind == "V" or dtype.metadata is not None:
        # Equal dtypes of this sort may still differ, so nothing is remembered by them.
        return _BY_PICKLE + pickle.dumps(dtype)
    return _plain_tag(dtype)


@functools.lru_cache(maxsize=256)
def _plain_tag(dtype: np.dtype[Any]) -> bytes:
    name = dtype.str
    try:
        if np.dtype(name) == dtype:
            return _BY_NAME + name.encode()
    except TypeError:
        # A name that numpy does not know.
        pass
    # Dtypes of other packages, whose names may look like numpy's.
    return _BY_PICKLE + pickle.dumps(dtype)


def array_dtype(tag: bytes) -> np.dtype[Any]:
    """Returns the dtype that a tag stands for: a new object where its fields can be renamed."""
    dtype = np.dtype(tag[1:].decode()) if tag[:1] == _BY_NAME else pickle.loads(tag[1:])
    # Whatever the tag says: an array over shared bytes must not take them for addresses.
    if not isinstance(dtype, np.dtype) or not _is_its_bytes(dtype):
        raise TypeError(f"the tag of an array's dtype holds {dtype!r}")
    return dtype


def array_tag(array: np.ndarray[Any, Any]) -> _ArrayParts | None:
    """Returns the place of the content of ``array``, or None if numpy itself must pickle it.

    Like a pickled one, an array arrives writable, in the machine's byte order, and C-contiguous unless it is
    Fortran-contiguous. From protocol 5 on, which is Python 3.14's, it arrives as by :func:`exact_array_tag`.
    """
    return _array_parts(array, exact=_PROTOCOL >= 5)


def exact_array_tag(array: np.ndarray[Any, Any]) -> _ArrayParts | None:
    """Returns what :func:`array_tag` does, for an array that arrives as it is, if it has no gaps.

    It is then perhaps read-only, of the other byte order, with its axes in any order. None for one with a
    reversed axis too, which has its strides by ``_reduce_array``.
    """
    if _is_reversed(array):
        return None
    if not (array.flags.forc or array.dtype.isnative):
        # With gaps, it would arrive in the machine's byte order.
        array = array.copy(order="K")
    return _array_parts(array, exact=True)


def _array_parts(array: np.ndarray[Any, Any], exact: bool) -> _ArrayParts | None:
    flags = array.flags
    as_it_is = exact and flags.forc
    if exact and not flags.forc and _without_gaps(array):
        return None
    if not as_it_is and array.dtype.kind != "V" and not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    tag = _dtype_tag(array.dtype)
    if tag is None or array.nbytes == 0:
        # There is nothing to carry, and pickle has strides of its own for it.
        return None
    if not flags.forc:
        array = array.copy(order="C")
    shown = flags.fnc, as_it_is and not flags.writeable
    return array, array.ctypes.data, array.nbytes, array.itemsize, shown, tag, list(array.shape)


def _is_reversed(array: np.ndarray[Any, Any]) -> bool:
    """True if ``array`` has a negative stride, in an axis of length 1 too, which torch refuses."""
    return min(array.strides, default=0) < 0


def _without_gaps(array: np.ndarray[Any, Any]) -> bool:
    """True if ``array`` is C-contiguous once its axes are in another order."""
    order = sorted(range(array.ndim), key=array.strides.__getitem__, reverse=True)
    return array.transpose(order).flags.c_contiguous


@functools.lru_cache(maxsize=1024)
def _is_plain_named_tuple(cls: type) -> bool:
    return (
        cls.__bases__ == (tuple,)
        and isinstance(getattr(cls, "_fields", None), tuple)
        and cls.__dictoffset__ == 0
        and not {"__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"} & cls.__dict__.keys()
        and cls not in getattr(ForkingPickler, "_extra_reducers", {})
    )


def named_tuple_name(cls: type) -> tuple[str, str] | None:
    """Module and name of a plain named tuple class; None for any other subclass of tuple."""
    if not _is_plain_named_tuple(cls):
        return None
    found: object = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    # A class that its name does not find, or no longer: the pickler says so in its own words.
    return (cls.__module__, cls.__qualname__) if found is cls else None


def find_class(module: str, qualname: str) -> type:
    """The class that :func:`named_tuple_name` named, as pickle finds it: imported, and the one of now."""
    found: Any = importlib.import_module(module)
    for name in qualname.split("."):
        found = getattr(found, name)
    if not isinstance(found, type):
        raise TypeError(f"{module}.{qualname} is {found!r}, not a named tuple's class")
    return found
