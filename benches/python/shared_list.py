"""``SharedList`` beside a plain list: what a look takes, and the memory of workers after an epoch.

    python -m benches.python.shared_list [--items N] [--workers N]

Memory is the proportional set size of the main process and its workers together.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from ringloader import DataLoader, SharedList

ITEMS: dict[str, Callable[[int], Any]] = {
    "str of 60": lambda number: f"{number:060}",
    "small int": lambda number: number % 100,
    "int": lambda number: number << 20,
    "float": float,
    "bytes of 60": lambda number: b"%060d" % number,
    "tuple of 3": lambda number: (number, "label", 0.5),
    "dict of 3": lambda number: {"file": f"{number}.jpg", "width": number, "text": "a caption"},
    "pickled (complex)": complex,
}


def nanoseconds(items: Sequence[Any], order: list[int]) -> float:
    """Of one look, the best of five."""
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter_ns()
        for index in order:
            items[index]
        best = min(best, time.perf_counter_ns() - begin)
    return best / len(order)


class Read(Dataset[torch.Tensor]):
    """Samples that look at one item each."""

    def __init__(self, items: Sequence[str]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([len(self.items[index]), os.getpid()])


def proportional(process: int) -> int:
    """Bytes, with each page that processes share in equal parts."""
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("the system does not tell the proportional set size")


def memory(items: Sequence[str], workers: int, method: str) -> int:
    """Of all processes together, after an epoch in which the workers have read all."""
    loader = DataLoader(
        Read(items),
        shuffle=True,
        batch_size=1000,
        num_workers=workers,
        persistent_workers=True,
        multiprocessing_context=method,
    )
    pids = {int(pid) for batch in loader for pid in batch[:, 1].unique()}
    taken = sum(proportional(pid) for pid in (*pids, os.getpid()))
    loader.shutdown()
    return taken


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=8)
    arguments = parser.parse_args()
    count = arguments.items
    shuffled = random.Random(0).sample(range(count), min(count, 200_000))
    in_order = list(range(len(shuffled)))
    print("item                    in order: list, SharedList    shuffled: list, SharedList    (ns)")
    for name, make in ITEMS.items():
        plain = [make(number) for number in range(count)]
        shared = SharedList(plain)
        times = [nanoseconds(items, order) for order in (in_order, shuffled) for items in (plain, shared)]
        print(f"{name:20} " + " ".join(f"{taken:14.0f}" for taken in times))
    del plain, shared
    make = ITEMS["str of 60"]
    for method in ("fork", "spawn"):
        for kind in (list, SharedList):
            values: Any = (make(number) for number in range(count))
            items = kind(values)
            few, many = (memory(items, workers, method) for workers in (1, arguments.workers))
            others = [
                memory(kind(["x"] * workers * 4000), workers, method) for workers in (1, arguments.workers)
            ]
            print(
                f"{method:6} {kind.__name__:10} MB of all processes, 1 worker: {few / 1e6:6.0f}, "
                f"{arguments.workers} workers: {many / 1e6:6.0f}; for the list alone "
                f"{(few - others[0]) / 1e6:6.0f}, {(many - others[1]) / 1e6:6.0f}"
            )
            del items


if __name__ == "__main__":
    main()
