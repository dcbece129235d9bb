"""Text for the standard output, and the standard error, of a command."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO


# Python has None for a descriptor that was closed when the process started.
def write(text: str) -> None:
    """Writes to the standard output, which a process may lack."""
    _write(sys.stdout, text)


def complain(text: str) -> None:
    """Writes to the standard error, which a process may lack."""
    _write(sys.stderr, text)


def _write(file: TextIO | None, text: str) -> None:
    if file is None:
        return
    # Texts of the user's, such as errors and names of files, may have what the terminal's encoding lacks.
    encoding = getattr(file, "encoding", None) or "utf-8"
    file.write(text.encode(encoding, "backslashreplace").decode(encoding))
