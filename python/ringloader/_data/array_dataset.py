"""Arrays of one length, as a dataset; its memory maps are pickled as the names of their files."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy
import torch
from numpy.lib.stride_tricks import as_strided
from torch.utils.data import Dataset


class ArrayDataset(Dataset[Any]):
    """A dataset of arrays of one length: item ``i`` is row ``i`` of each.

    With ringloader's loader and torch's ``default_collate``, native code copies the rows of a batch straight
    into the batch. No Python object is made for a row. The batches equal those of torch's loader.

    - ``ArrayDataset(x)[i]`` is ``x[i]``.
    - ``ArrayDataset(x, y)[i]`` is ``(x[i], y[i])``.
    - ``ArrayDataset(image=x, label=y)[i]`` is ``{"image": x[i], "label": y[i]}``.
    - ``ArrayDataset(x, y, weight=w)[i]`` is ``(x[i], y[i], {"weight": w[i]})``.

    The dataset copies no array. If you change an array later, batches show the change where workers share its
    memory. Forked workers share tensors in shared memory. They also share memory maps, except in mode
    ``"c"``.

    Workers that are not forked get a pickle of the dataset. For a ``numpy.memmap``, the pickle has only the
    name of its file and its position in the file. The file must exist, unchanged, where the dataset is
    unpickled. A map in mode ``"c"``, or a map whose file has been deleted, is pickled with its content.

    Args:
        *arrays: Arrays, tensors, memory maps, or other sequences with indices from 0. All have the same
            length.
        **named: More arrays, by name.

    Raises:
        ValueError: If there is no array, or if lengths differ.
        TypeError: If an array has no length, or cannot be indexed by position.
    """

    # The module where pickles look for the class.
    __module__ = "ringloader"

    arrays: tuple[Any, ...]
    named: dict[str, Any]

    def __init__(self, *arrays: Any, **named: Any) -> None:
        if not arrays and not named:
            raise ValueError("ArrayDataset needs at least one array")
        labels = {f"argument {number}": array for number, array in enumerate(arrays)}
        labels.update({f"{name}=": array for name, array in named.items()})
        lengths = {label: _length(label, array) for label, array in labels.items()}
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{label.rstrip('=')}: {length}" for label, length in lengths.items())
            raise ValueError(f"ArrayDataset needs arrays of one length, not of several ({told})")
        self.arrays = arrays
        self.named = named

    def __len__(self) -> int:
        return len(self.arrays[0] if self.arrays else next(iter(self.named.values())))

    def __getitem__(self, index: Any) -> Any:
        rows = [array[index] for array in self.arrays]
        return self.shaped(rows, {name: array[index] for name, array in self.named.items()}, tuple)

    def shaped(self, columns: list[Any], named: dict[str, Any], kind: Callable[[list[Any]], Any]) -> Any:
        """An item or a batch of its parts, which are one for each array.

        Args:
            columns: Those of positional arrays.
            named: Those of named ones.
            kind: Makes the sequence of several: a tuple in an item, a list in a batch.
        """
        if not columns:
            return named
        if named:
            return kind([*columns, named])
        return columns[0] if len(columns) == 1 else kind(columns)

    def __repr__(self) -> str:
        told = [_told(array) for array in self.arrays]
        told += [f"{name}={_told(array)}" for name, array in self.named.items()]
        return f"{type(self).__name__}({', '.join(told)})"

    def __getstate__(self) -> dict[str, Any]:
        return {
            **vars(self),
            "arrays": tuple(_pickled_by_name(array) for array in self.arrays),
            "named": {name: _pickled_by_name(array) for name, array in self.named.items()},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.arrays = tuple(_itself(array) for array in self.arrays)
        self.named = {name: _itself(array) for name, array in self.named.items()}


def _length(label: str, array: Any) -> int:
    if isinstance(array, Mapping) or not hasattr(array, "__getitem__"):
        raise TypeError(
            f"ArrayDataset needs arrays or sequences: {label} is of type {type(array).__name__}"
            + (", so pass it as **named" if isinstance(array, Mapping) else "")
        )
    if hasattr(array, "iloc"):
        raise TypeError(
            f"ArrayDataset indexes by position: {label} is of type {type(array).__name__}, which is "
            "indexed by labels, so pass its to_numpy()"
        )
    try:
        return len(array)
    except TypeError:
        raise TypeError(
            f"ArrayDataset needs arrays or sequences with a length: {label} is {_told(array)}"
        ) from None


def _told(array: Any) -> str:
    if isinstance(array, (numpy.ndarray, torch.Tensor)):
        return f"{type(array).__name__} of {str(array.dtype).removeprefix('torch.')} {list(array.shape)}"
    length = f" of {len(array)}" if hasattr(array, "__len__") else ""
    return f"{type(array).__name__}{length}"


_Map = numpy.memmap[Any, Any]


def _pickled_by_name(array: Any) -> Any:
    """Returns ``array``, or a stand-in that pickles as the name of its file if the file has all of it."""
    if type(array) is not numpy.memmap:
        return array
    mapping = getattr(array, "_mmap", None)
    # Writes to a private map are in no file.
    named = array.filename is not None and array.mode != "c" and Path(array.filename).exists()
    return _Named(array, mapping) if isinstance(mapping, mmap.mmap) and named and array.size else array


def _itself(array: Any) -> Any:
    """Returns the array that :func:`_pickled_by_name` was given, or its like where it was unpickled."""
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
    """A part of a file, mapped: an offset, a length in bytes, and the first element in them."""
    offset, length, first = place
    whole = numpy.memmap(filename, numpy.uint8, mode, offset, (length,))
    element = whole[first : first + dtype.itemsize].view(dtype)
    return cast(_Map, as_strided(element, shape, strides, subok=True, writeable=mode == "r+"))
