"""``SharedList`` beside a plain list: what a look takes, and the memory of workers after an epoch.

    python -m benches.python.shared_list [--items N] [--workers N] [--looks-only]

A look at a list takes an object that is there. ``SharedList`` makes one, and so does what "made" stands for:
Python's own ``array[i]`` for numbers, a slice for strings and bytes, and a tuple or dict of these.

Memory is the proportional set size of the main process and its workers together.
"""

from __future__ import annotations

import argparse
import array
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from ringloader import DataLoader, SharedList

NUMBERS = array.array("q", [1 << 40]) * 300
SMALL = array.array("q", range(100)) * 3
REALS = array.array("d", [0.5]) * 300
TEXT, DATA = "x" * 400, b"x" * 400
OF_10, OF_60, OF_300 = slice(1, 11), slice(1, 61), slice(1, 301)

# An item by its number, and a loop body in which Python makes one like it.
ITEMS: dict[str, tuple[Callable[[int], Any], str]] = {
    "small int": (lambda number: number % 100, "SMALL[at]"),
    "large int": (lambda number: number << 20, "NUMBERS[at]"),
    "float": (float, "REALS[at]"),
    "str of 10": (lambda number: f"{number:010}", "TEXT[OF_10]"),
    "str of 60": (lambda number: f"{number:060}", "TEXT[OF_60]"),
    "str of 300": (lambda number: f"{number:0300}", "TEXT[OF_300]"),
    "bytes of 60": (lambda number: b"%060d" % number, "DATA[OF_60]"),
    "tuple of 3": (lambda number: (number, f"{number:010}", 0.5), "(NUMBERS[at], TEXT[OF_10], REALS[at])"),
    "dict of 3": (
        lambda number: {"file": f"{number:010}", "width": number, "text": f"{number:060}"},
        "{'file': TEXT[OF_10], 'width': NUMBERS[at], 'text': TEXT[OF_60]}",
    ),
    "complex": (complex, "complex(1.0)"),
}


class Sample:
    """Reads an item as a dataset does."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def nanoseconds(items: Any, order: list[int]) -> float:
    """Processor time of one look, with its loop, the best of five."""
    best = float("inf")
    for _ in range(5):
        begin = time.thread_time_ns()
        for index in order:
            items[index]
        best = min(best, time.thread_time_ns() - begin)
    return best / len(order)


def nanoseconds_to_make(expression: str) -> float:
    """As ``nanoseconds``, of an expression."""
    names = dict(globals())
    exec(
        "def run(order):\n"
        "    begin = time.thread_time_ns()\n"
        f"    for at in order: {expression}\n"
        "    return time.thread_time_ns() - begin",
        names,
    )
    order = list(range(256)) * 400
    return float(min(names["run"](order) for _ in range(5)) / len(order))


def looks(count: int) -> None:
    """Prints a table of nanoseconds, and of times that a list takes."""
    shuffled = random.Random(0).sample(range(count), min(count, 200_000))
    in_order = list(range(len(shuffled)))
    print(
        "ns: list, SharedList (ratio)   made | in order           | shuffled           | a dataset, shuffled"
    )
    for name, (make, made) in ITEMS.items():
        plain = [make(number) for number in range(count)]
        shared = SharedList(plain)
        assert shared[count - 1] == plain[-1]
        kinds = [plain, shared]
        row = f"{name:28} {nanoseconds_to_make(made):7.0f} "
        for readers, order in ((kinds, in_order), (kinds, shuffled), (list(map(Sample, kinds)), shuffled)):
            one, other = (nanoseconds(reader, order) for reader in readers)
            row += f"| {one:5.0f} {other:5.0f} ({other / one:4.1f}) "
        print(row)


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
    parser.add_argument("--looks-only", action="store_true")
    arguments = parser.parse_args()
    count = arguments.items
    looks(count)
    if arguments.looks_only:
        return
    make, _ = ITEMS["str of 60"]
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
