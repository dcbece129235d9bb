"""Datasets and loader classes of the tests: at module level, so that workers and pickles can import them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data import dataloader as torch_dataloader

from ringloader._torch import hook


class Squares(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(index * index))


class Hooked(Dataset[bool]):
    """Tells whether the hook is in effect where the samples are made."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _index: int) -> bool:
        return (
            hook.current() is not None
            and hook.beneath(DataLoader._get_iterator) is not DataLoader._get_iterator
        )


class Plain(DataLoader[Any]):
    """A library's loader without anything of its own."""


class Calling(DataLoader[Any]):
    """A loader like PyG's: something of its own around torch's iterator."""

    def _get_iterator(self) -> Any:
        return Around(super()._get_iterator())


class Around:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Around:
        return self

    def __next__(self) -> Any:
        return next(self.inner)


class NotCalling(DataLoader[Any]):
    """A loader like torchdata's StatefulDataLoader."""

    def _get_iterator(self) -> Any:
        return torch_dataloader._MultiProcessingDataLoaderIter(self)


class Slotted(DataLoader[Any]):
    __slots__ = ("more",)


class Reducing(DataLoader[Any]):
    """Says itself what is pickled."""

    def __reduce__(self) -> Any:
        return type(self), (self.dataset, self.batch_size), {"kept": "kept"}


class Naming(DataLoader[Any]):
    """A loader that reduces to a function, which always makes the class that it names."""

    def __reduce__(self) -> Any:
        return make_naming, (self.dataset,)


def make_naming(dataset: Any) -> Naming:
    return Naming(dataset, num_workers=1)


class Posing:
    """A loader like accelerate's: another object says it is a loader."""

    def __init__(self, base_dataloader: Any) -> None:
        self.base_dataloader = base_dataloader

    @property
    def __class__(self) -> Any:
        return self.base_dataloader.__class__

    def __iter__(self) -> Any:
        return iter(self.base_dataloader)


def firsts(batches: Any) -> list[list[float]]:
    return [batch[:, 0].tolist() for batch in batches]
