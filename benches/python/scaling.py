"""Many workers: what the main process spends on a batch, when the workers leave the cores alone.

Samples sleep, the longer the more workers there are, so that the batches of a second stay as many. Writes
build/bench-scaling.md and build/bench-scaling.json.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
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
# The numbers of workers whose main processes are compared.
FEW, MANY = 8, 128
# A tracer slows the process, and must not stay for ever if it does not come.
TRACER_SECONDS = 10.0


def _arguments(workers: int, in_order: bool) -> dict[str, Any]:
    return {
        "batch_size": None,
        "num_workers": workers,
        "prefetch_factor": PREFETCH_FACTOR,
        "in_order": in_order,
    }


def timed_sleepers(loader_name: str, workers: int, in_order: bool, seconds: float) -> dict[str, Any]:
    """One run; see ``measure``."""
    dataset = datasets.Sleeping(ENDLESS, SECONDS_PER_BATCH * workers)
    # Sleepers tend to wake together: so many bursts that one more or less in the window matters little.
    window = max(seconds, 16 * SECONDS_PER_BATCH * workers)
    return timed_loader(LOADERS[loader_name], dataset, _arguments(workers, in_order), window)


def counted_sleepers(workers: int, in_order: bool, batches: int) -> dict[str, float | None]:
    """Returns, for a batch of our loader: how often processes sleep, and the main process's system calls."""
    dataset = datasets.Sleeping(ENDLESS, SECONDS_PER_BATCH * workers)
    iterator = iter(LOADERS[OURS].make(dataset, **_arguments(workers, in_order)))
    _take(iterator, 2 * PREFETCH_FACTOR * workers + 4)
    children = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
    main, others = -_own_sleeps(), -sum(map(_sleeps_of, children))
    _take(iterator, batches)
    main, others = main + _own_sleeps(), others + sum(map(_sleeps_of, children))
    calls = _system_calls(iterator, batches)
    # The main process writes to wake a worker, and for nothing else.
    found = (None, None) if calls is None else (sum(calls.values()), calls.get("write", 0))
    counts = dict(zip(("calls", "wakes"), found, strict=True)) | {"main_sleeps": main, "sleeps": others}
    return {name: None if count is None else count / batches for name, count in counts.items()}


def _take(iterator: Iterator[Any], batches: int) -> None:
    for _ in itertools.islice(iterator, batches):
        pass


def _own_sleeps() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


def _sleeps_of(pid: int) -> int:
    return _status(f"/proc/{pid}/status", "voluntary_ctxt_switches")


def _status(path: str, name: str) -> int:
    fields = dict(line.split(":", 1) for line in Path(path).read_text().splitlines())
    return int(fields[name])


def _system_calls(iterator: Iterator[Any], batches: int) -> dict[str, int] | None:
    """Returns this process's calls while it takes batches, by name; None without strace, or refused."""
    strace = shutil.which("strace")
    if strace is None:
        return None
    with tempfile.NamedTemporaryFile("r") as summary:
        command = [strace, "-qq", "-f", "-c", "-U", "calls,name", "-o", summary.name, "-p", str(os.getpid())]
        tracer = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + TRACER_SECONDS
            while _status("/proc/self/status", "TracerPid") == 0:
                if tracer.poll() is not None or time.monotonic() > deadline:
                    return None
                time.sleep(0.01)
            _take(iterator, batches)
        finally:
            tracer.send_signal(signal.SIGINT)
            tracer.wait()
        lines = [line.split() for line in summary.read().splitlines()]
        return {
            name: int(calls) for calls, name in (line for line in lines if len(line) == 2) if calls.isdigit()
        }


