"""Times to the first batch: of the first epoch, of the second, and of a second loader's.

``python -m benches.python.pool``: torch's loader with and without ``persistent_workers``, and ringloader's,
also with a pool. Each row is a new process; the figures are medians over all epochs.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
import torch.utils.data

import ringloader

ROWS = ("torch", "torch, persistent", "ringloader", "ringloader, persistent", "ringloader, pool")
_EPOCHS = 5


class Images(torch.utils.data.Dataset[Any]):
    """Samples of 150 KB, from a dataset of 40 MB, which workers that do not fork are sent."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.images = torch.zeros(256, 3, 224, 224, dtype=torch.uint8)

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> Any:
        return self.images[index], self.first + index


def loaders(row: str, method: str, workers: int) -> tuple[Any, Any]:
    """Two of a kind, over two datasets."""
    arguments: dict[str, Any] = {"batch_size": 16}
    if row == "ringloader, pool":
        arguments["worker_pool"] = ringloader.WorkerPool(workers, method)
    else:
        persistent = row.endswith("persistent")
        arguments.update(num_workers=workers, multiprocessing_context=method, persistent_workers=persistent)
    cls: Any = torch.utils.data.DataLoader if row.startswith("torch") else ringloader.DataLoader
    return cls(Images(0), **arguments), cls(Images(1000), **arguments)


def first_batch(loader: Any, first: int) -> float:
    """Seconds until the first batch is there. The epoch is iterated to its end, which is not counted."""
    began = time.perf_counter()
    iterator = iter(loader)
    _, labels = next(iterator)
    seconds = time.perf_counter() - began
    for _, more in iterator:
        labels = torch.cat([labels, more])
    assert labels.tolist() == list(range(first, first + 256)), "another loader's data"
    del iterator, more
    gc.collect()
    return seconds


def measure(row: str, method: str, workers: int) -> dict[str, list[float]]:
    """In this process: seconds by what they are of."""
    one, other = loaders(row, method, workers)
    found: dict[str, list[float]] = {"first epoch": [first_batch(one, 0)]}
    found["second loader"] = [first_batch(other, 1000)]
    found["later epochs"] = [first_batch(*pair) for _ in range(_EPOCHS) for pair in ((one, 0), (other, 1000))]
    return found


def main() -> None:
    """Prints a table for each start method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--methods", default="fork,spawn")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(measure(options.row, options.methods, options.workers)))
        return
    columns = ("first epoch", "second loader", "later epochs")
    for method in options.methods.split(","):
        print(f"\n| first batch, ms ({method}, {options.workers} workers) | {' | '.join(columns)} |")
        print(f"|---|{'---|' * len(columns)}")
        found: dict[str, list[dict[str, list[float]]]] = {row: [] for row in ROWS}
        for _ in range(options.rounds):
            for row in ROWS:
                command = [sys.executable, "-m", "benches.python.pool", "--row", row, "--methods", method]
                command += ["--workers", str(options.workers)]
                told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                found[row].append(json.loads(told))
        for row, rounds in found.items():
            of_all = [[second for one in rounds for second in one[column]] for column in columns]
            cells = [f"{1000 * statistics.median(seconds):.1f}" for seconds in of_all]
            print(f"| {row} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
