"""Datasets whose items are cheap, so that the loader is what is measured. All are deterministic."""

from __future__ import annotations

import time
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset


class Fresh(Dataset[torch.Tensor]):
    """One newly allocated tensor of ``size_bytes`` per item."""

    def __init__(self, length: int, size_bytes: int) -> None:
        self.length = length
        self.source = torch.arange(size_bytes // 4, dtype=torch.float32)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        tensor = self.source.clone()
        tensor[0] = index
        return tensor


class FreshMany(Dataset[dict[str, torch.Tensor]]):
    """A dict of ``count`` newly allocated tensors of 1 KB per item."""

    def __init__(self, length: int, count: int) -> None:
        self.length = length
        self.names = [f"feature_{number}" for number in range(count)]
        self.rows = list(torch.arange((64 + count) * 256, dtype=torch.float32).reshape(-1, 256))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rows = self.rows[index % 64 :]
        return {name: row.clone() for name, row in zip(self.names, rows, strict=False)}


class Slices(Dataset[torch.Tensor]):
    """Views of one preloaded array: what a dataset that fits in memory costs, without decoding."""

    def __init__(self, length: int, shape: tuple[int, ...], dtype: torch.dtype, distinct: int = 128) -> None:
        self.length = length
        generator = torch.Generator().manual_seed(0)
        values = torch.randint(0, 256, (distinct, *shape), dtype=torch.uint8, generator=generator)
        self.values = values.to(dtype)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.values[index % len(self.values)]


class Tabular(Dataset[tuple[torch.Tensor, int]]):
    """Eight numbers and a class: the smallest sample that people train on."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.rows = torch.arange(4096 * 8, dtype=torch.float32).reshape(4096, 8)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.rows[index % 4096], index % 10


@dataclass
class Passage:
    """A sample of a class of its own."""

    name: str
    tokens: list[int]
    spans: list[tuple[int, int]]


def passage(index: int) -> Passage:
    """Words and numbers, as a tokenizer gives them."""
    tokens = list(range(index % 1000 + 1000, index % 1000 + 1512))
    return Passage(f"passage {index}", tokens, [(at, at + index % 7) for at in range(0, 32, 4)])


class Objects(Dataset[Any]):
    """Samples that are Python objects: what ``make`` makes of a passage. No batch has a tensor."""

    def __init__(self, length: int, make: Callable[[Passage], Any]) -> None:
        self.length = length
        self.make = make

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.make(passage(index))


def as_user_dict(one: Passage) -> UserDict[str, Any]:
    """As a ``BatchEncoding`` of transformers."""
    return UserDict(input_ids=one.tokens, attention_mask=[1] * len(one.tokens))


def as_dict(one: Passage) -> dict[str, Any]:
    """As a row of a dataset that was not made tensors."""
    return {"name": one.name, "input_ids": one.tokens, "spans": one.spans}


def as_sequences(one: Passage) -> list[Any]:
    """Nested lists, and tuples of numbers and strings."""
    return [[one.tokens[:64], one.tokens[64:96]], one.spans, (one.name, len(one.tokens), 0.5)]


class TokenWindows(Dataset[dict[str, torch.Tensor]]):
    """Windows of a memory-mapped token file, as for language-model training."""

    def __init__(self, length: int, path: Path, window: int) -> None:
        self.length = length
        self.path = path
        self.window = window
        self.tokens: np.memmap[Any, Any] | None = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.tokens is None:
            self.tokens = np.memmap(self.path, dtype=np.uint16, mode="r")
        start = index * self.window % (len(self.tokens) - self.window - 1)
        window = torch.from_numpy(self.tokens[start : start + self.window + 1].astype(np.int64))
        return {"input": window[:-1], "label": window[1:], "mask": window[:-1] != 0}


class ClickLog(Dataset[dict[str, torch.Tensor]]):
    """Rows of ``columns`` scalar tensors."""

    def __init__(self, length: int, columns: int) -> None:
        self.length = length
        self.columns = [
            torch.arange(number, number + 512, dtype=torch.float32 if number < 13 else torch.int64)
            for number in range(columns)
        ]
        # Made in the worker: scalars by the thousand do not go through a process's arguments.
        self.rows: list[dict[str, torch.Tensor]] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not self.rows:
            names = [f"column_{number}" for number in range(len(self.columns))]
            scalars = zip(*(column.unbind() for column in self.columns), strict=True)
            self.rows = [dict(zip(names, row, strict=True)) for row in scalars]
        return self.rows[index % len(self.rows)]


Graph = tuple[torch.Tensor, torch.Tensor, str]


class Graphs(Dataset[Graph]):
    """Graphs of 8 to 71 nodes: features, edges and a name."""

    def __init__(self, length: int) -> None:
        self.length = length
        generator = torch.Generator().manual_seed(0)
        nodes = 8 + torch.arange(512) % 64
        self.starts = [0, *nodes.cumsum(0).tolist()]
        self.features = torch.rand(self.starts[-1], 16, generator=generator)
        self.edges = torch.randint(0, 8, (2, 3 * self.starts[-1]), generator=generator)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Graph:
        number = index % 512
        start, stop = self.starts[number : number + 2]
        return self.features[start:stop], self.edges[:, 3 * start : 3 * stop], f"graph-{number}"


def collate_graphs(graphs: list[Graph]) -> dict[str, Any]:
    """Pads the features; edges stay a list because no two graphs have the same number."""
    return {
        "features": torch.nn.utils.rnn.pad_sequence(
            [features for features, _, _ in graphs], batch_first=True
        ),
        "edges": [edges.clone() for _, edges, _ in graphs],
        "names": [name for _, _, name in graphs],
    }


class Jpegs(Dataset[tuple[torch.Tensor, int]]):
    """JPEG files decoded with Pillow; large ones are cropped and resized at random, as for training."""

    def __init__(self, length: int, paths: list[Path], size: int | None) -> None:
        self.length = length
        self.paths = paths
        self.size = size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        with Image.open(self.paths[index % len(self.paths)]) as file:
            image = file.convert("RGB")
        if self.size is not None:
            side = min(image.size)
            left = int(torch.randint(0, image.width - side + 1, ()))
            image = image.resize(
                (self.size, self.size), Image.Resampling.BILINEAR, (left, 0, left + side, side)
            )
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous(), index % 10


class Sleeping(Dataset[torch.Tensor]):
    """Samples of 1 KB that take ``seconds`` each, and hardly any processor time."""

    def __init__(self, length: int, seconds: float) -> None:
        self.length = length
        self.seconds = seconds
        self.source = torch.arange(256, dtype=torch.float32)

    def __len__(self) -> int:
        return self.length

    def delay(self, index: int) -> float:  # noqa: ARG002
        """Returns the seconds that a sample takes."""
        return self.seconds

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.delay(index))
        tensor = self.source.clone()
        tensor[0] = index
        return tensor


class SlowStore(Sleeping):
    """A store over a network: samples take 1 ms, one in 50 of them 60 ms.

    Which ones are slow depends on the index alone, and no period of theirs meets a number of workers.
    """

    def __init__(self, length: int) -> None:
        super().__init__(length, 0.001)

    def delay(self, index: int) -> float:
        """Returns the seconds that a sample takes."""
        slow = ((index * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF) >> 32) % 50 == 0
        return 0.060 if slow else self.seconds


class Carrying(Dataset[torch.Tensor]):
    """Small samples of a dataset that holds an array of ``size_bytes``, which is pickled with it."""

    def __init__(self, length: int, size_bytes: int) -> None:
        self.length = length
        self.carried = np.zeros(size_bytes, dtype=np.uint8)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), index)


class Indices(Dataset[int]):
    """An index is its own sample."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index
