"""Samples of several sizes, padded to one."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy
import torch

import ringloader._native as _native
from ringloader._torch import modes, stand_ins


class Pad:
    """Pads samples to the size of the largest, and stacks them: ``[batch, *size]``.

    Samples are tensors, arrays, numbers or lists of numbers. All have the same number of dimensions. A list
    of numbers counts as the tensor that ``torch.tensor`` makes of it.

    For tensors of one type that ``torch.nn.utils.rnn.pad_sequence(batch_first=True)`` accepts, the result is
    the same, bit for bit. The batch is contiguous, and never shares memory with a sample. In a worker of
    ringloader's loader, native code writes the samples once, straight into the memory in which the batch
    travels.

    Args:
        value: The number that fills the padding. The type of the batch must be able to hold it.
        dtype: The type of the batch, torch's or numpy's. ``None``: the type of the samples, promoted as by
            ``torch.stack`` if there are several.
        axis: The axes of a sample to pad: an int or several, negative ones counted from the last. Along other
            axes, samples must have equal sizes. ``None``: all axes.
        round_to: Rounds the size of padded axes up to a multiple of this number.
        lengths: True returns ``(batch, lengths)``. ``lengths`` has the sizes before padding, int64 on the
            CPU: ``[batch]`` for one padded axis, ``[batch, axes]`` for several.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or ``dtype`` cannot hold ``value``. When called: if
            samples have different sizes along an axis that is not padded, or different numbers of dimensions.
    """

    def __init__(
        self,
        value: float | complex = 0,
        dtype: Any = None,
        axis: int | Sequence[int] | None = None,
        round_to: int | None = None,
        lengths: bool = False,
    ) -> None:
        self._value = _checked_value(value)
        self._dtype = None if dtype is None else _checked_dtype(dtype)
        self._axis = None if axis is None else _checked_axes(axis)
        self._round_to = 1 if round_to is None else _checked_round_to(round_to)
        if not isinstance(lengths, bool):
            raise TypeError(f"'lengths' must be True or False, not {lengths!r}")
        self._lengths = lengths
        if self._dtype is not None:
            _check_holds(self._dtype, self._value)
        self._native = self._make_native()

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Makes a batch of samples."""
        if self._native is not None and not modes.is_in_modes():
            made = self._native(samples, stand_ins.port, None)
            if made is not None:
                return made
        return self._by_torch(samples)

    def __repr__(self) -> str:
        axis = self._axis[0] if self._axis is not None and len(self._axis) == 1 else self._axis
        given = {
            "value": (self._value, 0),
            "dtype": (self._dtype, None),
            "axis": (axis, None),
            "round_to": (self._round_to, 1),
            "lengths": (self._lengths, False),
        }
        shown = (
            f"{name}={found!r}" for name, (found, default) in given.items() if repr(found) != repr(default)
        )
        return f"{type(self).__name__}({', '.join(shown)})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_native"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._native = self._make_native()

    def _make_native(self) -> _native.Pad | None:
        if not _native.SUPPORTED:
            return None
        # Not a method of this object: it would be kept by what it keeps.
        value = functools.partial(_bytes_of, self._value)
        return _native.Pad(self._dtype, self._axis, self._round_to, self._lengths, value)

    def _by_torch(self, samples: Iterable[Any]) -> Any:
        """Makes the batch by torch's functions: for samples that are not native, and for errors."""
        tensors, dtype = _as_tensors(samples, self._dtype)
        _check_alike(tensors)
        _check_holds(dtype, self._value)
        shapes = [tuple(tensor.shape) for tensor in tensors]
        axes = self._axes_of(len(shapes[0]))
        size = [max(sizes) for sizes in zip(*shapes, strict=True)]
        for axis in range(len(size)):
            if axis in axes:
                size[axis] = math.ceil(size[axis] / self._round_to) * self._round_to
            else:
                self._check_agree(shapes, axis)
        batch = tensors[0].new_full((len(tensors), *size), self._value, dtype=dtype)
        for number, tensor in enumerate(tensors):
            place: tuple[Any, ...] = (number, *(slice(size) for size in tensor.shape))
            batch[place].copy_(tensor)
        if not self._lengths:
            return batch
        found = [[shape[axis] for axis in axes] for shape in shapes]
        lengths = torch.tensor(found, dtype=torch.int64, device="cpu").reshape(len(found), len(axes))
        return batch, lengths.squeeze(1) if len(axes) == 1 else lengths

    def _axes_of(self, ndim: int) -> list[int]:
        """The axes that are padded, from the front."""
        if self._axis is None:
            return list(range(ndim))
        axes = [axis + ndim if axis < 0 else axis for axis in self._axis]
        if any(not 0 <= axis < ndim for axis in axes):
            raise ValueError(f"{self!r} needs more axes than the samples have, which is {ndim}")
        if len(set(axes)) < len(axes):
            raise ValueError(f"{self!r} names an axis twice: the samples have {ndim}")
        return axes

    def _check_agree(self, shapes: list[tuple[int, ...]], axis: int) -> None:
        other = next((n for n, shape in enumerate(shapes) if shape[axis] != shapes[0][axis]), None)
        if other is not None:
            raise ValueError(
                f"samples 0 and {other} have the shapes {shapes[0]} and {shapes[other]}, which differ along "
                f"axis {axis}, and {self!r} does not pad that; add it to 'axis', or leave that out to pad all"
            )


def _checked_value(value: Any) -> Any:
    if isinstance(value, (numpy.generic, numpy.ndarray, torch.Tensor)) and value.ndim == 0:
        value = value.item()
    if not isinstance(value, (bool, int, float, complex)):
        raise TypeError(f"'value' must be a number, not {value!r}")
    return value


