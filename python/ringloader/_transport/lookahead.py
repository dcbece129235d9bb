"""Batches that are prepared before their turn: taken from their rings as soon as they arrive.

The native scheduler takes them, keeps them and hands them out, so that an interrupt finds no step half done.
"""

from __future__ import annotations

from typing import Any, Protocol

import ringloader._native as _native
from ringloader._torch import modes


class Prepared(Protocol):
    """A batch on its way to where it is needed."""

    def result(self) -> Any:
        """Returns the batch, once it has arrived. The caller gets what it raises, and may then ask again."""


class Ready:
    """A batch that has arrived, or the error that stands for it."""

    __slots__ = ("_data",)

    def __init__(self, data: Any) -> None:
        self._data = data

    def result(self) -> Any:
        return self._data


class Placement(Protocol):
    """A place where an iterator's batches are needed: pinned memory, or a device."""

    # Batches that are prepared before their turn, at most.
    depth: int

    def prepare(self, arrival: _native.Arrival, /) -> Prepared:
        """Begins to bring a batch there, and does not wait for it.

        Raises:
            BaseException: What interrupts the program. Then it is called again with the same batch, in its
                turn, even if it had begun.
        """

    def stop(self) -> None:
        """Ends waits in results of what was prepared, in other threads: they may raise anything."""

    def abandon(self) -> None:
        """Gives up what was prepared and not handed out."""

    def close(self) -> None:
        """Ends it, in the process that made it. :meth:`abandon` comes before.

        An interrupted call is made once more. So is one that came while a batch was prepared or its result
        awaited, once that is over.
        """


def prepare(placement: Placement, arrival: _native.Arrival) -> Prepared:
    """Prepares a batch, in none of the modes of the caller's thread: they are not for what comes later."""
    if modes.is_in_modes():
        with modes.without_modes():
            return placement.prepare(arrival)
    return placement.prepare(arrival)
