"""Datasets that are arrays: torch row by row, torch over slices, and ringloader's gather.

Writes build/bench-arrays.md. Rounds alternate between the ways; a ratio is the median of the rounds' own.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, Dataset, RandomSampler, TensorDataset

import ringloader

from .files import BUILD, FILES
from .report import head, machine, write

MAPPED_BYTES = 2 << 30
MAPPED_ROW = 16 << 10


class Sliced(Dataset[Any]):
    """The rows by lists of indices, each for a whole batch: what users write against slow rows."""

    def __init__(self, *arrays: Any) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, indices: list[int]) -> Any:
        batch = [torch.as_tensor(array[indices]) for array in self.arrays]
        return batch[0] if len(batch) == 1 else batch


def mapped() -> np.memmap[Any, Any]:
    """Rows in a file that no cache has: its pages are given back before each run."""
    path = FILES / "rows.bin"
    if not path.exists() or path.stat().st_size != MAPPED_BYTES:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for number in range(MAPPED_BYTES >> 24):
                file.write(np.random.default_rng(number).bytes(1 << 24))
            os.fsync(file.fileno())
    return np.memmap(path, np.uint8, "r+", shape=(MAPPED_BYTES // MAPPED_ROW, MAPPED_ROW))


def forget(array: Any) -> None:
    """Has the system drop the pages of a map's file."""
    if isinstance(array, np.memmap):
        mapping = array._mmap  # type: ignore[attr-defined]
        mapping.madvise(4)  # MADV_DONTNEED: pages that are mapped are not dropped.
        with Path(str(array.filename)).open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def images() -> tuple[Any, ...]:
    """2000 images of 3x64x64 bytes, and labels."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(
        0, 256, (2000, 3, 64, 64), dtype=torch.uint8, generator=generator
    ).numpy(), np.arange(2000)


def table() -> tuple[Any, ...]:
    """A million rows of 30 floats, and targets."""
    return torch.randn(1_000_000, 30), torch.arange(1_000_000.0)


# Name: text, arrays, batch size, batches of a run.
CASES: dict[str, tuple[str, Callable[[], tuple[Any, ...]], int, int]] = {
    "images": ("uint8 rows 3x64x64 with labels, 64 in a batch", images, 64, 1000),
    "table": ("float32 rows of 30 with targets, 256 in a batch", table, 256, 3000),
    "mapped": ("rows of 16 KiB of a 2 GiB map, none in memory, 64 in a batch", lambda: (mapped(),), 64, 100),
}


def loaders(arrays: tuple[Any, ...], batch_size: int, workers: int) -> dict[str, Callable[[], Iterator[Any]]]:
    """An epoch of each way, in an order of its own."""
    rows = TensorDataset(*arrays) if torch.is_tensor(arrays[0]) else ringloader.ArrayDataset(*arrays)
    sampler = BatchSampler(RandomSampler(Sliced(*arrays)), batch_size, drop_last=False)
    options: dict[str, Any] = {"num_workers": workers}
    return {
        "torch": lambda: iter(
            torch.utils.data.DataLoader(rows, batch_size=batch_size, shuffle=True, **options)
        ),
        "torch, slices": lambda: iter(
            torch.utils.data.DataLoader(Sliced(*arrays), batch_size=None, sampler=sampler, **options)
        ),
        "ringloader": lambda: iter(
            ringloader.DataLoader(rows, batch_size=batch_size, shuffle=True, **options)
        ),
    }


def rate(make: Callable[[], Iterator[Any]], batches: int, seconds: float) -> float:
    """Batches in a second, from the second batch on."""
    iterator = make()
    next(iterator)
    begin = time.perf_counter()
    end, count = begin, 0
    for _ in iterator:
        count += 1
        end = time.perf_counter()
        if count == batches or end - begin > seconds:
            break
    return count / (end - begin)


def compare(name: str, workers: int, rounds: int, seconds: float) -> list[str]:
    """A row of the table."""
    text, make, batch_size, batches = CASES[name]
    arrays = make()
    ways = loaders(arrays, batch_size, workers)
    torch.manual_seed(0)
    one = next(ways["torch"]())
    torch.manual_seed(0)
    other = next(ways["ringloader"]())
    pairs = zip(one, other, strict=True) if isinstance(one, list) else [(one, other)]
    assert all(torch.equal(theirs, ours) for theirs, ours in pairs), name
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, start in ways.items():
            forget(arrays[0])
            found[way].append(rate(start, batches, seconds))
    ratio = {
        way: median(mine / theirs for mine, theirs in zip(found["ringloader"], found[way], strict=True))
        for way in ways
    }
    rates = [f"{median(found[way]):.0f}" for way in ways]
    return [text, str(workers), *rates, f"{ratio['torch']:.1f}", f"{ratio['torch, slices']:.1f}"]


def main() -> int:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(prog="python -m benches.python.arrays", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one run, at most (default 1)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    titles = ["dataset", "workers", "torch/s", "torch, slices/s", "ringloader/s", "x torch", "x slices"]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for name in CASES:
        for workers in (0, 2):
            lines.append("| " + " | ".join(compare(name, workers, options.rounds, options.seconds)) + " |")
            print(lines[-1], flush=True)
    where = machine()
    how = f"{options.rounds} rounds; batches in a second, medians"
    write(
        BUILD / "bench-arrays",
        "\n".join([head(where, how), "", *lines, ""]),
        {"machine": where, "rows": lines},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
