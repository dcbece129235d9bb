"""``python -m ringloader bench``: compares batches, measures in rounds, and prints figures.

Imports no torch: a wrong word is told at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import itertools
import json
import operator
import os
import signal
import statistics
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ringloader._native as _native
from ringloader._features.cores import cores
from ringloader._features.rules import AUTO, THREAD
from ringloader._log import complain, write

NAME = "python -m ringloader bench"
DESCRIPTION = """\
Measures the loader that a function of yours returns, with torch's DataLoader and with ringloader, and says
how many workers to use. Each measurement has a process of its own, which calls the function. The exit status
is 1 if the batches differ, and 2 if a word of the command line is wrong or nothing can be measured.
"""

# Up to here every number of workers is measured; from here on each is twice the one before.
_EACH = 8
PROCESS = "multiprocessing"
# By the words of the command line.
_METHODS = {"process": [PROCESS], "thread": [THREAD], "process,thread": [PROCESS, THREAD]}


class BenchError(Exception):
    """An error of the user's function, or of a run.

    Args:
        text: The error, in a line.
        more: The traceback of the user's code, or the output of a process.
    """

    def __init__(self, text: str, more: str = "") -> None:
        super().__init__(text, more)
        self.text, self.more = text, more


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A loader, and its workers.

    Attributes:
        loader: The package whose iterator runs.
        num_workers: The number of workers; ``"auto"``: the loader finds it.
        worker_method: Their kind, as the option of ``ringloader.DataLoader``; torch's are processes.
        worker_concurrency: Samples of a worker at once; None: as many as the user's loader says.
    """

    loader: Literal["torch", "ringloader"]
    num_workers: int | Literal["auto"]
    worker_method: str = PROCESS
    worker_concurrency: int | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a loader with such workers."""
        method = None if self.worker_method == PROCESS else self.worker_method
        found = {"worker_method": method, "worker_concurrency": self.worker_concurrency}
        given = {name: value for name, value in found.items() if value is not None}
        return {"num_workers": self.num_workers, **given}

    @property
    def in_words(self) -> str:
        """The arguments as they stand in a call."""
        return ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())

    def __str__(self) -> str:
        return f"{self.loader} with {self.in_words}"


class Target(NamedTuple):
    """A function that returns a loader.

    Attributes:
        place: The path of a Python file, or the name of a module.
        name: The name of the function there.
    """

    place: str
    name: str

    @property
    def is_file(self) -> bool:
        """True for a file, false for the name of a module."""
        return self.place.endswith(".py") or os.sep in self.place

    def call(self, num_workers: int) -> Any:
        """Calls the function, with ``num_workers`` if it takes it, and returns its result.

        The file runs as a module, so that worker processes of every start method find its classes. Nothing
        under ``if __name__ == "__main__":`` runs.
        """
        sys.argv[:] = [self.place]
        path = Path(self.place).resolve()
        if self.is_file:
            sys.path.insert(0, str(path.parent))
        module = importlib.import_module(path.stem if self.is_file else self.place)
        make = operator.attrgetter(self.name)(module)
        return make(num_workers) if "num_workers" in inspect.signature(make).parameters else make()


class Figures(NamedTuple):
    """The figures of a loader.

    Attributes:
        batches_per_second: The rate after the first batch.
        first_batch_seconds: From ``iter`` to the first batch.
        main_cpu_us: Microseconds of processor time of the main process for a batch, with all its threads.
        memory_mb: Megabytes of the main process and its workers; 0 if the system does not tell.
        step: Seconds of a training step; 0 without one.
    """

    batches_per_second: float
    first_batch_seconds: float
    main_cpu_us: float
    memory_mb: float
    step: float


class Measurement(NamedTuple):
    """One run of a loader.

    Attributes:
        figures: Its figures.
        num_workers: The number of workers in the end.
        torchs: The reason if ringloader ran torch's own loader.
    """

    figures: Figures
    num_workers: int
    torchs: str | None


class Row(NamedTuple):
    """Medians of the rounds of one configuration.

    Attributes:
        configuration: The configuration.
        figures: The medians.
        ratio: The rate over that of torch's loader with as many workers; None without such a loader.
    """

    configuration: Configuration
    figures: Figures
    ratio: float | None

    def to_dict(self) -> dict[str, Any]:
        """Returns the row as JSON has it."""
        figures = self.figures._asdict()
        del figures["step"]
        memory = figures["memory_mb"] or None
        return dataclasses.asdict(self.configuration) | figures | {"memory_mb": memory}


# The place of each part of a batch, a digest of the part, and its text.
Described = list[tuple[str, str, str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add = parser.add_argument
    add("target", type=_target, metavar="FILE.py:NAME", help="or module:NAME, the function")
    add(
        "--workers",
        type=_numbers(0, AUTO),
        metavar="0,1,2,4,auto",
        default=_up_to(cores()),
        help="the numbers of workers; auto: ringloader finds one (default: 0, 1, 2, ... up to the cores)",
    )
    add(
        "--method",
        choices=_METHODS,
        default="process",
        help="the kinds of ringloader's workers, whatever the loader's own is (default: process)",
    )
    add(
        "--concurrency",
        type=_numbers(1),
        metavar="1,16,64",
        default=[None],
        help="the numbers of samples of a worker at once (default: as the loader's own)",
    )
    add("--rounds", type=_from(1, int), metavar="N", default=3, help="default: 3")
    add(
        "--seconds",
        type=_from(0, float),
        default=2.0,
        help="how long to take batches after the first one (default: 2)",
    )
    add(
        "--step",
        type=_from(0, float),
        metavar="MS",
        default=0.0,
        help="milliseconds of a training step, in which the caller sleeps (default: 0, no step)",
    )
    add("--json", type=_writable, metavar="PATH", help="writes the results as JSON")


def _target(text: str) -> Target:
    place, _, name = text.rpartition(":")
    target = Target(place, name)
    if not (place and name):
        raise ArgumentTypeError(f"{text!r} is not FILE.py:NAME or module:NAME, with the name of a function")
    if target.is_file and not Path(place).is_file():
        raise ArgumentTypeError(f"can't open file {place!r}: no such file")
    return target


def _up_to(most: int) -> list[int | Literal["auto"]]:
    found = list(range(min(most, _EACH) + 1))
    while found[-1] < most:
        found.append(min(2 * found[-1], most))
    return [*found]


def _numbers(least: int, other: Any = None) -> Callable[[str], list[Any]]:
    def numbers(text: str) -> list[Any]:
        words = list(dict.fromkeys(text.split(",")))
        found = [int(word) for word in words if word.isdecimal() and int(word) >= least]
        others = [word for word in words if word == other]
        if not found or len(found) + len(others) < len(words):
            raise ArgumentTypeError(f"{text!r} is not a list of numbers from {least} on, as 1,2,4")
        return [*found, *others]

    return numbers


def _writable(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ArgumentTypeError(f"cannot write a file {text!r}")
    return path


def _from(least: int, kind: Callable[[str], float]) -> Callable[[str], float]:
    def number(text: str) -> float:
        found = kind(text)
        if not found >= least:
            raise ArgumentTypeError(f"{text!r} is not a number from {least} on")
        return found

    return number


def configurations(
    workers: Sequence[int | Literal["auto"]], methods: Sequence[str], at_once: Sequence[int | None] = (None,)
) -> list[Configuration]:
    """Returns the configurations of a bench. Those with as many workers stand side by side, torch's first.

    Args:
        workers: The numbers of workers.
        methods: The kinds of ringloader's workers.
        at_once: Samples of a worker at once; None: as many as the user's loader says.
    """
    found = []
    for number in workers:
        if number != AUTO:
            found.append(Configuration("torch", number))
        # Without workers there is no kind of them.
        for method in methods if number and number != AUTO else [PROCESS]:
            found += [Configuration("ringloader", number, method, most) for most in at_once]
    return found


def run(given: argparse.Namespace, call: Callable[..., Any]) -> int:
    """Runs the command, and returns its exit status.

    Args:
        given: The arguments.
        call: :func:`measure.run`, whose module imports torch.
    """
    # SIGTERM, which `timeout` sends, ends the processes as Ctrl-C does.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if not _native.SUPPORTED:
            raise BenchError("bench compares torch's loader with ringloader's, which needs Linux")
        return _Bench(given, call).run()
    except BenchError as error:
        complain(f"{error.more}{NAME}: error: {error.text}\n")
        return 2
    except KeyboardInterrupt:
        complain(f"{NAME}: interrupted\n")
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


class _Bench:
    def __init__(self, given: argparse.Namespace, call: Callable[..., Any]) -> None:
        self._given, self._run = given, call
        found = configurations(given.workers, _METHODS[given.method], given.concurrency)
        self._measured: Measured = {one: [] for one in found}
        # A configuration that has failed is not tried again.
        self._failed: dict[Configuration, BenchError] = {}

    def run(self) -> int:
        how = self._given.seconds, self._given.step / 1e3
        is_same, comparison = self._compare()
        turns = list(self._measured)
        for _ in range(self._given.rounds):
            for configuration in turns:
                found = self._call("measure", configuration, *how)
                self._measured[configuration] += [] if found is None else [found]
            # The order turns, so that none always follows the same one.
            turns = [*turns[1:], turns[0]]
        rows = rows_of(self._measured)
        best = fastest_of(rows)
        if best is None:
            raise next(iter(self._failed.values()))
        verdict = self._call("verdict", best.configuration, *how)
        lines = [table(rows), "", comparison, *self._notes(rows)]
        if verdict is not None:
            if "num_workers" in verdict.change:
                # The number that was measured to be enough is recommended below, and no other one.
                text = f"{verdict.text.partition('. ')[0]}."
                verdict = dataclasses.replace(verdict, text=text, gain=None, change={})
            lines.append(f"Verdict with {best.configuration.in_words}: {verdict.text}")
        row, reason = recommended_of(rows, best)
        lines.append(f"Recommended: {row.configuration.in_words}: {reason}.")
        write("\n".join([*lines, ""]))
        if self._given.json is not None:
            results = {
                "rows": [one.to_dict() for one in rows],
                "same_batches": is_same,
                "recommended": row.configuration.arguments,
                "verdict": None if verdict is None else dataclasses.asdict(verdict),
            }
            self._given.json.write_text(f"{json.dumps(results, indent=2)}\n")
        return int(is_same is False)

    def _call(self, function: str, configuration: Configuration, *rest: Any) -> Any:
        """Calls a function for a configuration in a new process; None if that fails."""
        if configuration in self._failed:
            return None
        if sys.stderr is not None and sys.stderr.isatty():
            complain(f"running {configuration}: {function}\n")
        try:
            return self._run(function, self._given.target, configuration, *rest)
        except BenchError as error:
            self._failed[configuration] = BenchError(f"{configuration} failed: {error.text}", error.more)
            return None

    def _compare(self) -> tuple[bool | None, str]:
        """Compares the batches of both loaders with the most workers; None where that says nothing."""
        ours = max(
            (one for one in self._measured if one.loader == "ringloader" and one.num_workers != AUTO),
            key=lambda one: int(one.num_workers),
        )
        torchs = Configuration("torch", ours.num_workers)
        where = f"with {ours.in_words}"
        theirs, mine = (self._call("described", one) for one in (torchs, ours))
        if theirs is None and mine is None:
            # The user's function, in most cases.
            raise self._failed[ours]
        if theirs is None or mine is None:
            return None, f"Batches: not compared {where}, because one of the loaders failed."
        different = difference(theirs, mine)
        if different is None:
            count = sum(1 for one in theirs[: len(mine)] if one)
            return True, f"Batches: the first {count} of both loaders are equal, {where}."
        again = self._call("described", torchs)
        unlike = None if again is None else difference(theirs, again)
        if unlike is not None:
            return None, (
                f"Batches: not comparable {where}: two runs of torch's own loader differ, at {unlike[0]}. "
                "Seed all that draws."
            )
        place, expected, got = different
        return False, f"Batches: DIFFERENT {where}: at {place} torch has {expected}, ringloader {got}."

    def _notes(self, rows: list[Row]) -> list[str]:
        notes = [error.text for error in self._failed.values()]
        for configuration, rounds in self._measured.items():
            if configuration.num_workers == AUTO and rounds:
                numbers = ", ".join(str(one.num_workers) for one in rounds)
                notes.append(f"{configuration} had {numbers} workers at the end of its rounds.")
            reasons = dict.fromkeys(one.torchs for one in rounds if one.torchs is not None)
            notes += [f"{configuration} ran torch's own loader: {reason}" for reason in reasons]
        ours, theirs = fastest_of(rows), fastest_of(rows, "torch")
        if ours and theirs and theirs.figures.batches_per_second * NEAR > ours.figures.batches_per_second:
            notes.append(
                f"torch's own loader was faster: {rate(theirs.figures.batches_per_second)} batches a second "
                f"with {theirs.configuration.in_words}."
            )
        return notes


def difference(first: list[Described], second: list[Described]) -> tuple[str, str, str] | None:
    """Returns where two loaders' batches differ for the first time, with the text of each there, or None."""
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        for here, there in itertools.zip_longest(one, other, fillvalue=("", "", "nothing")):
            if here[:2] != there[:2]:
                return f"batch {number}{here[0] if here[0] == there[0] else ''}", here[2], there[2]
    return None


