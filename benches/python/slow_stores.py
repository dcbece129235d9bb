"""Samples that wait for a store: ``worker_concurrency`` beside torch's loader and others, in one run.

    python -m benches.python.slow_stores [--only http,threads] [--rounds 3]

The sides of a row take turns, and have their workers before the clock starts. A rate is samples per second,
from ``iter`` to the end of an epoch. ``http`` needs aiohttp, ``dataloader-rs`` the environment of
``make bench-threads-env``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader

from .http_server import server
from .interpreter import Interpreter
from .measure import process_cpu_ns
from .processes import ProcessFailedError
from .report import figure, head, machine
from .slow_samples import (
    PAUSE,
    Awaiting,
    Bodies,
    BodiesAtOnce,
    Counting,
    Ready,
    ReadyCoroutines,
    Sleeping,
    ask,
    uneven,
)

ROUNDS = 3
BODY = 100_000
THREADS_PYTHON = Path(".venv-threads/bin/python")

# Returns the figure of one round.
Side = Callable[[], float]


def epoch_rate(loader: Any) -> float:
    """Returns the samples per second of an epoch."""
    count, begun = 0, time.perf_counter()
    for batch in loader:
        count += len(batch)
    return count / (time.perf_counter() - begun)


def most_under_way(loader: Any) -> float:
    """Returns the most samples that were under way in an epoch."""
    return float(max(batch.max() for batch in loader))


def processor_us(loader: Any) -> float:
    """Returns the µs of processor time that the workers take for a sample."""
    iterator = iter(loader)
    pids = [worker.pid for worker in iterator._workers]
    begun = sum(map(process_cpu_ns, pids))
    for _ in iterator:
        pass
    return (sum(map(process_cpu_ns, pids)) - begun) / len(loader.dataset) / 1e3


def dataloader_rs_rate() -> float:
    """Returns the rate of dataloader-rs with 64 threads: its example for stores, with samples that sleep."""
    from dataloader_rs import PyDataloader, PyDataset
    from torch.utils.data import default_collate

    class Samples(PyDataset):
        def __len__(self) -> int:
            return 6400

        def __getitem__(self, index: int) -> int:
            time.sleep(PAUSE)
            return index

    loader = PyDataloader(
        Samples(), batch_size=32, num_workers=4, items_in_parallel=16, collate_fn=default_collate
    )
    for _ in loader:
        pass
    return epoch_rate(loader)


class Sides:
    """Makes the sides of a row, and ends what they have started.

    Args:
        stack: Ends it.
    """

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.stack = stack

    def torchs(self, dataset: Any, measure: Callable[[Any], float] = epoch_rate, **arguments: Any) -> Side:
        """Returns a side that measures torch's loader."""
        return self._ready(DataLoader(dataset, persistent_workers=True, **arguments), measure)

    def ours(self, dataset: Any, measure: Callable[[Any], float] = epoch_rate, **arguments: Any) -> Side:
        """Returns a side that measures our loader."""
        import ringloader

        loader = ringloader.DataLoader(dataset, persistent_workers=True, **arguments)
        self.stack.callback(loader.shutdown)
        return self._ready(loader, measure)

    def _ready(self, loader: Any, measure: Callable[[Any], float]) -> Side:
        for _ in loader:
            pass
        return lambda: measure(loader)


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        work: The work.
        figure: The figure that counts: ``"rate"``, the last side over the first; ``"most"``, the last side's;
            ``"more"``, the last side's less the first's.
        goal: The least, or with ``"more"`` the most, that this is to be.
        make: Makes the sides, by name.
    """

    work: str
    figure: str
    goal: float
    make: Callable[[Sides], dict[str, Side]]


def coroutines(sides: Sides) -> dict[str, Side]:
    """Returns torch's samples one after another beside our coroutines."""
    arguments = {"batch_size": 32, "num_workers": 2}
    return {
        "torch": sides.torchs(Sleeping(256), **arguments),
        "ringloader": sides.ours(Awaiting(6400), **arguments, worker_concurrency=32),
    }


def threads(sides: Sides) -> dict[str, Side]:
    """Returns torch's samples one after another beside our threads."""
    arguments = {"batch_size": 32, "num_workers": 2}
    return {
        "torch": sides.torchs(Sleeping(256), **arguments),
        "ringloader": sides.ours(Sleeping(6400), **arguments, worker_concurrency=32),
    }


def bodies(sides: Sides) -> dict[str, Side]:
    """Returns a client without a loader beside loaders that ask the same server."""
    address, count = sides.stack.enter_context(server(PAUSE, BODY)), 3200
    arguments = {"batch_size": 16, "num_workers": 2, "prefetch_factor": 4}

    def bare() -> float:
        begun = time.perf_counter()
        asyncio.run(ask(address, count))
        return count / (time.perf_counter() - begun)

    return {
        "bare client": bare,
        "torch": sides.torchs(Bodies(address, 128), **arguments),
        "ringloader": sides.ours(BodiesAtOnce(address, count), **arguments, worker_concurrency=32),
    }


def store(kind: type[Sleeping]) -> Callable[[Sides], dict[str, Side]]:
    """Returns what makes the sides of the slow store, ours with samples of a kind."""

    def make(sides: Sides) -> dict[str, Side]:
        arguments = {"batch_size": 16, "num_workers": 8, "prefetch_factor": 16}
        return {
            "1 at once": sides.ours(Sleeping(6400, uneven), **arguments),
            "torch": sides.torchs(Sleeping(6400, uneven), **arguments),
            "ringloader": sides.ours(kind(32_000, uneven), **arguments, worker_concurrency=16),
        }

    return make


