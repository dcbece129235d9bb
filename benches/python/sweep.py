"""Never slower: every workload with several numbers of workers, and what is behind torch's loader.

Writes build/bench-sweep.md, with all rows, and build/bench-sweep.json.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from .files import BUILD
from .loaders import BASELINE, OURS
from .measure import timed_run
from .processes import ProcessFailedError, call_in_process
from .report import Row, figure, head, machine, ratio_cell, ratios, summary, write
from .workloads import BY_NAME, WORKLOADS, Workload

WORKERS = (1, 2, 4, 8)
# A worker of these methods imports torch first, so only a part is run: small, collated and mapped batches.
OTHER_METHODS = ("spawn", "forkserver")
OF_OTHER_METHODS = ("tensor-1kb", "images-uint8", "tokens")
OTHER_WORKERS = (2,)
# If samples sleep or decode, the loaders are as fast as each other, and noise decides which is ahead.
CLEARLY_SLOWER = 0.95


def cases(quick: bool) -> list[tuple[Workload, str, int]]:
    """Workload, start method and number of workers."""
    workers = (2,) if quick else WORKERS
    usable = [workload for workload in WORKLOADS if workload.available is None or workload.available()]
    forked = [(workload, "fork", number) for workload in usable for number in workers]
    names = OF_OTHER_METHODS[:1] if quick else OF_OTHER_METHODS
    others = [
        (BY_NAME[name], method, number)
        for method in OTHER_METHODS
        for name in names
        for number in OTHER_WORKERS
    ]
    return forked + others


def measured(workload: Workload, method: str, workers: int, rounds: int, seconds: float) -> dict[str, Any]:
    """One row: both loaders in turn."""
    rows = [Row(workload.name, workload.text, name) for name in (BASELINE, OURS)]
    changed = {"num_workers": workers, "multiprocessing_context": method}
    for number in range(rounds):
        for row in rows if number % 2 == 0 else reversed(rows):
            arguments = (row.loader, workload.name, seconds * workload.seconds, changed)
            # If workers do not inherit from it, a new interpreter, as a program's main process is.
            own = "forkserver" if method == "fork" else "spawn"
            try:
                timing = call_in_process(own, timed_run, *arguments)
                row.rounds.append({"round": number, **timing})
            except ProcessFailedError as error:
                row.error = str(error)
    torchs, ours = rows
    return {
        "workers": workers,
        "method": method,
        **summary(ours, torchs, []),
        "error": ours.error or torchs.error,
        "rounds": ratios(ours, torchs, "seconds"),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each row, with the ratio of each round."""
    lines = [
        "| workload | start method | workers | times torch's rate (range) | rounds |",
        "|---|---|--:|--:|---|",
    ]
    for row in rows:
        cells = [row["workload"], row["method"], str(row["workers"])]
        if row["error"] is not None:
            cells += ["failed", row["error"].replace("|", "/")]
        else:
            cells.append(ratio_cell(row["ratio"], *row["ratio_range"]))
            cells.append(", ".join(map(figure, row["rounds"])))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Returns 1 if a row failed, or was clearly slower than torch in every round."""
    parser = argparse.ArgumentParser(prog="python -m benches.python.sweep", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="rounds, the loaders in turn (default 3)")
    parser.add_argument("--seconds", type=float, default=0.4, help="timed window of one run (default 0.4)")
    parser.add_argument(
        "--quick", action="store_true", help="a smoke test: 2 workers, one row of each method but fork, once"
    )
    parser.add_argument(
        "--out", type=Path, default=BUILD / "bench-sweep", help="written with .md and .json appended"
    )
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds} measures nothing; give 1 or more")
    rounds, seconds = (1, 0.1) if options.quick else (options.rounds, options.seconds)
    where = machine()
    rows = []
    for workload, method, workers in cases(options.quick):
        print(f"{workload.name}, {method}, {workers} workers", file=sys.stderr, flush=True)
        if workload.prepare is not None:
            workload.prepare()
        rows.append(measured(workload, method, workers, rounds, seconds))
    how = f"medians of {rounds} interleaved rounds of {seconds:g} s or more, each run in a process of its own"
    slower = [row for row in rows if row["error"] is not None or row["ratio"] < 1.0]
    below = f"{len(slower)} of {len(rows)} rows failed or are below 1.0"
    print(f"{head(where, how)}\n\n{below}.\n\n{table(slower) if slower else ''}")
    text = f"{head(where, how)}\n\n{below}.\n\n{table(rows)}"
    write(options.out, text, {"machine": where, "how": how, "rows": rows})
    return int(any(row["error"] is not None or row["ratio_range"][1] < CLEARLY_SLOWER for row in slower))


if __name__ == "__main__":
    sys.exit(main())
