"""Samples as tensors, and memory for a batch of them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy
import torch

from ringloader._torch import stand_ins


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


def as_tensors(
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


def new_batch(first: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory for a batch of tensors like ``first``, of any content.

    In a worker process it is shared, as that of ``default_collate``: in the slot, if the worker is ours.
    """
    if type(first) is torch.Tensor and first.device.type == "cpu" and stand_ins.is_in_worker_process():
        nbytes = functools.reduce(int.__mul__, shape, dtype.itemsize)
        storage = stand_ins.new_shared(nbytes) if nbytes else None
        if storage is not None:
            return torch.empty(0, dtype=dtype, device="cpu").set_(storage).view(tuple(shape))
    return first.new_empty(tuple(shape), dtype=dtype)


def _plain(array: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
    """The array, or a copy where torch would warn or refuse: of what is not writable or lies backwards."""
    itemsize = array.itemsize
    is_plain = array.flags.writeable and all(step >= 0 and step % itemsize == 0 for step in array.strides)
    return array if is_plain else numpy.array(array)


def _is_empty(sample: object) -> bool:
    return isinstance(sample, (list, tuple)) and not sample
