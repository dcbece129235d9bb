"""Seeds for each sample: ``seeding="sample"`` beside what users write in ``__getitem__``.

    python -m benches.python.seeding

The time of a sample that draws nothing is taken off.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ringloader import DataLoader

SAMPLES = 4000
BATCH_SIZE = 50
ROUNDS = 5
WAYS: dict[str, dict[str, Any]] = {
    "without workers": {},
    "a worker process": {"num_workers": 1},
    "a thread": {"num_workers": 1, "worker_method": "thread"},
}


class Plain(Dataset[int]):
    """Samples that cost nothing."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class SeedsTorch(Plain):
    """Seeds torch's generators by hand."""

    def __getitem__(self, index: int) -> int:
        torch.manual_seed(index)
        return index


class SeedsAll(Plain):
    """Seeds all three by hand."""

    def __getitem__(self, index: int) -> int:
        random.seed(index)
        np.random.seed(index)
        torch.manual_seed(index)
        return index


def microseconds(dataset: Dataset[int], **options: Any) -> float:
    """Returns the time of a sample, without the first batch, which comes with the start of the workers."""
    loader: DataLoader[int] = DataLoader(dataset, batch_size=BATCH_SIZE, collate_fn=len, **options)
    iterator = iter(loader)
    next(iterator)
    begun = time.perf_counter()
    batches = sum(1 for _ in iterator)
    return (time.perf_counter() - begun) / (batches * BATCH_SIZE) * 1e6


def main() -> None:
    """Prints a table."""
    print(
        "| where | torch.manual_seed, us | all three by hand, us | seeding='sample', us | times the first |"
    )
    print("|---|---|---|---|---|")
    for where, options in WAYS.items():
        rounds = []
        for _ in range(ROUNDS):
            plain = microseconds(Plain(), **options)
            by_hand = microseconds(SeedsTorch(), **options) - plain
            all_by_hand = microseconds(SeedsAll(), **options) - plain
            keyed = microseconds(Plain(), seeding="sample", seed=1, **options) - plain
            rounds.append((by_hand, all_by_hand, keyed, keyed / by_hand))
        figures = [statistics.median(column) for column in zip(*rounds, strict=True)]
        print(f"| {where} | {' | '.join(f'{figure:.2f}' for figure in figures)} |")


if __name__ == "__main__":
    main()
