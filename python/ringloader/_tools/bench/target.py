"""``FILE.py:NAME``: a function of the user's that makes a loader, and errors of it. Imports no torch."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

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
            raise TargetError(f"{self} is no function that returns a loader, but of {type(make)}")
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
