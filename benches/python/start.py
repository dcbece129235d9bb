"""Time to the first batch, and from one epoch's last batch to the next one's first.

Writes build/bench-start.md and build/bench-start.json.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.data import Dataset

from . import datasets
from .files import BUILD
from .loaders import BASELINE, LOADERS, OURS
from .processes import ProcessFailedError, call_in_process
from .report import figure, head, machine, write

NUM_WORKERS = 4
BATCHES = 32
BATCH_SIZE = 4
TURNOVERS = 3
PAUSE = 2.0
SHUFFLED = 100_000_000
SHUFFLE_BATCH_SIZE = 64
COMPARED_BATCHES = 100
# Bytes that torch takes for its list of so many numbers, and some more.
SHUFFLE_NEEDS_BYTES = 7 << 30

WORDS = 1_000_000


class Listing(datasets.Carrying):
    """Small samples of a dataset that holds a list of Python strings, as of file names."""

    def __init__(self, length: int, words: int) -> None:
        super().__init__(length, 0)
        self.words = [f"train/{number:08}.jpg" for number in range(words)]


DATASETS: dict[str, Callable[[], Dataset[Any]]] = {
    "small": lambda: datasets.Carrying(BATCHES * BATCH_SIZE, 0),
    "64 MB": lambda: datasets.Carrying(BATCHES * BATCH_SIZE, 64 << 20),
    f"{WORDS:,} strings": lambda: Listing(BATCHES * BATCH_SIZE, WORDS),
}
# Repeats: a spawned worker imports torch, so that a start takes seconds, and varies little.
REPEATS = {"fork": 9, "spawn": 3, "forkserver": 3}


def timed_start(
    loader_name: str, method: str, dataset_name: str, persistent: bool, turnovers: int, pause: float = 0.0
) -> dict[str, Any]:
    """Seconds from ``iter`` to the first batch, and of each turnover. The pause is before ``iter``."""
    torch.set_num_threads(1)
    loader = LOADERS[loader_name]
    dataset = DATASETS[dataset_name]()
    clock = time.perf_counter
    made = loader.make(
        dataset,
        batch_size=BATCH_SIZE,
        num_workers=NUM_WORKERS,
        multiprocessing_context=method,
        persistent_workers=persistent,
    )
    time.sleep(pause)
    began = clock()
    iterator = iter(made)
    next(iterator)
    first = clock() - began
    loader.checked(iterator)
    turned = []
    for _ in range(turnovers):
        last = clock()
        for _batch in iterator:
            last = clock()
        # A loop over epochs does it so: the end is seen, then the next iterator made.
        iterator = iter(made)
        next(iterator)
        turned.append(clock() - last)
    return {"first": first, "turnovers": turned}


def shuffled_start(loader_name: str, length: int) -> dict[str, Any]:
    """Seconds to the first batch of a large shuffle, peak memory of this process, and the first batches."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loader = LOADERS[loader_name]
    made = loader.make(
        datasets.Indices(length), batch_size=SHUFFLE_BATCH_SIZE, shuffle=True, num_workers=NUM_WORKERS
    )
    began = time.perf_counter()
    iterator = iter(made)
    digest = hashlib.sha1(next(iterator).numpy().tobytes(), usedforsecurity=False)
    first = time.perf_counter() - began
    loader.checked(iterator)
    for _ in range(COMPARED_BATCHES - 1):
        digest.update(next(iterator).numpy().tobytes())
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    return {"first": first, "peak_bytes": peak * 1024, "batches": digest.hexdigest()}


