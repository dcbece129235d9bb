"""numpy's memory maps, pickled as the names of their files."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any, cast

import numpy
from numpy.lib.stride_tricks import as_strided

_Map = numpy.memmap[Any, Any]


def pickled_by_name(array: Any) -> Any:
    """Returns ``array``, or a stand-in that pickles as the name of its file if the file has all of it."""
    if type(array) is not numpy.memmap:
        return array
    mapping = getattr(array, "_mmap", None)
    # Writes to a private map are in no file.
    named = array.filename is not None and array.mode != "c" and Path(array.filename).exists()
    return _Named(array, mapping) if isinstance(mapping, mmap.mmap) and named and array.size else array


def itself(array: Any) -> Any:
    """Returns the array that :func:`pickled_by_name` was given, or its like where it was unpickled."""
    return array.map if isinstance(array, _Named) else array


class _Named:
    """A map. Copied it is that map; pickled it is opened again."""

    def __init__(self, array: _Map, mapping: mmap.mmap) -> None:
        self.map = array
        self._mapping = mapping

    def __reduce__(self) -> Any:
        array = self.map
        # Views have the offset of the map that was opened, and the mapping begins at a multiple before it.
        begin = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
        first = _address(array) - _address(numpy.frombuffer(self._mapping, numpy.uint8))
        reach = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
        low = first + sum(step for step in reach if step < 0)
        high = first + sum(step for step in reach if step > 0) + array.itemsize
        mode = "r+" if array.flags.writeable else "r"
        place = (begin + low, high - low, first - low)
        return _opened, (str(array.filename), mode, place, array.dtype, array.shape, array.strides)


def _address(array: Any) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _opened(
    filename: str,
    mode: Any,
    place: tuple[int, int, int],
    dtype: numpy.dtype[Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> _Map:
    """A part of a file, mapped: so many bytes from an offset, and the first element in them."""
    offset, length, first = place
    whole = numpy.memmap(filename, numpy.uint8, mode, offset, (length,))
    element = whole[first : first + dtype.itemsize].view(dtype)
    return cast(_Map, as_strided(element, shape, strides, subok=True, writeable=mode == "r+"))
