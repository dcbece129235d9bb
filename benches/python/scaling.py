"""Many workers: what the main process spends on a batch, when the workers leave the cores alone.

Samples sleep, the longer the more workers there are, so that the batches of a second stay as many. Writes
build/bench-scaling.md and build/bench-scaling.json.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

from . import datasets
from .files import BUILD
from .loaders import BASELINE, LOADERS, OURS
from .measure import timed_loader
from .processes import ProcessFailedError, call_in_process
from .report import figure, head, machine, write
from .workloads import ENDLESS, PREFETCH_FACTOR

WORKERS = (1, 2, 4, 8, 16, 32, 64, 128)
# Torch's loader with more takes long to start and to end, and says nothing new.
MOST_OF_TORCH = 16
# One worker makes a batch in this time, n of them n batches in n times as long.
SECONDS_PER_BATCH = 0.002


def timed_sleepers(loader_name: str, workers: int, in_order: bool, seconds: float) -> dict[str, Any]:
    """One run; see ``measure``."""
    arguments = {
        "batch_size": None,
        "num_workers": workers,
        "prefetch_factor": PREFETCH_FACTOR,
        "in_order": in_order,
    }
    dataset = datasets.Sleeping(ENDLESS, SECONDS_PER_BATCH * workers)
    # Sleepers tend to wake together: so many bursts that one more or less in the window matters little.
    window = max(seconds, 16 * SECONDS_PER_BATCH * workers)
    return timed_loader(LOADERS[loader_name], dataset, arguments, window)


def measured(workers: int, in_order: bool, rounds: int, seconds: float) -> dict[str, Any]:
    """One line: both loaders in turn."""
    loaders = [BASELINE, OURS] if workers <= MOST_OF_TORCH else [OURS]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in loaders}
    for number in range(rounds):
        for name in loaders if number % 2 == 0 else reversed(loaders):
            timing = call_in_process("forkserver", timed_sleepers, name, workers, in_order, seconds)
            found[name].append(timing)
    return {"workers": workers, "in_order": in_order, "rounds": found}


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each number of workers."""
    lines = [
        "| workers | in_order | main CPU, µs per batch: torch | ours (range) "
        "| workers' CPU, µs per batch: torch | ours | part of the rate that the sleep allows: torch | ours |",
        "|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        cells = [str(row["workers"]), str(row["in_order"])]
        for key in ("main_cpu_seconds", "worker_cpu_seconds", "seconds"):
            for name in (BASELINE, OURS):
                times = [run[key] / run["batches"] for run in row["rounds"].get(name, [])]
                cells.append(_cell(key, times, with_range=name == OURS and key == "main_cpu_seconds"))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(key: str, times: list[float], with_range: bool) -> str:
    if not times:
        return ""
    if key == "seconds":
        return f"{SECONDS_PER_BATCH / median(times):.0%}"
    text = figure(median(times) * 1e6)
    if with_range:
        text = f"**{text}** ({figure(min(times) * 1e6)} to {figure(max(times) * 1e6)})"
    return text


def main() -> int:
    """Returns 1 if a process failed."""
    parser = argparse.ArgumentParser(prog="python -m benches.python.scaling", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="rounds, the loaders in turn (default 3)")
    parser.add_argument("--seconds", type=float, default=2.0, help="timed window of one run (default 2)")
    parser.add_argument(
        "--quick", action="store_true", help="a smoke test: 1, 8 and 64 workers, once, briefly"
    )
    parser.add_argument(
        "--out", type=Path, default=BUILD / "bench-scaling", help="written with .md and .json appended"
    )
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds} measures nothing; give 1 or more")
    rounds, seconds, numbers = options.rounds, options.seconds, WORKERS
    if options.quick:
        rounds, seconds, numbers = 1, 0.2, (1, 8, 64)
    where = machine()
    rows = []
    try:
        for workers in numbers:
            for in_order in (True, False):
                print(f"{workers} workers, in_order={in_order}", file=sys.stderr, flush=True)
                rows.append(measured(workers, in_order, rounds, seconds))
    except ProcessFailedError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    how = (
        f"samples of 1 KB that sleep {SECONDS_PER_BATCH * 1e3:g} ms for each worker; "
        f"medians of {rounds} interleaved rounds of {seconds:g} s"
    )
    text = f"{head(where, how)}\n\n{table(rows)}"
    print(text)
    write(options.out, text, {"machine": where, "how": how, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
