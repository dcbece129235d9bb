"""Datasets and functions that spawned workers of these tests unpickle."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch.utils.data import Dataset, get_worker_info

import ringloader


class Numbers(Dataset[Any]):
    """Sample ``i`` is ``i``, as a tensor."""

    def __init__(self, length: int = 10) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Drawing(Numbers):
    """Samples have a random number."""

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), float(torch.rand(()))


class Failing(Numbers):
    """Sample 3 cannot be read."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 3:
            raise ValueError("sample 3")
        return super().__getitem__(index)


class Everything(Dataset[Any]):
    """Each sample has a part of each kind of data, and says what its worker's Python has."""

    def __init__(self, length: int) -> None:
        self.words = ringloader.SharedList([f"word {number}" for number in range(length)])
        self.array = ringloader.SharedArray.from_rows([[number, 2] for number in range(length)])
        self.cached = ringloader.CachedDataset(Numbers(length))
        self.rows = ringloader.ArrayDataset(torch.arange(length))

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> Any:
        from ringloader._features import cores

        row = self.array[index]
        number = int(self.cached[index]) + int(self.cached[index])
        has = hasattr(cores.os, "sched_getaffinity"), get_worker_info() is not None
        return {
            "word": self.words[index],
            "row": torch.from_numpy(row.copy()),
            "cached": number,
            "hits": self.cached.stats()["hits"],
            "ragged": torch.full((index % 3 + 1,), index),
            "index": int(self.rows[index]),
            "has": has,
        }


def collate(samples: list[Any]) -> Any:
    """Collates the samples of :class:`Everything` with a padded column."""
    pad = ringloader.batchify.Pad(value=-1)
    batch = {name: [sample[name] for sample in samples] for name in samples[0]}
    return {**batch, "ragged": pad(batch["ragged"]), "row": torch.stack(batch["row"])}


def keep(dataset: Any, _info: Any, seeds: Any) -> None:
    """A ``worker_reset_fn`` that notes the epoch."""
    dataset.told = seeds.epoch


def identity(value: Any) -> Any:
    """Returns its argument."""
    return value


# Of the first two samples of `Drawing`, with seeding="sample" and seed=5.
SEEDED = [[0.7089835704357688, 0.4169294097845594], [0.7711542844772339, 0.608069896697998]]
