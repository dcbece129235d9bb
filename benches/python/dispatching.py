"""The rate of a source that cannot be split through `Dispatch`, beside torch's loader with its one worker.

torch's loader can read such a source with one worker only: a second one would read it again. Both loaders
read the same source, do the same with each item and collate; each round runs one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.utils.data

from ringloader import DataLoader, Dispatch

ROUNDS = 5
WORKERS = 2


class Source(torch.utils.data.IterableDataset[Any]):
    """So many tensors of so many elements, each with work done to it where the loader is torch's."""

    def __init__(self, items: int, elements: int, work: Callable[[Any], Any] | None = None) -> None:
        self.items = items
        self.elements = elements
        self.work = work

    def __iter__(self) -> Iterator[Any]:
        items = (torch.full((self.elements,), float(number)) for number in range(self.items))
        return items if self.work is None else map(self.work, items)


def decode(item: torch.Tensor) -> torch.Tensor:
    """Stands for a decoder: about a tenth of a millisecond."""
    for _ in range(20):
        item = item.sin()
    return item


def per_second(loader: Any, items: int) -> float:
    """Items, from the first batch on."""
    iterator = iter(loader)
    first = len(next(iterator))
    begun = time.perf_counter()
    for _ in iterator:
        pass
    return (items - first) / (time.perf_counter() - begun)


# Name, items, elements, items of a batch, what is done to each.
ROWS: list[tuple[str, int, int, int, Callable[[Any], Any] | None]] = [
    ("64 bytes", 20_000, 16, 32, None),
    ("1 MiB", 600, 1 << 18, 4, None),
    ("16 KiB, decoded", 6_000, 1 << 12, 32, decode),
]


def main() -> None:
    """Prints a row for each kind of item."""
    print(f"| items | torch, 1 worker: items/s | Dispatch, {WORKERS} workers | times torch's (range) |")
    print("|---|--:|--:|--:|")
    for name, items, elements, batch, work in ROWS:
        rounds = []
        for _ in range(ROUNDS):
            theirs = torch.utils.data.DataLoader(Source(items, elements, work), batch, num_workers=1)
            dataset = Dispatch(Source(items, elements))
            ours: Any = DataLoader(dataset if work is None else dataset.map(work), batch, num_workers=WORKERS)
            rounds.append((per_second(theirs, items), per_second(ours, items)))
        ratios = sorted(mine / torchs for torchs, mine in rounds)
        torchs, mine = (median(column) for column in zip(*rounds, strict=True))
        times = f"{median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
        print(f"| {name} | {torchs:.0f} | {mine:.0f} | {times} |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
