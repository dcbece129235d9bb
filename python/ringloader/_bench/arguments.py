"""The command line of the bench. Imports no torch."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ringloader._bench.configuration import METHODS, Configuration, configurations
from ringloader._bench.target import Target

# Up to here every number of workers is measured; from here on each is twice the one before.
_EACH = 8
# The most workers that may be asked for.
_MOST_WORKERS = 1024

DESCRIPTION = """\
Measures the loader that a function of yours returns, with torch's DataLoader and with ringloader, and says
how many workers to use. Each measurement has a process of its own, which calls the function. The exit status
is 1 if the batches differ, and 2 if a word of the command line is wrong or nothing can be measured.
"""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Ends the program."""
        self.exit(2, f"{self.prog}: error: {message}\n")


@dataclasses.dataclass(frozen=True)
class Arguments:
    """A command line that was checked.

    Attributes:
        target: The user's function.
        configurations: The configurations to measure.
        rounds: How often each of them is measured.
        seconds: How long, after the first batch.
        step: The training step of the caller, in seconds.
        json: The path of the results, or None.
        plot: The path of the picture, or None.
    """

    target: Target
    configurations: tuple[Configuration, ...]
    rounds: int
    seconds: float
    step: float
    json: str | None
    plot: str | None


def parse(given: list[str]) -> Arguments:
    """Reads the words behind ``bench``. Ends the program with a line if one of them is wrong."""
    parser = Parser("python -m ringloader bench", description=DESCRIPTION)
    add = parser.add_argument
    add("target", metavar="FILE.py:NAME", type=_checked(Target.parse), help="or module:NAME, the function")
    add(
        "--workers",
        metavar="0,1,2,4",
        type=_checked(_workers),
        default=_up_to(_cores()),
        help="the numbers of workers (default: 0, 1, 2, ... up to the cores)",
    )
    add(
        "--method",
        metavar="process,thread",
        type=_checked(_methods),
        default=_methods("process"),
        help="the kinds of ringloader's workers, whatever the loader's own is (default: process)",
    )
    add("--rounds", metavar="N", type=_checked(_positive_int), default=3, help="default: 3")
    add(
        "--seconds",
        type=_checked(_positive),
        default=2.0,
        help="how long to take batches after the first one (default: 2)",
    )
    add(
        "--step",
        metavar="MS",
        type=_checked(_not_negative),
        default=0.0,
        help="milliseconds of a training step, in which the caller sleeps (default: 0, no step)",
    )
    add("--json", metavar="PATH", type=_checked(_writable), help="writes the results as JSON")
    add("--plot", metavar="PATH", type=_checked(_picture), help="draws the rate over the workers")
    found = parser.parse_args(given)
    return Arguments(
        found.target,
        tuple(configurations(found.workers, found.method)),
        found.rounds,
        found.seconds,
        found.step / 1e3,
        found.json,
        found.plot,
    )


def _checked(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Has a ``ValueError`` of ``read`` be the parser's error."""

    def checked(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _up_to(cores: int) -> list[int]:
    found = list(range(min(cores, _EACH) + 1))
    while found[-1] < cores:
        found.append(min(2 * found[-1], cores))
    return found


def _workers(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise ValueError(f"{text!r} is not a list of numbers from 0 on, as 0,1,2,4")
    if max(map(int, words)) > _MOST_WORKERS:
        raise ValueError(f"{text!r} has a number above {_MOST_WORKERS:,}")
    return list(dict.fromkeys(map(int, words)))


def _methods(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not all(word in METHODS for word in words):
        raise ValueError(f"{text!r} is not process, thread, or process,thread")
    return list(dict.fromkeys(METHODS[word] for word in words))


def _positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a number from 1 on")
    return int(text)


def _positive(text: str) -> float:
    found = _number(text)
    if not 0 < found < math.inf:
        raise ValueError(f"{text!r} is not a number above 0")
    return found


def _not_negative(text: str) -> float:
    found = _number(text)
    if not 0 <= found < math.inf:
        raise ValueError(f"{text!r} is not a number from 0 on")
    return found


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _writable(text: str) -> str:
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"cannot write a file {text!r}")
    return text


def _picture(text: str) -> str:
    from ringloader._bench import plot

    plot.check(text)
    return _writable(text)
