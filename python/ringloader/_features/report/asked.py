"""``RINGLOADER_REPORT``, and what its report at exit needs while the program runs. Imports no torch."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from types import FrameType

from ringloader._common import proc
from ringloader._log import complain

VARIABLE = "RINGLOADER_REPORT"
ONE = "1"
ALL = "all"

# ``"1"`` if a report is asked for, ``"all"`` if all ranks are to print one; empty before `read`, too.
mode = ""
# True once the variable was read, which happens once in a process.
is_read = False
# The rank that torch.distributed has named last: its group may be gone at exit.
_rank: int | None = None


def read() -> None:
    """Reads the variable. A wrong value asks for nothing, and is one line on standard error."""
    global mode, is_read
    value = os.environ.get(VARIABLE, "")
    mode, is_read = value if value in (ONE, ALL) else "", True
    if not mode and value not in ("", "0"):
        complain(f"ringloader: {VARIABLE}={value!r} has no effect: set it to 1, all or 0\n")


def note_rank() -> None:
    """Notes the rank of this process in torch's group of processes, while there is one."""
    global _rank
    with contextlib.suppress(Exception):
        found = proc.in_group()
        _rank = _rank if found is None else found[0]


def rank() -> int | None:
    """Returns the rank of this process, or None where it has none."""
    note_rank()
    text = os.environ.get("RANK", "")
    return int(text) if text.isascii() and text.isdigit() else _rank


def line_of_program() -> str | None:
    """Returns file and line of the innermost caller that is the program's, and not a library's."""
    libraries = _libraries()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        is_packaged = "/site-packages/" in file or "/dist-packages/" in file
        if not (is_packaged or file.startswith(libraries)):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return None


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Returns how the names of files begin that are not the program's: Python's, torch's and ours."""
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    folders = [ours, os.path.dirname(os.__file__)]  # noqa: PTH120
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    if torch is not None:
        folders.append(os.path.dirname(torch))  # noqa: PTH120
    return ("<frozen ", *(os.path.join(folder, "") for folder in folders))  # noqa: PTH118
