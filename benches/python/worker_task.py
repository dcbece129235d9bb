"""All workers make one batch: ``worker_task="sample"`` against ``"batch"``, as ratios of one run.

    python -m benches.python.worker_task

Both seed each sample, and have their workers before the clock starts.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ringloader import DataLoader

ROUNDS = 3
GRAPH_TENSORS = 34


class Made(Dataset[Any]):
    """Samples that a function makes of their index."""

    def __init__(self, count: int, make: Callable[[int], Any]) -> None:
        self._count = count
        self._make = make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._make(index)


def sleeping(index: int) -> int:
    """Returns a sample that takes 5 ms."""
    time.sleep(0.005)
    return index


def uneven(index: int) -> int:
    """Returns a sample that takes 1 ms; one in 50 takes 60 ms."""
    time.sleep(0.06 if random.Random(index).random() < 0.02 else 0.001)
    return index


def image(index: int) -> Any:
    """Returns an image of 600 KB."""
    return np.random.default_rng(index).random((3, 224, 224), np.float32)


def row(index: int) -> Any:
    """Returns 8 floats."""
    return torch.full((8,), float(index))


def large(index: int) -> Any:
    """Returns an array of 312 KB that takes 5 ms."""
    time.sleep(0.005)
    return np.full(80_000, index, np.float32)


def graph(index: int) -> Any:
    """Returns a sample of a graph: as many tensors as its batch has."""
    return [torch.full((index % 7 + 1,), number) for number in range(GRAPH_TENSORS)]


def graphs(samples: list[Any]) -> Any:
    """Joins the tensors of samples, one by one."""
    return [torch.cat(parts) for parts in zip(*samples, strict=True)]


def loader_of(value: str, dataset: Dataset[Any], **options: Any) -> DataLoader[Any]:
    """Returns a loader whose workers are there."""
    made: DataLoader[Any] = DataLoader(
        dataset, worker_task=value, seeding="sample", persistent_workers=True, **options
    )
    for _ in made:
        pass
    return made


def first_batch(loader: DataLoader[Any]) -> float:
    """Returns the seconds to the first batch."""
    begun = time.perf_counter()
    iterator = iter(loader)
    next(iterator)
    seconds = time.perf_counter() - begun
    for _ in iterator:
        pass
    return seconds


def epoch(loader: DataLoader[Any]) -> float:
    """Returns the seconds of an epoch."""
    begun = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - begun


def shared_bytes(loader: DataLoader[Any]) -> float:
    """Returns the most bytes of shared memory in an epoch."""
    iterator: Any = iter(loader)
    transport = iterator._transport
    fds = [transport.engine.segment]
    if transport.joint_tasks:
        fds.append(transport.scheduled.fds()[1])
    most = 0
    for _ in iterator:
        most = max(most, sum(512 * os.fstat(fd).st_blocks for fd in fds))
    return most


CASES: dict[str, tuple[Callable[[Any], float], str, dict[str, Any]]] = {
    "64 samples of 5 ms, 8 workers: time to the first batch": (
        first_batch,
        "batch / sample",
        {"dataset": Made(1024, sleeping), "batch_size": 64, "num_workers": 8},
    ),
    "16 samples of 1 ms, one in 50 of 60 ms, 8 workers, 16 batches under way: rate": (
        epoch,
        "batch / sample",
        {"dataset": Made(6400, uneven), "batch_size": 16, "num_workers": 8},
    ),
    "64 images of 600 KB, 2 workers: rate": (
        epoch,
        "batch / sample",
        {"dataset": Made(640, image), "batch_size": 64, "num_workers": 2},
    ),
    "64 rows of 8 floats, 2 workers: rate": (
        epoch,
        "batch / sample",
        {"dataset": Made(64_000, row), "batch_size": 64, "num_workers": 2},
    ),
    "64 samples of 312 KB and 5 ms, 16 workers: most shared memory": (
        shared_bytes,
        "sample / batch",
        {"dataset": Made(4096, large), "batch_size": 64, "num_workers": 16},
    ),
    "32 graphs of 34 tensors, a collate_fn, 2 workers: rate": (
        epoch,
        "batch / sample",
        {"dataset": Made(6400, graph), "batch_size": 32, "num_workers": 2, "collate_fn": graphs},
    ),
}


def main() -> None:
    """Prints a table."""
    print("| work | ratio | of |\n|---|---|---|")
    for name, (measure, ratio, options) in CASES.items():
        of_batches = loader_of("batch", **options)
        ahead = {"prefetch_factor": 16} if "16 batches" in name else {}
        of_samples = loader_of("sample", **options, **ahead)
        measured = [(measure(of_batches), measure(of_samples)) for _ in range(ROUNDS)]
        ratios = [batch / sample for batch, sample in measured]
        found = statistics.median(ratios)
        print(f"| {name} | {found if ratio == 'batch / sample' else 1 / found:.2f} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
