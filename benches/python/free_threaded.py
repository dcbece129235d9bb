"""Threads over samples that compute in Python, beside processes: their rate, by the interpreter lock.

    PYTHON_GIL=0 python -m benches.python.free_threaded

On a free-threaded CPython; on any other the lock is there. Prints the median of three epochs for each way, in
batches a second and beside one thread's.
"""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import Any

import torch
from torch.utils.data import Dataset

from ringloader import DataLoader

ROUNDS = 3
# Without the first batches, which wait for workers to start.
WARM_UP = 16
WAYS: dict[str, dict[str, Any]] = {
    "1 thread": {"num_workers": 1, "worker_method": "thread"},
    "2 threads": {"num_workers": 2, "worker_method": "thread"},
    "2 processes": {"num_workers": 2, "multiprocessing_context": "fork"},
}


class InPython(Dataset[int]):
    """Samples of 4,000 steps of a loop in Python.

    All numbers in its code are small. CPython 3.13t counts references to a larger one of an imported module
    in one place, for which threads wait, without a loader too.
    """

    def __len__(self) -> int:
        return 8192

    def __getitem__(self, index: int) -> int:
        total = index
        for number in range(4000):
            total = (total * 31 + number) % 251
        return total


def rate(**options: Any) -> float:
    """Batches a second of an epoch."""
    iterator = iter(DataLoader(InPython(), batch_size=8, **options))
    for _ in range(WARM_UP):
        next(iterator)
    begin = time.perf_counter()
    batches = sum(1 for _ in iterator)
    return batches / (time.perf_counter() - begin)


def main() -> None:
    """Prints the table."""
    has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    lock = "with" if has_lock else "without"
    print(f"CPython {sys.version.split()[0]}, {lock} the lock, torch {torch.__version__}")
    rounds = [{name: rate(**options) for name, options in WAYS.items()} for _ in range(ROUNDS)]
    print("| workers | batches/s | beside one thread |\n|---|--:|--:|")
    for name in WAYS:
        found = median(one[name] for one in rounds)
        beside = median(one[name] / one["1 thread"] for one in rounds)
        print(f"| {name} | {found:.0f} | {beside:.2f} |")


if __name__ == "__main__":
    main()
