"""The package's logger: prefixes lines with ``ringloader:``; ``mib`` formats sizes."""

from __future__ import annotations

import logging

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