# Rates this near to the best one, or to that of the training step, are as good.
NEAR = 0.95

# Each configuration's measurements, in the order of the rounds: a run that fails is the last one.
Measured = dict[Configuration, list[Measurement]]


def rows_of(measured: Measured) -> list[Row]:
    """Returns a row for each configuration that was measured. A ratio is taken inside a round first."""
    found = []
    for configuration, rounds in measured.items():
        theirs = measured.get(Configuration("torch", configuration.num_workers), [])
        ratios = [
            one.figures.batches_per_second / other.figures.batches_per_second
            for one, other in zip(rounds, theirs, strict=False)
        ]
        if rounds:
            medians = map(statistics.median, zip(*(one.figures for one in rounds), strict=True))
            ratio = statistics.median(ratios) if ratios else None
            found.append(Row(configuration, Figures(*medians), ratio))
    return found


def fastest_of(rows: list[Row], loader: str = "ringloader") -> Row | None:
    """Returns the fastest row of a loader with a number of workers; None if it has none."""
    return max(_own(rows, loader), key=lambda row: row.figures.batches_per_second, default=None)


def _own(rows: list[Row], loader: str) -> list[Row]:
    numbered = (row for row in rows if row.configuration.num_workers != AUTO)
    return [row for row in numbered if row.configuration.loader == loader]


