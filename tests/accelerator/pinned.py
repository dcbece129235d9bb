"""Parts that the tests of `pin_memory=True` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from accelerator import pretend
from ringloader._torch import internals

# 2.6 pins for CUDA, and else only for a device that is named; then its own loader runs.
IS_NAMED = internals.pins_for_named_device()
PIN: dict[str, Any] = {"pin_memory": True, **({"pin_memory_device": pretend.NAME} if IS_NAMED else {})}


class Made(Dataset[Any]):
    """Element `i` is made by the i-th function, or by the only one."""

    def __init__(self, *makes: Callable[[], Any], length: int | None = None) -> None:
        self.makes = makes
        self.length = len(makes) if length is None else length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.makes[index % len(self.makes)]()


class Sized(Dataset[Any]):
    """Element `i` has `sizes[i]` bytes, which tell `i` and where they are."""

    def __init__(self, sizes: list[int], *, parts: int = 1) -> None:
        self.sizes = sizes
        self.parts = parts

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Any:
        made = [told(index + part, self.sizes[index]) for part in range(self.parts)]
        return made[0] if self.parts == 1 else {str(part): tensor for part, tensor in enumerate(made)}


class Flow(IterableDataset[Any]):
    """The samples as a stream, of which each worker has every other."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, len(self.sizes), step):
            yield told(index, self.sizes[index])


def told(index: int, size: int) -> torch.Tensor:
    """Bytes that tell of which batch they are, and no two batches near each other alike at any place."""
    return (torch.arange(size, dtype=torch.int32) * 7 + index * 31 + 1).remainder_(251).to(torch.uint8)
