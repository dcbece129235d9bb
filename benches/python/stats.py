"""The cost of ``stats=True`` for small batches: the rate that is left, and processor time for each batch.

    python -m benches.python.stats [--rounds 7]

A batch is a tensor of 1 KB that is there already, so nothing hides the cost. Loaders with and without the
option take turns in one process, each with workers that stay. A figure is the median over the rounds.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median
from typing import Any

import torch
from torch.utils.data import Dataset

import ringloader

from .measure import process_cpu_ns
from .report import figure, head, machine

ROUNDS = 7
BATCHES = 20_000
CASES: dict[str, dict[str, Any]] = {
    "no workers": {},
    "1 worker": {"num_workers": 1},
    "2 workers": {"num_workers": 2},
    "1 thread": {"num_workers": 1, "worker_method": "thread"},
}


class Ready(Dataset[torch.Tensor]):
    """One sample for each index, always the same."""

    def __init__(self) -> None:
        self.sample = torch.zeros(256)

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.sample


def epoch(loader: ringloader.DataLoader[torch.Tensor], threads: bool) -> tuple[float, float, float]:
    """Returns batches per second, and the µs of processor time for each, of this process and of workers."""
    iterator = iter(loader)
    pids = [] if threads else [worker.pid for worker in getattr(iterator, "_workers", ())]
    here, there = time.process_time(), sum(map(process_cpu_ns, pids))
    began = time.perf_counter()
    for _ in iterator:
        pass
    seconds = time.perf_counter() - began
    here, there = time.process_time() - here, sum(map(process_cpu_ns, pids)) - there
    return BATCHES / seconds, here / BATCHES * 1e6, there / BATCHES / 1e3


def main() -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benches.python.stats", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"{head(machine(), f'medians of {rounds} rounds')}\n")
    print("| | batches/s | with stats | kept | main process, µs | with stats | workers, µs | with stats |")
    print(f"|---|{'--:|' * 7}", flush=True)
    for text, options in CASES.items():
        kept = {"persistent_workers": True} if options else {}
        loaders = [
            ringloader.DataLoader(Ready(), batch_size=None, **options, **kept, stats=stats)
            for stats in (False, True)
        ]
        found: list[list[tuple[float, float, float]]] = [[], []]
        for number in range(rounds + 1):
            for at in (0, 1) if number % 2 else (1, 0):
                figures = epoch(loaders[at], "worker_method" in options)
                if number > 0:
                    found[at].append(figures)
        for loader in loaders:
            loader.shutdown()
        (rate, here, there), with_stats = (
            [median(column) for column in zip(*one, strict=True)] for one in found
        )
        ratio = median(on[0] / off[0] for off, on in zip(*found, strict=True))
        row = [rate, with_stats[0], ratio, here, with_stats[1], there, with_stats[2]]
        print(f"| {text} | {' | '.join(figure(value) for value in row)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
