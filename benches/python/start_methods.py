"""Seconds from ``iter`` to the first batch by start method, side by side in one program."""

from __future__ import annotations

import argparse
import os
import time
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchsLoader
from torch.utils.data import Dataset

import ringloader

SERVER = "RINGLOADER_SPAWN_SERVER"
# The start method, and if a server of ringloader's may fork the workers of `spawn`.
WAYS = {
    "fork": ("fork", "1"),
    "forkserver, preloaded": ("forkserver", "1"),
    "spawn, by a server": ("spawn", "1"),
    "spawn, Python's own": ("spawn", "0"),
    "spawn, torch's loader": ("spawn", ""),
}


class Numbers(Dataset[int]):
    """A small map-style dataset."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        return index


def make(way: str, workers: int) -> Any:
    """Returns a loader whose workers start in this way."""
    method, served = WAYS[way]
    os.environ[SERVER] = served or "0"
    kind: Any = ringloader.DataLoader if served else TorchsLoader
    return kind(Numbers(), batch_size=4, num_workers=workers, multiprocessing_context=method)


def seconds(way: str, loader: Any) -> float:
    """Returns the seconds from ``iter`` to the first batch."""
    os.environ[SERVER] = WAYS[way][1] or "0"
    began = time.perf_counter()
    batches = iter(loader)
    next(batches)
    first = time.perf_counter() - began
    for _ in batches:
        pass
    return first


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    loaders, cold, found = {}, {}, {}
    for way in WAYS:
        loaders[way] = make(way, options.workers)
        cold[way], found[way] = seconds(way, loaders[way]), []
    for run in range(options.runs):
        # In turns, so that what else the machine does meets all of them.
        for way in list(WAYS) if run % 2 == 0 else reversed(WAYS):
            found[way].append(seconds(way, loaders[way]))
    base = median(found["forkserver, preloaded"])
    print("| workers | first epoch, s | later epochs, s | ratio to forkserver |")
    print("|---|--:|--:|--:|")
    for way, times in found.items():
        middle = median(times)
        print(
            f"| {way} | {cold[way]:.2f} | {middle:.2f} ({min(times):.2f} to {max(times):.2f}) "
            f"| {middle / base:.1f} |"
        )


if __name__ == "__main__":
    main()
