"""The command line of the bench: the user's function, its errors, and configurations. Imports no torch."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import inspect
import math
import os
import sys
import traceback
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from ringloader._features.cores import cores
from ringloader._features.rules import AUTO, THREAD

# Up to here every number of workers is measured; from here on each is twice the one before.
_EACH = 8
# The most workers that may be asked for.
_MOST_WORKERS = 1024

PROCESS = "multiprocessing"
# The most samples of a worker at once that may be asked for.
_MOST_AT_ONCE = 65_536
# By the words of the command line.
METHODS = {"process": PROCESS, "thread": THREAD}

DESCRIPTION = """\
Measures the loader that a function of yours returns, with torch's DataLoader and with ringloader, and says
how many workers to use. Each measurement has a process of its own, which calls the function. The exit status
is 1 if the batches differ, and 2 if a word of the command line is wrong or nothing can be measured.
"""


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
    def number(self) -> int:
        """The number of workers, of a configuration that has one."""
        assert not isinstance(self.num_workers, str)
        return self.num_workers

    @property
    def is_auto(self) -> bool:
        """True if the loader finds the number of workers."""
        return self.num_workers == AUTO

    @property
    def arguments(self) -> dict[str, int | str]:
        """The arguments of a loader with such workers."""
        found: dict[str, int | str] = {"num_workers": self.num_workers}
        if self.worker_method != PROCESS:
            found["worker_method"] = self.worker_method
        if self.worker_concurrency is not None:
            found["worker_concurrency"] = self.worker_concurrency
        return found

    @property
    def in_words(self) -> str:
        """The arguments as they stand in a call."""
        return ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())

    def __str__(self) -> str:
        return f"{self.loader} with {self.in_words}"


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
        if number == AUTO:
            found += [Configuration("ringloader", number, PROCESS, most) for most in at_once]
            continue
        found.append(Configuration("torch", number))
        # Without workers there is no kind of them.
        found += [
            Configuration("ringloader", number, method, most)
            for method in (methods if number else [PROCESS])
            for most in at_once
        ]
    return found


# Modules between the command and the user's code.
_NOT_THEIRS = ("ringloader.", "torch.", "importlib", "_frozen_importlib")


class BenchError(Exception):
    """An error that is for the user.

    Args:
        text: It, in a line.
        users: More of it: the traceback of the user's code, or what a process has printed.
    """

    def __init__(self, text: str, users: str = "") -> None:
        super().__init__(text, users)
        self.text = text
        self.users = users


class TargetError(BenchError):
    """The target gives no loader."""


class RunError(BenchError):
    """A run of one configuration failed."""


def line_of(error: BaseException) -> str:
    """Returns an error as one line. One of a worker is told by the last line of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and "Traceback" in str(error):
        return lines[-1]
    return ": ".join([type(error).__name__, *lines[:1]])


def users_traceback(error: BaseException) -> str:
    """Returns a traceback from the first frame of the user's on.

    An error without such a frame is a worker's, whose text has a traceback, or is all in :func:`line_of`.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(_NOT_THEIRS):
        frames = frames.tb_next
    if frames is not None:
        return "".join(traceback.format_exception(type(error), error, frames))
    return f"{error}\n" if len(str(error).splitlines()) > 1 else ""


@dataclasses.dataclass(frozen=True)
class Target:
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

    def __str__(self) -> str:
        return f"{self.place}:{self.name}"

    def call(self, num_workers: int) -> Any:
        """Calls the function, with ``num_workers`` if it takes it, and returns its result.

        The file runs as a module, so that worker processes of every start method find its classes. Nothing
        under ``if __name__ == "__main__":`` runs.

        Raises:
            TargetError: If there is no such module or function, or one of them raises.
        """
        make: Any = self._run(f"{self.place} cannot be imported", self._module)
        for name in self.name.split("."):
            if not hasattr(make, name):
                raise TargetError(
                    f'{self.place} has no {name!r} (nothing under `if __name__ == "__main__":` is run)'
                )
            make = getattr(make, name)
        if not callable(make):
            raise TargetError(f"{self} must be a function that returns a loader, not {type(make)}")
        given = {"num_workers": num_workers} if _takes_num_workers(make) else {}
        return self._run(f"{self} fails", lambda: make(**given))

    def _module(self) -> ModuleType:
        sys.argv[:] = [self.place]
        if not self.is_file:
            return importlib.import_module(self.place)
        path = Path(self.place).resolve()
        # As `python FILE.py`. Worker processes of other start methods get this path, and import the file.
        sys.path.insert(0, str(path.parent))
        if path.stem in sys.modules:
            raise ImportError(f"{path.stem!r} is the name of another module; rename the file")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise ImportError("the name of a Python file ends in .py")
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def _run(self, what: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        # A program that ends itself, too.
        except (Exception, SystemExit) as error:
            raise TargetError(f"{what}: {line_of(error)}", users_traceback(error)) from None


def _takes_num_workers(function: Callable[..., Any]) -> bool:
    try:
        return "num_workers" in inspect.signature(function).parameters
    except ValueError:
        return False


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
    """

    target: Target
    configurations: tuple[Configuration, ...]
    rounds: int
    seconds: float
    step: float
    json: str | None


