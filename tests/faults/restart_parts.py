"""A dataset that kills its worker once, for tests of successors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import get_worker_info

from faults.failing_datasets import Dies, Numbers

METHODS = ["fork", "spawn", "forkserver"]


class DiesOnce(Numbers):
    """A worker ends at each of these indices, the first time that one comes to it."""

    def __init__(self, length: int, ends: dict[int, str], marks: Path, elements: int = 3000) -> None:
        super().__init__(length, elements)
        self.ends = ends
        self.marks = marks

    def __getitem__(self, index: int) -> torch.Tensor:
        mark = self.marks / str(index)
        if index in self.ends and get_worker_info() is not None and not mark.exists():
            mark.touch()
            Dies(self.length, index, self.ends[index])[index]
        return super().__getitem__(index)


def firsts(batches: Any) -> list[int]:
    """The number of each sample of each batch. All batches are held until the last one has come."""
    held = list(batches)
    for batch in held:
        assert bool((batch == batch[:, :1]).all()), "bytes of another batch"
    return [int(number) for batch in held for number in batch[:, 0]]
