"""The report at exit: a line for each loader, on standard error. Imports no torch."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import sys
from multiprocessing import util

from ringloader._common import output
from ringloader._report import asked, rank
from ringloader._torch import hook

_HINT = "; a framework that makes its own loaders needs ringloader.install(), or python -m ringloader run"
# The process that says so if it has iterated no loader.
_expecting: int | None = None


class _Forks:
    """Stands for this module where multiprocessing keeps what it calls in children."""


_forks = _Forks()


def register() -> None:
    """Prints the report when this process ends: by itself, by an exception or by ``sys.exit``."""
    atexit.register(_print)
    # Children that multiprocessing forks run its finalizers only.
    util.register_after_fork(_forks, _register_in_child)


def _register_in_child(_: _Forks) -> None:
    util.Finalize(None, _print, exitpriority=0)


def expect_loaders() -> None:
    """Makes this process say that it has iterated no loader, unless it is a child of the program."""
    global _expecting
    # The servers of start methods are no children of multiprocessing's own kind.
    is_server = any("from multiprocessing." in word for word in sys.orig_argv)
    if multiprocessing.parent_process() is None and not is_server:
        _expecting = os.getpid()


def _print() -> None:
    # Nothing here may change how the program ends: the file may be closed, the disk full.
    with contextlib.suppress(Exception):
        is_for_all = asked.mode() == asked.ALL
        number = rank.rank()
        if is_for_all or not number:
            who = f"ringloader [rank {number}]" if is_for_all and number is not None else "ringloader"
            output.complain("".join(f"{who}: {line}\n" for line in _lines()))


def _lines() -> list[str]:
    found: list[str] = []
    # Without this module no loader was iterated, and torch may not even be there.
    if "ringloader._report.report" in sys.modules:
        from ringloader._report import reports, tally

        tallies = [one for one in tally.all_tallies() if not one.is_workers]
        found = reports.lines((reports.report_of(one), one.recording) for one in tallies)
        if tally.dropped():
            found.append(f"{tally.dropped():,} more loaders, which are gone, are not listed")
    if not found and _expecting == os.getpid():
        is_reached = hook.current() is not None or "torch" not in sys.modules
        found = ["no loader of ringloader's was iterated in this process" + ("" if is_reached else _HINT)]
    return found