def table(rows: dict[tuple[int, bool], dict[str, list[dict[str, Any]]]]) -> str:
    """A line for each number of workers and each order: what a batch takes."""
    lines = [
        "| workers | in_order | main CPU, µs per batch: torch | ours (range) "
        "| workers' CPU, µs per batch: torch | ours | part of the rate that the sleep allows: torch | ours |",
        "|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for (workers, in_order), found in rows.items():
        cells = [str(workers), str(in_order)]
        for key in ("main_cpu_seconds", "worker_cpu_seconds", "seconds"):
            for name in (BASELINE, OURS):
                times = [run[key] / run["batches"] for run in found.get(name, [])]
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


def table_of_counts(rows: dict[tuple[int, bool], dict[str, float | None]]) -> str:
    """A line for each number of workers and each order: calls, sleeps and wake-ups for a batch."""
    columns = {
        "calls": "main process: system calls",
        "main_sleeps": "it sleeps",
        "wakes": "it wakes a worker",
        "sleeps": "workers sleep, once in the sample",
    }
    lines = [
        "| workers | in_order | " + " | ".join(columns.values()) + " |",
        "|--:|---|--:|--:|--:|--:|",
    ]
    for (workers, in_order), found in rows.items():
        cells = [str(workers), str(in_order)]
        cells += ["" if found[key] is None else f"{found[key]:.2f}" for key in columns]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def growth(rows: dict[tuple[int, bool], dict[str, list[dict[str, Any]]]]) -> str:
    """Says by what the main process's time for a batch grows from few workers to many."""
    lines = []
    for in_order in (True, False):
        times = [
            [run["main_cpu_seconds"] / run["batches"] for run in rows[workers, in_order][OURS]]
            for workers in (FEW, MANY)
        ]
        # By round: what else the machine does changes from one to the next.
        ratios = [many / few for few, many in zip(*times, strict=True)]
        lines.append(
            f"With {MANY} workers, in_order={in_order}, the main process takes {median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) times what it takes with {FEW}."
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Returns 1 if a process failed."""
    parser = argparse.ArgumentParser(prog="python -m benches.python.scaling", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="rounds, the loaders in turn (default 3)")
    parser.add_argument("--seconds", type=float, default=2.0, help="timed window of one run (default 2)")
    parser.add_argument(
        "--quick", action="store_true", help="a smoke test: 1, 8 and 128 workers, once, briefly"
    )
    parser.add_argument(
        "--out", type=Path, default=BUILD / "bench-scaling", help="written with .md and .json appended"
    )
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds} measures nothing; give 1 or more")
    rounds, seconds, numbers, batches = options.rounds, options.seconds, WORKERS, 500
    if options.quick:
        rounds, seconds, numbers, batches = 1, 0.2, (1, FEW, MANY), 50
    where = machine()
    cases = [(workers, in_order) for workers in numbers for in_order in (True, False)]
    rows: dict[tuple[int, bool], dict[str, list[dict[str, Any]]]] = {
        case: defaultdict(list) for case in cases
    }
    counts = {}
    try:
        for number, case in itertools.product(range(rounds), cases):
            print(f"round {number + 1}, {case[0]} workers, in_order={case[1]}", file=sys.stderr, flush=True)
            loaders = [BASELINE, OURS] if case[0] <= MOST_OF_TORCH else [OURS]
            for name in loaders if number % 2 == 0 else reversed(loaders):
                timing = call_in_process("forkserver", timed_sleepers, name, *case, seconds)
                rows[case][name].append(timing)
        for case in cases:
            counts[case] = call_in_process("forkserver", counted_sleepers, *case, batches)
    except ProcessFailedError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    how = (
        f"samples of 1 KB that sleep {SECONDS_PER_BATCH * 1e3:g} ms for each worker; "
        f"medians of {rounds} interleaved rounds of {seconds:g} s"
    )
    text = "\n\n".join((head(where, how), table(rows) + "\n" + growth(rows) + "\n" + table_of_counts(counts)))
    print(text)
    found = [
        {
            "workers": workers,
            "in_order": in_order,
            "rounds": rows[workers, in_order],
            "counts": counts[workers, in_order],
        }
        for workers, in_order in cases
    ]
    write(options.out, text, {"machine": where, "how": how, "rows": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