def parse(given: list[str]) -> Arguments:
    """Reads the words after ``bench``. Ends the program with a line if one of them is wrong."""
    parser = argparse.ArgumentParser("python -m ringloader bench", description=DESCRIPTION)
    add = parser.add_argument
    add("target", type=_target, metavar="FILE.py:NAME", help="or module:NAME, the function")
    add(
        "--workers",
        type=_workers,
        metavar="0,1,2,4,auto",
        default=_up_to(cores()),
        help="the numbers of workers; auto: ringloader finds one (default: 0, 1, 2, ... up to the cores)",
    )
    add(
        "--method",
        type=_methods,
        metavar="process,thread",
        default=_methods("process"),
        help="the kinds of ringloader's workers, whatever the loader's own is (default: process)",
    )
    add(
        "--concurrency",
        type=_at_once,
        metavar="1,16,64",
        default=[None],
        help="the numbers of samples of a worker at once, ringloader's worker_concurrency (default: as the "
        "loader's own)",
    )
    add("--rounds", type=_rounds, metavar="N", default=3, help="default: 3")
    add(
        "--seconds",
        type=_seconds,
        default=2.0,
        help="how long to take batches after the first one (default: 2)",
    )
    add(
        "--step",
        type=_milliseconds,
        metavar="MS",
        default=0.0,
        help="milliseconds of a training step, in which the caller sleeps (default: 0, no step)",
    )
    add("--json", type=_writable, metavar="PATH", help="writes the results as JSON")
    found = vars(parser.parse_args(given))
    measured = configurations(found.pop("workers"), found.pop("method"), found.pop("concurrency"))
    return Arguments(configurations=tuple(measured), **found)


def _target(text: str) -> Target:
    """Reads ``FILE.py:NAME`` or ``module:NAME``, and looks for the file."""
    place, colon, name = text.rpartition(":")
    if not (colon and place and name):
        raise ArgumentTypeError(f"{text!r} is not FILE.py:NAME or module:NAME, with the name of a function")
    target = Target(place, name)
    if target.is_file and not Path(place).is_file():
        raise ArgumentTypeError(f"can't open file {place!r}: no such file")
    return target


def _up_to(most: int) -> list[int]:
    found = list(range(min(most, _EACH) + 1))
    while found[-1] < most:
        found.append(min(2 * found[-1], most))
    return found


def _workers(text: str) -> list[int | Literal["auto"]]:
    words = [word.strip() for word in text.split(",")]
    numbers = [word for word in words if word != AUTO]
    if not all(word.isdecimal() for word in numbers):
        raise ArgumentTypeError(f"{text!r} is not a list of numbers from 0 on, as 0,1,2,4")
    if not numbers:
        raise ArgumentTypeError(f"{text!r} has no number that {AUTO} can be compared with, as 1,2,{AUTO}")
    if max(map(int, numbers)) > _MOST_WORKERS:
        raise ArgumentTypeError(f"{text!r} has a number above {_MOST_WORKERS:,}")
    found: list[int | Literal["auto"]] = list(dict.fromkeys(map(int, numbers)))
    return [*found, AUTO] if AUTO in words else found


def _methods(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not all(word in METHODS for word in words):
        raise ArgumentTypeError(f"{text!r} is not process, thread, or process,thread")
    return list(dict.fromkeys(METHODS[word] for word in words))


def _at_once(text: str) -> list[int | None]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and 0 < int(word) <= _MOST_AT_ONCE for word in words):
        raise ArgumentTypeError(f"{text!r} is not a list of numbers from 1 to {_MOST_AT_ONCE:,}, as 1,16,64")
    return list(dict.fromkeys(map(int, words)))


def _rounds(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _seconds(text: str) -> float:
    found = _number(text)
    if not 0 < found < math.inf:
        raise ArgumentTypeError(f"{text!r} is not a number above 0")
    return found


def _milliseconds(text: str) -> float:
    found = _number(text)
    if not 0 <= found < math.inf:
        raise ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return found / 1e3


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _writable(text: str) -> str:
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ArgumentTypeError(f"cannot write a file {text!r}")
    return text
