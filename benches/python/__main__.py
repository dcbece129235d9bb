"""Runs loaders side by side and writes build/bench.md, build/bench.json and build/bench.png."""

from __future__ import annotations

import argparse
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from .files import BUILD
from .ideal import IDEALS
from .interpreter import Interpreter
from .loaders import BASELINE, BASELINE_ALONE, LOADERS
from .plot import draw
from .report import Row, better, by_row, by_workload, head, machine, summary, write
from .rounds import Runner, measure, verify
from .workloads import BY_NAME, NUM_WORKERS, PREFETCH_FACTOR, WORKLOADS, Workload

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
    parser.add_argument("--seconds", type=float, default=1.0, help="timed window of one run (default 1)")
    parser.add_argument(
        "--only", type=_names(list(BY_NAME), "workload"), help="workloads, separated by commas"
    )
    parser.add_argument(
        "--loaders",
        type=_names([*LOADERS, *IDEALS], "loader"),
        default=[name for name in [*LOADERS, *IDEALS] if name != "torch-again"],
        help="loaders, separated by commas (default: all but torch-again, which is torch's loader once more)",
    )
    parser.add_argument(
        "--method",
        choices=["forkserver", "spawn"],
        default="forkserver",
        help="each run's process: a copy of one that has only imported torch, or a new interpreter (slower)",
    )
    parser.add_argument(
        "--threads-python",
        type=Path,
        default=BUILD.parent / ".venv-threads" / "bin" / "python",
        help="interpreter for dataloader-rs (default: .venv-threads/bin/python)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a smoke test: checks every row, times it once, briefly"
    )
    parser.add_argument(
        "--out", type=Path, default=BUILD / "bench", help="written with .md, .json and .png appended"
    )
    parsed = parser.parse_args()
    if BASELINE not in parsed.loaders:
        parser.error(f"--loaders must name {BASELINE!r}: all batches are compared with its")
    if parsed.rounds < 1:
        parser.error(f"--rounds {parsed.rounds} measures nothing; give 1 or more")
    return parsed


def usable_loaders(options: argparse.Namespace) -> list[str]:
    """Returns those asked for whose packages are there; says which are left out."""
    usable = []
    for name in options.loaders:
        loader = LOADERS.get(name)
        missing = None
        if loader is not None and loader.own_environment:
            if not options.threads_python.exists():
                missing = f"there is no {options.threads_python}, which make bench-threads-env makes"
        elif loader is not None and loader.package is not None and find_spec(loader.package) is None:
            missing = f"{loader.package} is not installed; it is in the dependency group 'bench'"
        if missing is None:
            usable.append(name)
        else:
            print(f"{name}: left out, {missing}", file=sys.stderr)
    return usable


def rows_of(workload: Workload, loaders: list[str]) -> list[Row]:
    """A row for each loader that can do what the workload asks for."""
    able = [
        name for name in loaders if workload.in_order or name in IDEALS or not LOADERS[name].always_in_order
    ]
    return [Row(workload.name, workload.text, name) for name in able]


def run(options: argparse.Namespace, runner: Runner) -> list[Row]:
    """All rows of all workloads."""
    rows = []
    for workload in WORKLOADS:
        if options.only is not None and workload.name not in options.only:
            continue
        if workload.available is not None and not workload.available():
            print(f"{workload.name}: left out, it needs {workload.needs}", file=sys.stderr)
            continue
        print(f"{workload.name}: {workload.text}", file=sys.stderr, flush=True)
        if workload.prepare is not None:
            workload.prepare()
        made = rows_of(workload, options.loaders)
        batches = QUICK_BATCHES if options.quick else workload.verified_batches
        verify(workload, made, runner, batches)
        measure(workload, made, runner, options.rounds, options.seconds)
        for row in made:
            if row.error is not None:
                print(f"  {row.loader}: {row.error}", file=sys.stderr)
        rows += made
    return rows


def main() -> int:
    """Returns 1 if a row failed or had other batches than torch's."""
    options = arguments()
    if options.quick:
        options.rounds, options.seconds = 1, QUICK_SECONDS
    where = machine()
    began = time.monotonic()
    options.loaders = usable_loaders(options)
    interpreter = Interpreter(options.threads_python)
    try:
        rows = run(options, Runner(options.method, interpreter))
    finally:
        interpreter.close()
    if not rows:
        print("no workload was run", file=sys.stderr)
        return 1
    named = {(row.workload, row.loader): row for row in rows}
    summaries = [
        summary(
            row,
            named[row.workload, BASELINE],
            [named.get((row.workload, ideal)) for ideal in IDEALS],
            better([named.get((row.workload, torchs)) for torchs in (BASELINE, BASELINE_ALONE)]),
        )
        for row in rows
    ]
    how = (
        f"{NUM_WORKERS} workers where no other number is said, torch's better rate: with those or without "
        f"workers, prefetch_factor {PREFETCH_FACTOR}; medians of "
        f"{options.rounds} interleaved rounds of {options.seconds:g} s or more (loaders that are there for "
        "comparison: every second round), each run in a process of its own"
    )
    if options.quick:
        how = "one run of a tenth of a second each: a smoke test, not a measurement"
    short = head(where, how) + "\n\n" + by_workload(summaries)
    print(short)
    raw = [{"workload": row.workload, "loader": row.loader, "rounds": row.rounds} for row in rows]
    document = {"machine": where, "how": how, "rows": summaries, "rounds": raw}
    write(options.out, f"{short}\n{by_row(summaries)}", document)
    draw(summaries, options.out.with_suffix(".png"))
    print(f"{(time.monotonic() - began) / 60:.1f} minutes; written to {options.out}.md", file=sys.stderr)
    return int(any(row.error is not None for row in rows))


if __name__ == "__main__":
    sys.exit(main())