def available_bytes() -> int:
    """Returns the bytes that the machine could give a process now."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024


def interleaved(
    repeats: int, method: str, function: Callable[..., Any], *arguments: Any
) -> dict[str, list[dict[str, Any]]]:
    """The results of torch's loader and of ours, which take turns, each call in a process of its own.

    Args:
        repeats: how often each.
        method: how the workers start. The process is a copy of one that has only imported torch where they
            fork; else a new interpreter, as a program's main process is.
        function: takes the loader's name first.
        arguments: the others.
    """
    own = "forkserver" if method == "fork" else "spawn"
    loaders = [BASELINE, OURS]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in loaders}
    for number in range(repeats):
        for name in loaders if number % 2 == 0 else reversed(loaders):
            found[name].append(call_in_process(own, function, name, *arguments, timeout=600.0))
    return found


def measured_starts(quick: bool) -> list[dict[str, Any]]:
    """A row for each start method and dataset, with and without persistent workers.

    Without persistent workers a turnover starts all workers again: it is the time to the first batch of a
    second iterator, with the end of the first one's workers.
    """
    rows = []
    for method, repeats in REPEATS.items():
        for dataset in DATASETS:
            # While a program makes its model.
            pauses = (0.0, PAUSE) if method == "spawn" and dataset == "small" else (0.0,)
            for persistent, pause in ((True, 0.0), *((False, pause) for pause in pauses)):
                kept = "persistent workers" if persistent else "workers of one epoch"
                if pause:
                    kept += f", {pause:.0f} s between loader and first iterator"
                print(f"{method}, {dataset} dataset, {kept}", file=sys.stderr, flush=True)
                found = interleaved(
                    1 if quick else repeats,
                    method,
                    timed_start,
                    method,
                    dataset,
                    persistent,
                    1 if quick or not (persistent or method == "fork") else TURNOVERS,
                    pause,
                )
                times = {
                    name: {
                        "first": [run["first"] for run in runs],
                        "turnover": [turn for run in runs for turn in run["turnovers"]],
                    }
                    for name, runs in found.items()
                }
                rows.append({"method": method, "dataset": dataset, "workers": kept, "seconds": times})
    return rows


def start_table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds: medians, and the range."""
    lines = [
        f"| start method | dataset | workers | first batch, ms: {BASELINE} | ours | times as fast "
        f"| turnover, ms: {BASELINE} | ours | times as fast |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        cells = [row["method"], row["dataset"], row["workers"]]
        for what in ("first", "turnover"):
            both = [row["seconds"][name][what] for name in (BASELINE, OURS)]
            cells += [*map(_milliseconds, both), figure(median(both[0]) / median(both[1]))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _milliseconds(seconds: list[float]) -> str:
    low, middle, high = (figure(value * 1e3) for value in (min(seconds), median(seconds), max(seconds)))
    return f"**{middle}** ({low} to {high})"


def shuffle_table(found: dict[str, list[dict[str, Any]]], length: int) -> str:
    """Time and memory of the large shuffle."""
    lines = [
        f"| shuffle of {length:,} indices | first batch, s | peak memory of the main process (VmHWM), MB "
        f"| first {COMPARED_BATCHES} batches equal torch's |",
        "|---|--:|--:|---|",
    ]
    for name, runs in found.items():
        equal = all(run["batches"] == found[BASELINE][0]["batches"] for run in runs)
        same = "is torch's" if name == BASELINE else "yes" if equal else "NO"
        seconds = median(run["first"] for run in runs)
        peak = median(run["peak_bytes"] for run in runs)
        lines.append(f"| {name} | {figure(seconds)} | {figure(peak / 1e6)} | {same} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Returns 1 if the order of a large shuffle is not torch's, or a process failed."""
    parser = argparse.ArgumentParser(prog="python -m benches.python.start", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="a smoke test: every row once, a smaller shuffle"
    )
    parser.add_argument(
        "--out", type=Path, default=BUILD / "bench-start", help="written with .md and .json appended"
    )
    options = parser.parse_args()
    where = machine()
    length = SHUFFLED // 100 if options.quick else SHUFFLED
    how = (
        f"{NUM_WORKERS} workers, prefetch_factor 2; medians (and ranges) of "
        + ", ".join(f"{count} processes for {method}" for method, count in REPEATS.items())
        + f", loaders in turn, {TURNOVERS} turnovers in each (1 where workers start anew but not by fork)"
    )
    if options.quick:
        how = "each row once: a smoke test, not a measurement"
    try:
        rows = measured_starts(options.quick)
        shuffled: dict[str, Any] = {}
        if not options.quick and available_bytes() < SHUFFLE_NEEDS_BYTES:
            needs = f"torch needs {SHUFFLE_NEEDS_BYTES >> 30} GiB for it, which are not available"
            print(f"shuffle of {length:,} indices: left out, {needs}", file=sys.stderr)
        else:
            print(f"shuffle of {length:,} indices", file=sys.stderr, flush=True)
            shuffled = interleaved(1, "fork", shuffled_start, length)
    except ProcessFailedError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    table = f"{head(where, how)}\n\n{start_table(rows)}"
    if shuffled:
        table += f"\n{shuffle_table(shuffled, length)}"
    print(table)
    write(options.out, table, {"machine": where, "how": how, "starts": rows, "shuffle": shuffled})
    return int(bool(shuffled) and "| NO |" in table)


if __name__ == "__main__":
    sys.exit(main())
