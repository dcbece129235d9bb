"""Errors that are kept beyond their handling: without frames, and with notes of ringloader's."""

from __future__ import annotations


class _Note(str):
    """A note of ringloader's at an error that is the program's."""

    __slots__ = ()


def add_notes(error: BaseException, *texts: str) -> None:
    """Puts these at an error that is raised, in place of those of the last time."""
    _drop_notes(error)
    for text in texts:
        error.add_note(_Note(text))


def _drop_notes(error: BaseException) -> None:
    if hasattr(error, "__notes__"):
        error.__notes__ = [note for note in error.__notes__ if type(note) is not _Note]


def cut(error: BaseException, outer: BaseException | None) -> None:
    """Takes an error out of the handling of ``outer``, which stays the program's, with its traceback.

    It loses what was noted at it before, where a dataset raises the same error again.
    """
    _drop_notes(error)
    for one in linked(error, outer):
        if one.__context__ is outer:
            one.__context__ = None


def drop_frames(error: BaseException) -> None:
    """Drops the tracebacks of an error that is kept, whose frames would keep samples and batches."""
    for one in linked(error):
        one.__traceback__ = None


def linked(error: BaseException, outer: BaseException | None = None) -> list[BaseException]:
    """Returns an error with its causes, contexts and parts, but for ``outer`` and what only that leads to."""
    found: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None and one is not outer and not any(one is other for other in found):
            found.append(one)
            left += [one.__cause__, one.__context__]
            if isinstance(one, BaseExceptionGroup):
                left += one.exceptions
    return found
