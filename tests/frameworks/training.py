"""Data and models small enough for a test, at module level so that any worker can import them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info

FEATURES = 8
CLASSES = 3


def point(index: int) -> tuple[torch.Tensor, int]:
    """Features with noise from every generator that a worker seeds, and a class."""
    noise = torch.rand(FEATURES) + random.random() + float(np.random.rand())
    return torch.arange(FEATURES) * (index % 7) / 7 + noise, index % CLASSES


class Points(Dataset[Any]):
    def __init__(self, length: int = 24) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return point(index)


class Numbers(Dataset[Any]):
    """Features and a number for each sample, without noise: the same for whoever reads it."""

    def __init__(self, length: int = 40) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.arange(FEATURES) * (index % 7) / 7, index


class Stream(IterableDataset[Any]):
    def __init__(self, length: int = 24) -> None:
        self.length = length

    def __iter__(self) -> Any:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return map(point, range(first, self.length, step))


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> float:
    """One step of training. Returns the loss."""
    features, classes = batch
    loss = nn.functional.cross_entropy(model(features), classes)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def weights(model: nn.Module) -> list[list[float]]:
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]
