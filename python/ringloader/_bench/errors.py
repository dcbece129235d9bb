"""Errors of the user's code, in words for the user. Imports no torch."""

from __future__ import annotations

import traceback


class BenchError(Exception):
    """An error that is for the user.

    Args:
        text: It, in a line.
        users: More of it: the traceback of the user's code, or what a process has printed.
    """

    def __init__(self, text: str, users: str = "") -> None:
        super().__init__(text, users)
        self.text = text
        self.users = users


class TargetError(BenchError):
    """The target gives no loader."""


class RunError(BenchError):
    """A run of one configuration failed."""


def line_of(error: BaseException) -> str:
    """Returns an error as one line. One of a worker is told by the last line of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and "Traceback" in str(error):
        return lines[-1]
    return ": ".join([type(error).__name__, *lines[:1]])


def users_traceback(error: BaseException) -> str:
    """Returns a traceback from the first frame of the user's on.

    An error without such a frame is a worker's, whose text has a traceback, or is all in :func:`line_of`.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(_NOT_THEIRS):
        frames = frames.tb_next
    if frames is not None:
        return "".join(traceback.format_exception(type(error), error, frames))
    return f"{error}\n" if len(str(error).splitlines()) > 1 else ""


# Modules between the command and the user's code.
_NOT_THEIRS = ("ringloader.", "torch.", "importlib", "_frozen_importlib")
