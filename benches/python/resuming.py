"""States of a loader beside torchdata's ``StatefulDataLoader``: what they cost, and how soon the rest comes.

    python -m benches.python.resuming [--quick]

- A call of ``state_dict()`` in the middle of a shuffled epoch.
- A step: the time of a batch, while nobody asks for a state, and with a state after each batch.
- A step over a stream whose state has 20,000 entries, which workers send along with each batch.
- The first batch of a new loader that goes on at 90 % of a million shuffled samples, and is that of the
  epoch that was not stopped.

Each run is a process of its own; the two loaders take turns.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch.utils.data import IterableDataset

from . import datasets
from .loaders import LOADERS, OURS
from .processes import ProcessFailedError, call_in_process
from .report import figure, head, machine, ratio_cell

THEIRS = "torchdata-stateful"
NAMES = (THEIRS, OURS)
WORKERS = (0, 2)
ROUNDS = 5
SECONDS = 1.0
BATCH_SIZE = 64
CALLS = 2000
ENTRIES = 20_000
# Of the epoch that is resumed.
SAMPLES = 1_000_000
RESUMED_BATCH_SIZE = 1000
PART = 0.9


class Entries(IterableDataset[int]):
    """A stream whose state has many entries, of which each sample changes one."""

    def __init__(self) -> None:
        self.entries = {f"{number:08}": 0 for number in range(ENTRIES)}
        self.names = list(self.entries)

    def __iter__(self) -> Iterator[int]:
        for number in itertools.count():
            self.entries[self.names[number % ENTRIES]] += 1
            yield number

    def state_dict(self) -> dict[str, Any]:
        """Returns all entries."""
        return {"entries": dict(self.entries)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Has the entries be those of a state."""
        self.entries = dict(state["entries"])


def made(name: str, length: int, workers: int, batch_size: int, seed: int = 0) -> Any:
    """Returns a loader of a shuffled epoch over samples that cost nothing."""
    torch.set_num_threads(1)
    return LOADERS[name].make(
        datasets.Indices(length),
        batch_size=batch_size,
        shuffle=True,
        num_workers=workers,
        generator=torch.Generator().manual_seed(seed),
    )


def call(name: str, workers: int, quick: bool) -> float:
    """Returns the microseconds of a call of ``state_dict``, each behind another batch."""
    calls = CALLS // 20 if quick else CALLS
    loader = made(name, (calls + 200) * BATCH_SIZE, workers, BATCH_SIZE)
    iterator = iter(loader)
    taken = []
    for _ in range(calls):
        next(iterator)
        began = time.perf_counter()
        loader.state_dict()
        taken.append(time.perf_counter() - began)
    return median(taken) * 1e6


def step(name: str, workers: int, asks: bool, quick: bool) -> float:
    """Returns the microseconds of a batch."""
    loader = made(name, 4_000_000, workers, BATCH_SIZE)
    return _seconds_of_a_batch(loader, asks, SECONDS / 10 if quick else SECONDS) * 1e6


def _seconds_of_a_batch(loader: Any, asks: bool, window: float) -> float:
    iterator = iter(loader)
    for _ in range(20):
        next(iterator)
    began = now = time.perf_counter()
    batches = 0
    for _ in iterator:
        if asks:
            loader.state_dict()
        batches += 1
        now = time.perf_counter()
        if now - began > window:
            break
    return (now - began) / batches


def stream_step(name: str, workers: int, quick: bool) -> float:
    """Returns the microseconds of a batch of a stream with a large state."""
    torch.set_num_threads(1)
    loader = LOADERS[name].make(Entries(), batch_size=BATCH_SIZE, num_workers=workers)
    return _seconds_of_a_batch(loader, False, SECONDS / 10 if quick else SECONDS) * 1e6


def resumed(name: str, workers: int, quick: bool) -> float:
    """Returns the milliseconds until a new loader has returned the first batch of the rest."""
    samples = SAMPLES // 10 if quick else SAMPLES
    passed = int(samples * PART) // RESUMED_BATCH_SIZE
    # torchdata's loader needs the number of workers that the state was taken with.
    stopped = made(name, samples, workers, RESUMED_BATCH_SIZE)
    iterator = iter(stopped)
    for _ in itertools.islice(iterator, passed):
        pass
    state = stopped.state_dict()
    expected = next(iterator)
    del iterator, stopped
    # Another seed: the order comes from the state.
    began = time.perf_counter()
    loader = made(name, samples, workers, RESUMED_BATCH_SIZE, seed=1)
    loader.load_state_dict(state)
    first = next(iter(loader))
    taken = time.perf_counter() - began
    assert torch.equal(first, expected), f"{name} goes on with other samples"
    return taken * 1e3


def rows() -> list[tuple[str, Callable[..., float], tuple[Any, ...]]]:
    """Returns the text of each row, and the run behind it."""
    found: list[tuple[str, Callable[..., float], tuple[Any, ...]]] = []
    for workers in WORKERS:
        where = f"{workers} workers" if workers else "without workers"
        found += [
            (f"`state_dict()`, µs, {where}", call, (workers,)),
            (f"step, µs, {where}", step, (workers, False)),
            (f"step with a state each time, µs, {where}", step, (workers, True)),
            (f"step of a stream with a state of {ENTRIES:,} entries, µs, {where}", stream_step, (workers,)),
            (f"first batch at {PART:.0%} of the epoch, ms, {where}", resumed, (workers,)),
        ]
    return found


def main() -> int:
    """Prints a table. Returns 1 if a process failed, as it does when a loader goes on with other samples."""
    parser = argparse.ArgumentParser(prog="python -m benches.python.resuming", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke test: each row once, a smaller epoch")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    how = f"medians of {rounds} rounds; a ratio is taken inside a round"
    if options.quick:
        how = "each row once: a smoke test, not a measurement"
    print(f"{head(machine(), how)}\n")
    print("| | StatefulDataLoader | ringloader | times theirs (range) |\n|---|--:|--:|--:|", flush=True)
    for text, run, arguments in rows():
        taken: dict[str, list[float]] = {name: [] for name in NAMES}
        for number in range(rounds):
            for name in NAMES if number % 2 == 0 else reversed(NAMES):
                try:
                    taken[name].append(call_in_process("forkserver", run, name, *arguments, options.quick))
                except ProcessFailedError as error:
                    print(f"failed: {text}, {name}: {error}", file=sys.stderr)
                    return 1
        of_rounds = [ours / theirs for theirs, ours in zip(taken[THEIRS], taken[OURS], strict=True)]
        cells = [figure(median(taken[name])) for name in NAMES]
        cells.append(ratio_cell(median(of_rounds), min(of_rounds), max(of_rounds)))
        print(f"| {text} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
