"""Programs as users write them: torch's loader and ringloader, each without workers and with two.

``examples/programs`` has the programs. Writes build/bench-programs.md and build/bench-programs.json. The
batches are compared before anything is timed. Only batches within an epoch are timed: not its start.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch

from .files import BUILD
from .loaders import LOADERS
from .processes import ProcessFailedError, call_in_process, named
from .report import figure, head, machine, ratio_cell, write
from .verify import HELD_BATCHES, fingerprint

WORKERS = 2
# Each with the loader and the number of workers. The table has these columns.
WAYS = {
    "torch without workers": ("torch", 0),
    f"torch, {WORKERS} workers": ("torch", WORKERS),
    "ringloader without workers": ("ringloader", 0),
    f"ringloader, {WORKERS} workers": ("ringloader", WORKERS),
}
VERIFIED_BATCHES = 24
# The first batches of an epoch: from workers that start, and what was made while they waited.
SKIPPED_BATCHES = 8
QUICK_SECONDS = 0.1


@dataclass(frozen=True)
class Program:
    """One of the examples.

    ``draws``: samples are random or divided among workers, so that batches without workers are others.
    ``seconds`` scales the timed window.
    """

    name: str
    text: str
    needs: tuple[str, ...] = ()
    draws: bool = False
    seconds: float = 1.0


PROGRAMS = [
    Program("images", "image folder with transforms, 16 images", ("torchvision", "PIL"), True, 3.0),
    Program("texts", "padded text from an iterable, 32 lines", draws=True),
    Program("rows", "numpy rows, 1,024 of 30 floats"),
    Program("graphs", "custom graphs with a `collate_fn`, 16 graphs"),
    Program("hugging_face", "Hugging Face's torch format, 16 texts of 128 tokens", ("datasets",)),
]
BY_NAME = {program.name: program for program in PROGRAMS}


@dataclass
class Measured:
    """The rates of a program's ways, in batches a second, one for each round."""

    program: Program
    rates: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    error: str | None = None

    def better(self, loader: str) -> str:
        """The faster of a loader's two ways, by its median."""
        return max(
            (way for way, (name, _) in WAYS.items() if name == loader),
            key=lambda way: median(self.rates[way]),
        )

    def ratios(self) -> list[float]:
        """Ringloader's better rate over torch's better one, in each round."""
        ours, torchs = (self.rates[self.better(loader)] for loader in ("ringloader", "torch"))
        return [mine / theirs for mine, theirs in zip(ours, torchs, strict=True)]


def _loader(program: str, way: str) -> Any:
    name, workers = WAYS[way]
    if name == "torch":
        from torch.utils.data import DataLoader
    else:
        from ringloader import DataLoader
    return importlib.import_module(f"examples.programs.{program}").make_loader(DataLoader, workers)


def _checked(way: str, iterator: Iterator[Any]) -> None:
    """Looks at the path that was taken: a row must be about the loader that it names."""
    name, workers = WAYS[way]
    loader = LOADERS[name if workers or name == "torch" else "ringloader-without-workers"]
    loader.checked(iterator)


def fingerprints(program: str, way: str, batches: int) -> list[str]:
    """The first batches of a program, each looked at when later ones have come."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    iterator = iter(_loader(program, way))
    held: deque[object] = deque()
    found = []
    for batch in islice(iterator, batches):
        held.append(batch)
        if len(held) > HELD_BATCHES:
            found.append(fingerprint(held.popleft()))
    _checked(way, iterator)
    return [*found, *map(fingerprint, held)]


def timed_run(program: str, way: str, seconds: float) -> float:
    """Batches in a second, over as many epochs as the window needs.

    Operations have one thread each, as in torch's workers: more of them make torch without workers slower.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loader = _loader(program, way)
    gc.collect()
    clock = time.perf_counter
    count, spent = 0, 0.0
    while spent < seconds:
        iterator = iter(loader)
        for _ in range(SKIPPED_BATCHES):
            next(iterator)
        began = now = clock()
        for _ in iterator:
            count += 1
            now = clock()
            if spent + now - began >= seconds:
                break
        spent += now - began
        _checked(way, iterator)
        del iterator
    return count / spent


