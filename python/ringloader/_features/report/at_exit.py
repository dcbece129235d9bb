"""``RINGLOADER_REPORT``, and the report at exit: a line for each loader. Imports no torch."""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing import util
from types import FrameType

from ringloader._common import proc
from ringloader._log import complain
from ringloader._torch import hook

VARIABLE = "RINGLOADER_REPORT"
ONE, ALL = "1", "all"

# ``"1"`` if a report is asked for, ``"all"`` if all ranks are to print one, else empty. None before `begin`,
# which reads the variable once in a process.
mode: str | None = None
# The rank that torch.distributed has named last: its group may be gone at exit.
_rank: int | None = None
# The process that says so if it has iterated no loader.
_expecting: int | None = None
# Returns a line for each loader; None: the module that has it was not imported, so there are none.
lines: Callable[[], list[str]] | None = None

_HINT = "; a framework that makes its own loaders needs ringloader.install(), or python -m ringloader run"


def begin() -> bool:
    """Returns True if a report is asked for, and registers it at the first call.

    A wrong value asks for nothing, and is one line on standard error.
    """
    global mode
    if mode is None:
        value = os.environ.get(VARIABLE, "")
        mode = value if value in (ONE, ALL) else ""
        if mode:
            # This process may end by itself, by an exception or by `sys.exit`. Children that multiprocessing
            # forks run its finalizers only.
            atexit.register(_print)
            util.register_after_fork(_print, lambda _: util.Finalize(None, _print, exitpriority=0))
        elif value not in ("", "0"):
            complain(f"ringloader: {VARIABLE}={value!r} has no effect: set it to 1, all or 0\n")
    return bool(mode)


def note_rank() -> None:
    """Notes the rank of this process in torch's group of processes, while there is one."""
    global _rank
    with contextlib.suppress(Exception):
        found = proc.in_group()
        _rank = _rank if found is None else found[0]


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
        note_rank()
        text = os.environ.get("RANK", "")
        rank = int(text) if text.isdecimal() else _rank
        if mode == ALL or not rank:
            who = f"ringloader [rank {rank}]" if mode == ALL and rank is not None else "ringloader"
            complain("".join(f"{who}: {line}\n" for line in _lines()))


def _lines() -> list[str]:
    # INVARIANT: nothing that runs a text of code, as the import of a dataclass does, is imported here. Python
    # would forget that an interrupt has ended the program, and the program would not die by that signal.
    found = [] if lines is None else lines()
    if not found and _expecting == os.getpid():
        is_reached = hook.current() is not None or "torch" not in sys.modules
        found = ["no loader of ringloader's was iterated in this process" + ("" if is_reached else _HINT)]
    return found


def line_of_program() -> str | None:
    """Returns file and line of the innermost caller that is the program's, and not a library's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        is_packaged = "/site-packages/" in file or "/dist-packages/" in file
        if not (is_packaged or file.startswith(_libraries())):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return None


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Returns how the names of files begin that are not the program's: Python's, torch's and ours."""
    modules = [os, sys.modules["ringloader"], sys.modules.get("torch")]
    files = [getattr(module, "__file__", None) for module in modules]
    return ("<frozen ", *(os.path.join(os.path.dirname(file), "") for file in files if file))  # noqa: PTH118, PTH120
