"""Runs loaders side by side and writes build/bench.md and build/bench.json."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .loaders import BASELINE, LOADERS
from .measure import timed_run
from .processes import ProcessFailedError, call_in_process
from .report import Row, machine, markdown, summary
from .verify import fingerprints, smoke_run
from .workloads import BUILD, BY_NAME, WORKLOADS, Workload

QUICK_BATCHES = 6
QUICK_SECONDS = 0.1


def _names(known: list[str], what: str) -> object:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"no {what} {name!r}; there are {', '.join(known)}")
        return names

    return parse


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benches.python", description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=5, help="rounds, each with every loader once (default 5)"
    )
    parser.add_argument("--seconds", type=float, default=1.5, help="timed window of one run (default 1.5)")
    parser.add_argument(
        "--only", type=_names(list(BY_NAME), "workload"), help="workloads, separated by commas"
    )
    parser.add_argument(
        "--loaders", type=_names(list(LOADERS), "loader"), default=["torch", "ringloader-rings", "ringloader"]
    )
    parser.add_argument(
        "--quick", action="store_true", help="a smoke test: checks every row, times it once, briefly"
    )
    parser.add_argument(
        "--out", type=Path, default=BUILD / "bench", help="written with .md and .json appended"
    )
    parsed = parser.parse_args()
    if BASELINE not in parsed.loaders:
        parser.error(f"--loaders must name {BASELINE!r}: every ratio is to it")
    if parsed.rounds < 1:
        parser.error(f"--rounds {parsed.rounds} measures nothing; give 1 or more")
    return parsed


def verify(workload: Workload, rows: list[Row], method: str) -> None:
    """Compares the first batches of every loader with the baseline's; a row that differs is not timed."""
    found: dict[str, list[str]] = {}
    for row in rows:
        try:
            batches = workload.verified_batches
            found[row.loader] = call_in_process(method, fingerprints, row.loader, workload.name, batches)
        except ProcessFailedError as error:
            row.error = str(error)
    compare(rows, found)


def smoke(workload: Workload, rows: list[Row], seconds: float) -> None:
    """What ``verify`` and one round of ``measure`` do, in one process for each row."""
    found: dict[str, list[str]] = {}
    for row in rows:
        try:
            found[row.loader], timing = call_in_process(
                "forkserver", smoke_run, row.loader, workload.name, QUICK_BATCHES, seconds
            )
            row.rounds.append(timing)
        except ProcessFailedError as error:
            row.error = str(error)
    compare(rows, found)


def compare(rows: list[Row], found: dict[str, list[str]]) -> None:
    """Sets ``content`` of every row, and ``error`` where batches differ from the baseline's."""
    expected = found.get(BASELINE)
    for row in rows:
        if row.loader not in found:
            continue
        if row.loader == BASELINE:
            row.content = "is torch's"
        elif expected is None:
            row.error = f"nothing to compare with: {BASELINE} failed"
        elif found[row.loader] == expected:
            row.content = f"yes ({len(expected)})"
        else:
            pairs = enumerate(zip(found[row.loader], expected, strict=True))
            differing = [number for number, (ours, theirs) in pairs if ours != theirs]
            row.content = "NO"
            row.error = (
                f"{len(differing)} of {len(expected)} batches differ, the first is number {differing[0]}"
            )


def measure(workload: Workload, rows: list[Row], method: str, rounds: int, seconds: float) -> None:
    """Times the rows in turn, each run in a process of its own, in the opposite order every other round."""
    for number in range(rounds):
        for row in rows if number % 2 == 0 else reversed(rows):
            if row.error is None:
                window = seconds * workload.seconds
                try:
                    row.rounds.append(call_in_process(method, timed_run, row.loader, workload.name, window))
                except ProcessFailedError as error:
                    row.error = str(error)
                    row.rounds.clear()


def main() -> int:
    """Returns 1 if a row failed or had other batches than torch's."""
    options = arguments()
    rounds, seconds = options.rounds, options.seconds
    where = machine()
    summaries = []
    failed = False
    raw = []
    for workload in WORKLOADS:
        if options.only is not None and workload.name not in options.only:
            continue
        if workload.available is not None and not workload.available():
            print(f"{workload.name}: left out, its files are made by examples/photographs", file=sys.stderr)
            continue
        print(f"{workload.name}: {workload.text}", file=sys.stderr, flush=True)
        if workload.prepare is not None:
            workload.prepare()
        rows = [Row(workload.name, workload.text, loader) for loader in options.loaders]
        if options.quick:
            smoke(workload, rows, QUICK_SECONDS)
        else:
            verify(workload, rows, "spawn")
            measure(workload, rows, "spawn", rounds, seconds)
        baseline = next(row for row in rows if row.loader == BASELINE)
        for row in rows:
            summaries.append(summary(row, baseline))
            raw.append({"workload": row.workload, "loader": row.loader, "rounds": row.rounds})
            failed = failed or row.error is not None
    if not summaries:
        print("no workload was run", file=sys.stderr)
        return 1
    how = (
        f"medians of {rounds} interleaved rounds of {seconds:g} s or more, every run in a process of its own"
    )
    if options.quick:
        how = "one run of a tenth of a second each: a smoke test, not a measurement"
    table = markdown(summaries, where, how)
    print(table)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".md").write_text(table)
    document = {"machine": where, "how": how, "rows": summaries, "rounds": raw}
    options.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
