"""Rows of numpy arrays in large batches, as for a table of features.

``python examples/programs/rows.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset

ROWS = 500_000


class Rows(Dataset[tuple[Any, Any]]):
    """Features and a target."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.features = rng.random((ROWS, 30), dtype=np.float32)
        self.targets = rng.integers(0, 2, ROWS)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.features[index], self.targets[index]


def make_loader(loader_class: type[DataLoader[Any]] = DataLoader, num_workers: int = 0) -> Any:
    """Makes the loader of an epoch."""
    return loader_class(Rows(), batch_size=1024, shuffle=True, num_workers=num_workers)


if __name__ == "__main__":
    import ringloader

    total = 0.0
    for features, _ in make_loader(ringloader.DataLoader, 2):
        total += float(features.sum())
    print(f"the features' sum is {total:.0f}")
