"""Text for the standard output, and the standard error, of a command."""

from __future__ import annotations

import sys


# Python has None for a descriptor that was closed when the process started.
def say(text: str) -> None:
    """Writes to the standard output, which a process may lack."""
    if sys.stdout is not None:
        sys.stdout.write(text)


def complain(text: str) -> None:
    """Writes to the standard error, which a process may lack."""
    if sys.stderr is not None:
        sys.stderr.write(text)
