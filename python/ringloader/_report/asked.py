"""``RINGLOADER_REPORT``: asks for a report at exit. Imports no torch."""

from __future__ import annotations

import os

from ringloader._common import output

VARIABLE = "RINGLOADER_REPORT"
ONE = "1"
ALL = "all"

# The value of the variable, once the process has read it; empty: nobody asks.
_mode: str | None = None


def mode() -> str:
    """Returns ``"1"`` if a report is asked for, ``"all"`` if all ranks are to print one, else ``""``."""
    return _mode or ""


def is_read() -> bool:
    """True once the variable was read, which happens once in a process."""
    return _mode is not None


def read() -> None:
    """Reads the variable. A wrong value asks for nothing, and is one line on standard error."""
    global _mode
    value = os.environ.get(VARIABLE, "")
    _mode = value if value in (ONE, ALL) else ""
    if not _mode and value not in ("", "0"):
        output.complain(f"ringloader: {VARIABLE}={value!r} has no effect: set it to 1, all or 0\n")