def _call(function: str, *arguments: Any) -> Any:
    return call_in_process("forkserver", named, f"programs.{function}", *arguments)


def verify(program: Program) -> str | None:
    """Compares each way's batches with torch's of as many workers, and torch's two where they must be equal.

    Returns:
        The difference, or None.
    """
    found = {way: _call("fingerprints", program.name, way, VERIFIED_BATCHES) for way in WAYS}
    by_loader = {WAYS[way]: batches for way, batches in found.items()}
    pairs = [(("ringloader", workers), ("torch", workers)) for workers in (0, WORKERS)]
    if not program.draws:
        pairs.append((("torch", WORKERS), ("torch", 0)))
    for one, other in pairs:
        if by_loader[one] != by_loader[other] or not by_loader[one]:
            return f"{one[0]} with {one[1]} workers has other batches than {other[0]} with {other[1]}"
    return None


def measure(program: Program, rounds: int, seconds: float) -> Measured:
    """Compares, then times the ways in an order that turns from round to round."""
    measured = Measured(program)
    try:
        measured.error = verify(program)
        for number in range(rounds if measured.error is None else 0):
            for way in WAYS if number % 2 == 0 else reversed(WAYS):
                rate = _call("timed_run", program.name, way, seconds * program.seconds)
                measured.rates[way].append(rate)
    except ProcessFailedError as error:
        measured.error = str(error)
    return measured


def table(found: list[Measured]) -> str:
    """A line for each program, the largest gain first; those that failed last."""
    lines = [
        f"| program | {' | '.join(WAYS)} | ringloader's better over torch's better (range) |",
        "|---|" + "--:|" * (len(WAYS) + 1),
    ]
    good = [one for one in found if one.error is None]
    for one in sorted(good, key=lambda one: -median(one.ratios())):
        better = {one.better("torch"), one.better("ringloader")}
        cells = [figure(median(rates)) for rates in one.rates.values()]
        cells = [f"**{cell}**" if way in better else cell for way, cell in zip(WAYS, cells, strict=True)]
        ratios = one.ratios()
        cells.append(ratio_cell(median(ratios), min(ratios), max(ratios)))
        lines.append(f"| {one.program.text} | {' | '.join(cells)} |")
    failed = [one for one in found if one.error is not None]
    lines += [f"| {one.program.text} | failed: {one.error} |" for one in failed]
    return "\n".join(lines) + "\n"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benches.python.programs", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="each with every way once (default 3)")
    parser.add_argument("--seconds", type=float, default=1.0, help="timed window of one run (default 1)")
    parser.add_argument("--only", action="append", choices=list(BY_NAME), help="one program, or several")
    parser.add_argument("--quick", action="store_true", help="compares, and times once, briefly")
    parser.add_argument("--out", type=Path, default=BUILD / "bench-programs", help="+ .md, .json")
    parsed = parser.parse_args()
    if parsed.rounds < 1:
        parser.error(f"--rounds {parsed.rounds} measures nothing; give 1 or more")
    return parsed


def main() -> int:
    """Returns 1 if a program failed or had other batches than with torch's loader."""
    options = arguments()
    if options.quick:
        options.rounds, options.seconds = 1, QUICK_SECONDS
    where = machine()
    found = []
    for program in PROGRAMS:
        if options.only is not None and program.name not in options.only:
            continue
        missing = [package for package in program.needs if find_spec(package) is None]
        if missing:
            print(f"{program.name}: left out, {', '.join(missing)} not installed", file=sys.stderr)
            continue
        print(f"{program.name}: {program.text}", file=sys.stderr, flush=True)
        found.append(measure(program, options.rounds, options.seconds))
        if found[-1].error is not None:
            print(f"  {found[-1].error}", file=sys.stderr)
    how = (
        f"batches a second; medians of {options.rounds} alternating rounds of {options.seconds:g} s or more; "
        f"load average {os.getloadavg()[0]:.1f} at the end"
    )
    text = f"{head(where, how)}\n\n{table(found)}"
    print(text)
    rows = [{"program": one.program.name, "rates": one.rates, "error": one.error} for one in found]
    write(options.out, text, {"machine": where, "how": how, "rows": rows})
    return int(not found or any(one.error is not None for one in found))


if __name__ == "__main__":
    sys.exit(main())
