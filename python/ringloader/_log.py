"""The package's logger, which prefixes lines with ``ringloader:``, and text for people elsewhere."""

from __future__ import annotations

import logging
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

_PREFIX = "ringloader: "


class _Speaker(logging.Filter):
    """Puts the package's name before each line, which Python prints without it if no logging is set up."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith(_PREFIX):
            record.msg = f"{_PREFIX}{record.msg}"
        return True


logger = logging.getLogger("ringloader")
logger.addFilter(_Speaker())


def mib(nbytes: int) -> str:
    """Returns a size for people."""
    size = nbytes / (1 << 20)
    return f"{size:.0f} MiB" if size >= 100 else f"{size:.3g} MiB"


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