def small(measure: Callable[[Any], float]) -> Callable[[Sides], dict[str, Side]]:
    """Returns what makes the sides of small batches, ours measured by ``measure``."""

    def make(sides: Sides) -> dict[str, Side]:
        arguments = {"batch_size": 4, "num_workers": 1, "prefetch_factor": 8}
        kind = Awaiting if measure is epoch_rate else Counting
        return {
            "torch": sides.torchs(Sleeping(64), **arguments),
            "ringloader": sides.ours(kind(3200), measure, **arguments, worker_concurrency=32),
        }

    return make


def cheap(sides: Sides) -> dict[str, Side]:
    """Returns plain samples beside coroutines, where neither waits."""
    arguments = {"batch_size": 64, "num_workers": 1}
    return {
        "plain": sides.ours(Ready(), processor_us, **arguments),
        "torch": sides.torchs(Ready(), processor_us, **arguments),
        "ringloader": sides.ours(ReadyCoroutines(), processor_us, **arguments, worker_concurrency=32),
    }


def beside_dataloader_rs(sides: Sides) -> dict[str, Side]:
    """Returns threads of dataloader-rs beside our coroutines."""
    elsewhere = Interpreter(THREADS_PYTHON)
    sides.stack.callback(elsewhere.close)
    # It has six batches on their way too: four that are made, and two more.
    arguments = {"batch_size": 32, "num_workers": 2, "prefetch_factor": 3}
    return {
        "dataloader-rs": lambda: elsewhere.call("spawn", "slow_stores.dataloader_rs_rate"),
        "torch": sides.torchs(Sleeping(256), **arguments),
        "ringloader": sides.ours(Awaiting(6400), **arguments, worker_concurrency=32),
    }


ROWS = {
    "coroutines": Row(
        "batches of 32, each sample awaits 20 ms, 2 workers, 32 at once", "rate", 25, coroutines
    ),
    "threads": Row("the same with `time.sleep`, in threads", "rate", 20, threads),
    "http": Row("bodies of 100 KB by aiohttp, answered after 20 ms", "rate", 0.7, bodies),
    "store": Row("16 samples of 1 ms, one in 50 of 60 ms, 8 workers, 16 at once", "rate", 5, store(Awaiting)),
    "store-threads": Row("the same in threads", "rate", 5, store(Sleeping)),
    "small": Row("batches of 4, samples of 20 ms, 1 worker, 32 at once", "rate", 25, small(epoch_rate)),
    "under-way": Row("the same: samples under way at most", "most", 30, small(most_under_way)),
    "cheap": Row("coroutines that return at once: processor time, µs", "more", 25, cheap),
    "dataloader-rs": Row(
        "batches of 32, each sample waits 20 ms, 64 in flight", "rate", 1, beside_dataloader_rs
    ),
}


def missing(name: str) -> str:
    """Returns what a row needs and does not find; empty if it is all there."""
    if name == "http" and importlib.util.find_spec("aiohttp") is None:
        return "there is no aiohttp"
    if name == "dataloader-rs" and not THREADS_PYTHON.exists():
        return f"there is no {THREADS_PYTHON}: make bench-threads-env"
    return ""


def measured(row: Row, rounds: int) -> str:
    """Measures a row, and returns its line."""
    with contextlib.ExitStack() as stack:
        sides = row.make(Sides(stack))
        found: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(rounds):
            for name in sides if number % 2 == 0 else reversed(sides):
                found[name].append(sides[name]())
    first, *_, last = found.values()
    pairs = list(zip(first, last, strict=True))
    of = {
        "rate": [ours / theirs for theirs, ours in pairs],
        "more": [ours - theirs for theirs, ours in pairs],
        "most": last,
    }[row.figure]
    torchs = [ours / theirs for theirs, ours in zip(found["torch"], last, strict=True)]
    shown = ", ".join(f"{name} {figure(median(values))}" for name, values in found.items())
    spread = f"**{figure(median(of))}** ({figure(min(of))} to {figure(max(of))})"
    bound = f"at {'most' if row.figure == 'more' else 'least'} {row.goal:g}"
    against = "" if row.figure == "most" else figure(median(torchs))
    return f"| {row.work} | {shown} | {spread} | {bound} | {against} |"


def main() -> int:
    """Prints a table. Returns 1 if a row failed."""
    parser = argparse.ArgumentParser(prog="python -m benches.python.slow_stores", description=__doc__)
    parser.add_argument("--only", help="rows, with commas: " + ", ".join(ROWS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(ROWS)
    torch.set_num_threads(1)
    print(f"{head(machine(), f'medians of {options.rounds} rounds')}\n")
    print("| work | sides | figure (range) | goal | over torch's |\n|---|---|--:|--:|--:|", flush=True)
    failed = False
    for name in names:
        if why := missing(name):
            print(f"left out: {name}: {why}", file=sys.stderr)
            continue
        try:
            print(measured(ROWS[name], options.rounds), flush=True)
        except (ProcessFailedError, RuntimeError, ValueError) as error:
            print(f"failed: {name}: {error}", file=sys.stderr)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
