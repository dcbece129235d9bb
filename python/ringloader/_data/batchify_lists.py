"""Batches without padding: a tensor of equal samples, or a list of any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from ringloader._data import batchify_samples as sampling


class Stack:
    """Stacks samples of equal shape: torch's ``default_collate``, as a class beside :class:`Pad`.

    So tensors are stacked as by ``torch.stack``, arrays and numbers become tensors, texts a list, and samples
    that are dicts, tuples or lists are stacked by their fields: a list of lists comes out by columns.
    ``Pad()`` takes lists of numbers by rows.
    """

    def __call__(self, samples: list[Any]) -> Any:
        """Makes a batch of samples."""
        return default_collate(samples)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Append:
    """Makes a list of tensors, one for each sample, each of its own shape.

    Without workers a tensor has the memory of its sample, as in torch's loader with ``batch_size=None``.

    Args:
        expand: whether each gets a batch dimension of 1 in front: ``[1, *size]``.

    Raises:
        TypeError: If ``expand`` is no bool. When called: if a sample is no tensor, array, number or list of
            numbers.
    """

    def __init__(self, expand: bool = True) -> None:
        if not isinstance(expand, bool):
            raise TypeError(f"'expand' must be True or False, not {expand!r}")
        self._expand = expand

    def __call__(self, samples: Sequence[Any]) -> list[torch.Tensor]:
        """Makes a list of tensors of samples."""
        tensors = [sampling.as_tensor(sample, number) for number, sample in enumerate(samples)]
        return [tensor.unsqueeze(0) for tensor in tensors] if self._expand else tensors

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'' if self._expand else 'expand=False'})"


class AsList:
    """Makes a list of the samples as they are, of any kind."""

    def __call__(self, samples: Sequence[Any]) -> list[Any]:
        """Makes a list of samples."""
        return list(samples)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
