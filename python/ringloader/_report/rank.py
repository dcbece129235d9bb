"""The rank of this process. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import sys

# The rank that torch.distributed has named last: its group may be gone at exit.
_noted: int | None = None


def note() -> None:
    """Notes the rank of this process in torch's group of processes, while there is one."""
    global _noted
    found = sys.modules.get("torch.distributed")
    with contextlib.suppress(Exception):
        if found is not None and found.is_available() and found.is_initialized():
            _noted = found.get_rank()


def rank() -> int | None:
    """Returns the rank of this process, or None where it has none."""
    note()
    text = os.environ.get("RANK", "")
    return int(text) if text.isascii() and text.isdigit() else _noted
