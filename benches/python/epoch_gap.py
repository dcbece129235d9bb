"""The gap between two epochs of slow samples: ``prefetch_epochs`` beside ``persistent_workers`` alone.

    python -m benches.python.epoch_gap [--quick]

The gap is the time from the end of the last step of an epoch to the first batch of the next one. A sample
takes 5 ms, so a batch of 16 takes a worker 80 ms. A step takes as long as a batch, divided by the number of
workers, so that the loader just keeps up; in other rows it takes no time, and the loader is behind. Between
epochs nothing is done, or 0.3 s are spent, as by a validation.

Each run is a process of its own; the loaders take turns, and their orders are compared.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median
from typing import Any

import torch
from torch.utils.data import Dataset

from .loaders import LOADERS, OURS
from .processes import ProcessFailedError, call_in_process
from .report import figure, head, machine

TORCH = "torch"
AHEAD = "prefetch_epochs"
NAMES = (TORCH, OURS, AHEAD)
WORKERS = 2
BATCH_SIZE = 16
SAMPLE_SECONDS = 0.005
BATCHES = (4, 20)
EPOCHS = 6
ROUNDS = 5
# Seconds of a step, and between two epochs.
STEP_SECONDS = BATCH_SIZE * SAMPLE_SECONDS / WORKERS
CASES = {
    "the loader keeps up": (STEP_SECONDS, 0.0),
    "the loader is behind": (0.0, 0.0),
    "the loader keeps up, 0.3 s between epochs": (STEP_SECONDS, 0.3),
}


class Slow(Dataset[int]):
    """Samples that each take the same time, as from a store."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        time.sleep(SAMPLE_SECONDS)
        return index


def gaps(name: str, batches: int, step: float, between: float, quick: bool) -> tuple[float, float, list[int]]:
    """Returns the median gap and the median epoch with its gap, in ms, and the order of all samples."""
    arguments: dict[str, Any] = {"prefetch_epochs": True} if name == AHEAD else {}
    loader = LOADERS[OURS if name == AHEAD else name].make(
        Slow(batches * BATCH_SIZE),
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=WORKERS,
        persistent_workers=True,
        generator=torch.Generator().manual_seed(0),
        **arguments,
    )
    order: list[int] = []
    waited, taken = [], []
    for epoch in range(2 if quick else EPOCHS):
        if epoch > 0:
            time.sleep(between)
        began = time.perf_counter()
        iterator = iter(loader)
        batch = next(iterator)
        waited.append(time.perf_counter() - began)
        while batch is not None:
            order += batch.tolist()
            time.sleep(step)
            batch = next(iterator, None)
        taken.append(time.perf_counter() - began)
    # The first epoch starts the workers.
    return median(waited[1:]) * 1e3, median(taken[1:]) * 1e3, order


def main() -> int:
    """Prints a table. Returns 1 if a process failed, or two loaders gave other samples."""
    parser = argparse.ArgumentParser(prog="python -m benches.python.epoch_gap", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke test: each row once, two epochs")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    how = f"medians of {rounds} rounds"
    if options.quick:
        how = "each row once: a smoke test, not a measurement"
    print(f"{head(machine(), how)}\n")
    columns = [f"{name}, {what}, ms" for what in ("gap", "epoch") for name in NAMES]
    print(f"| | {' | '.join(columns)} |\n|---|{'--:|' * len(columns)}", flush=True)
    for batches in BATCHES:
        for text, (step, between) in CASES.items():
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in NAMES}
            orders = []
            for number in range(rounds):
                for name in NAMES if number % 2 == 0 else reversed(NAMES):
                    arguments = name, batches, step, between, options.quick
                    try:
                        *times, order = call_in_process("forkserver", gaps, *arguments)
                    except ProcessFailedError as error:
                        print(f"failed: {text}, {name}: {error}", file=sys.stderr)
                        return 1
                    found[name].append(tuple(times))
                    orders.append(order)
            if any(order != orders[0] for order in orders):
                print(f"failed: {text}: the loaders gave other samples", file=sys.stderr)
                return 1
            medians = [median(one[at] for one in found[name]) for at in (0, 1) for name in NAMES]
            cells = " | ".join(figure(value) for value in medians)
            print(f"| {batches} batches, {text} | {cells} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