def _checked_dtype(dtype: Any) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    try:
        return torch.from_numpy(numpy.empty(0, dtype)).dtype
    except TypeError as error:
        raise TypeError(f"'dtype' must be a dtype of torch or numpy, not {dtype!r}: {error}") from error


def _checked_axes(axis: Any) -> tuple[int, ...]:
    axes = tuple(axis) if isinstance(axis, Iterable) and not isinstance(axis, str) else (axis,)
    for one in axes:
        if isinstance(one, bool) or not hasattr(one, "__index__"):
            raise TypeError(f"'axis' must be an int, several ints or None, not {axis!r}")
    if not axes:
        raise ValueError(f"'axis' must name an axis, not {axis!r}; Stack() pads none")
    if len(set(axes)) < len(axes):
        raise ValueError(f"'axis' must name each axis once, not {axis!r}")
    return tuple(map(operator.index, axes))


def _checked_round_to(round_to: Any) -> int:
    if isinstance(round_to, bool) or not hasattr(round_to, "__index__"):
        raise TypeError(f"'round_to' must be an int or None, not {round_to!r}")
    if round_to < 1:
        raise ValueError(f"'round_to' must be 1 or more, not {round_to!r}")
    return operator.index(round_to)


def _check_holds(dtype: torch.dtype, value: Any) -> None:
    """Torch's functions would cut 0.5 to 0, and let -1 of an unsigned type be its largest number."""
    if dtype.is_complex:
        return
    if isinstance(value, complex):
        holds = False
    elif dtype.is_floating_point:
        holds = not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max
    elif dtype == torch.bool:
        holds = value in (0, 1)
    else:
        info = torch.iinfo(dtype)
        holds = math.isfinite(value) and value == int(value) and info.min <= value <= info.max
    if not holds:
        raise ValueError(
            f"a batch of 'dtype' {dtype} cannot hold the padding 'value' {value!r}; give another of the two"
        )


def _bytes_of(value: Any, dtype: torch.dtype) -> bytes:
    """An element of ``dtype`` as it lies in memory."""
    _check_holds(dtype, value)
    return torch.full((1,), value, dtype=dtype, device="cpu").view(torch.uint8).numpy().tobytes()


def _check_alike(tensors: list[torch.Tensor]) -> None:
    """Raises if samples differ in device or dimensions, are not strided, or cannot leave a worker."""
    first = tensors[0]
    for number, tensor in enumerate(tensors):
        if tensor.layout != torch.strided:
            raise ValueError(f"sample {number} has the layout {tensor.layout}; Pad takes torch.strided ones")
        if tensor.device != first.device:
            raise ValueError(
                f"samples 0 and {number} are on the devices {first.device} and {tensor.device}; "
                "bring them to one"
            )
        if tensor.dim() != first.dim():
            raise ValueError(
                f"samples 0 and {number} have the shapes {tuple(first.shape)} and {tuple(tensor.shape)}; "
                "Pad takes samples of as many dimensions"
            )
        if tensor.requires_grad and torch.is_grad_enabled() and stand_ins.is_in_worker_process():
            # torch.stack(out=...) in default_collate raises too; once sent, it would be the sender's thread.
            raise ValueError(
                f"sample {number} requires gradients, which do not leave a worker; detach() it in the dataset"
            )


def as_tensor(sample: object, number: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A sample as a tensor, of its memory where torch can share it.

    A list of numbers is what ``torch.tensor`` makes of it, a number what ``default_collate`` makes of it.

    Args:
        sample: a tensor, an array, a number or a list of numbers.
        number: its place among the samples, for errors.
        dtype: what numbers become; arrays and tensors keep theirs.

    Raises:
        TypeError: If it is something else.
        ValueError: If torch makes no tensor of the numbers: of lists of several lengths, of large integers.
    """
    if isinstance(sample, torch.Tensor):
        return sample
    try:
        if isinstance(sample, numpy.ndarray):
            return torch.from_numpy(_plain(sample))
        if isinstance(sample, float) and not isinstance(sample, numpy.generic) and dtype is None:
            dtype = torch.float64
        return torch.as_tensor(sample, dtype=dtype)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        if isinstance(sample, (list, tuple, int, float, complex)):
            raise ValueError(f"torch makes no tensor of sample {number}, {sample!r:.80}: {error}") from error
        raise TypeError(
            f"sample {number} must be a tensor, an array, a number or a list of numbers, not of type "
            f"{type(sample).__qualname__!r}: {error}; AsList() takes any samples"
        ) from error


def _as_tensors(
    samples: Iterable[object], dtype: torch.dtype | None
) -> tuple[list[torch.Tensor], torch.dtype]:
    """All samples as tensors, and the type of a batch of them.

    That is ``dtype``, or the one that torch promotes their types to. An empty list has no say in it.

    Raises:
        TypeError: as for :func:`as_tensor`.
        ValueError: as for :func:`as_tensor`, and for no samples.
    """
    samples = list(samples)
    if not samples:
        raise ValueError("there are no samples to make a batch of")
    tensors = [as_tensor(sample, number, dtype) for number, sample in enumerate(samples)]
    if dtype is None:
        typed = [tensor for tensor, sample in zip(tensors, samples, strict=True) if not _is_empty(sample)]
        dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in typed or tensors))
    return tensors, dtype


def _plain(array: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
    """The array, or a copy where torch would warn or refuse: of what is not writable or lies backwards."""
    itemsize = array.itemsize
    is_plain = array.flags.writeable and all(step >= 0 and step % itemsize == 0 for step in array.strides)
    return array if is_plain else numpy.array(array)


def _is_empty(sample: object) -> bool:
    return isinstance(sample, (list, tuple)) and not sample
