"""The report at exit: a line for each loader, on standard error. Imports no torch."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import sys
from multiprocessing import util

from ringloader._features.report import asked
from ringloader._log import complain
from ringloader._torch import hook

_HINT = "; a framework that makes its own loaders needs ringloader.install(), or python -m ringloader run"

# The process that says so if it has iterated no loader.
_expecting: int | None = None


def begin() -> bool:
    """Returns True if a report is asked for, and registers it at the first call."""
    if not asked.is_read:
        asked.read()
        if asked.mode:
            _register()
    return bool(asked.mode)


class _Forks:
    """Stands for this module where multiprocessing keeps what it calls in children."""


_forks = _Forks()


def _register() -> None:
    """Prints the report when this process ends: by itself, by an exception or by ``sys.exit``."""
    atexit.register(_print)
    # Children that multiprocessing forks run its finalizers only.
    util.register_after_fork(_forks, _register_in_child)


def _register_in_child(_: _Forks) -> None:
    util.Finalize(None, _print, exitpriority=0)


def expect_loaders() -> None:
    """Makes a report say, too, that this process has iterated no loader, unless it is a program's child."""
    global _expecting
    # The servers of start methods are no children of multiprocessing's own kind.
    is_server = any("from multiprocessing." in word for word in sys.orig_argv)
    if begin() and multiprocessing.parent_process() is None and not is_server:
        _expecting = os.getpid()


def _print() -> None:
    # Nothing here may change how the program ends: the file may be closed, the disk full.
    with contextlib.suppress(Exception):
        rank, is_for_all = asked.rank(), asked.mode == asked.ALL
        if is_for_all or not rank:
            who = f"ringloader [rank {rank}]" if is_for_all and rank is not None else "ringloader"
            complain("".join(f"{who}: {line}\n" for line in _lines()))


def _lines() -> list[str]:
    found: list[str] = []
    # INVARIANT: nothing that runs a text of code, as the import of a dataclass does, is imported here. Python
    # would forget that an interrupt has ended the program, and the program would not die by that signal.
    # Without this module no loader was iterated, and torch may not even be there.
    report = sys.modules.get("ringloader._features.report.report")
    if report is not None:
        found = report.lines_at_exit()
    if not found and _expecting == os.getpid():
        is_reached = hook.current() is not None or "torch" not in sys.modules
        found = ["no loader of ringloader's was iterated in this process" + ("" if is_reached else _HINT)]
    return found
