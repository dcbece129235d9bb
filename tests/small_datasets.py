"""Datasets that tests of several folders use: at module level, so that spawned workers can import them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Made(Dataset[Any]):
    """Sample ``i`` is ``make(i)``."""

    def __init__(self, make: Callable[[Any], Any], length: int) -> None:
        self.make = make
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.make(index)


class Numbers(Dataset[Any]):
    """Sample ``i`` is a tensor full of ``i``."""

    def __init__(self, length: int, elements: int = 3000) -> None:
        self.length = length
        self.elements = elements

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.elements,), index)


class Stream(IterableDataset[Any]):
    """Each worker gives all samples."""

    def __init__(self, samples: Iterable[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


class SharedStream(IterableDataset[Any]):
    """Each worker gives its share of the samples: every n-th one, of n workers."""

    def __init__(self, samples: Sequence[Any] | Dataset[Any]) -> None:
        self.samples: Any = samples

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (self.samples[index] for index in range(first, len(self.samples), step))