def recommended_of(rows: list[Row], fastest: Row) -> tuple[Row, str]:
    """Returns the row of ringloader's with the fewest workers that are enough, and why.

    Args:
        rows: The rows.
        fastest: The fastest one of ringloader's.
    """
    own = sorted(_own(rows, "ringloader"), key=lambda row: int(row.configuration.num_workers))
    for row in own:
        step = row.figures.step
        if row.figures.batches_per_second * step >= NEAR:
            return row, f"the fewest workers whose work the step hides; it took {step * 1e3:.1f} ms"
    best = fastest.figures.batches_per_second
    found = next(row for row in own if row.figures.batches_per_second >= NEAR * best)
    without = f"the step never fills {NEAR:.0%} of the time; " if found.figures.step else ""
    if found is fastest:
        return found, f"{without}the best rate"
    return found, (
        f"{without}the fewest workers within 5 % of the best rate: "
        f"{found.figures.batches_per_second / best:.0%} of that with {fastest.configuration.in_words}"
    )


_HEAD = ("loader", "workers", "batches/s", "ratio", "first batch", "main CPU/batch", "memory")


def table(rows: list[Row]) -> str:
    """Returns a table with a line for each row. The ratio is to torch's loader with as many workers."""
    cells = [_HEAD, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    line = f"{{:<{widths[0]}}}" + "".join(f"  {{:>{width}}}" for width in widths[1:])
    return "\n".join(line.format(*texts) for texts in cells)


def _cells(row: Row) -> tuple[str, ...]:
    from ringloader._features.stats.epoch import in_words

    configuration, figures, ratio = row
    most = configuration.worker_concurrency
    kind = "" if configuration.worker_method == PROCESS else " threads"
    return (
        configuration.loader,
        f"{configuration.num_workers}{kind}{'' if most is None else f', {most} at once'}",
        rate(figures.batches_per_second),
        "-" if ratio is None or configuration.loader == "torch" else f"{ratio:.2f}",
        in_words(figures.first_batch_seconds),
        in_words(figures.main_cpu_us / 1e6),
        f"{figures.memory_mb:,.0f} MB" if figures.memory_mb else "-",
    )


def rate(batches_per_second: float) -> str:
    """Returns a rate with three digits or more."""
    return f"{batches_per_second:,.0f}" if batches_per_second >= 100 else f"{batches_per_second:.3g}"
