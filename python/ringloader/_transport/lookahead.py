"""Batches that are prepared before their turn: taken from their rings as soon as they arrive.

The native scheduler takes them, keeps them and hands them out, so that an interrupt finds no step half done.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

import ringloader._native as _native
from ringloader._torch import internals, modes


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


class Pinning:
    """Does for ``pin_memory=True`` what torch's pinning thread does, when batches are taken.

    Results and errors are the same.

    Args:
        device: The type of the device that torch pins for.
        index: The current device's index, which torch's errors name.
    """

    # Each of them has pinned memory; torch's thread pins all that its workers send ahead.
    depth = 2

    def __init__(self, device: str | None, index: int) -> None:
        self._device = device
        self._index = index
        self._pinner = _native.Pinner() if internals.pins_each_tensor_alike() else None

    def prepare(self, arrival: _native.Arrival) -> Prepared:
        """Begins to pin a batch."""
        if torch.is_inference_mode_enabled():
            # The mode is the caller's. torch's pinning thread is in no mode.
            with torch.inference_mode(False):
                return self._prepare(arrival)
        return self._prepare(arrival)

    def _prepare(self, arrival: _native.Arrival) -> Prepared:
        try:
            pinned = None if self._pinner is None else self._pinner.pin(arrival)
            return pinned or Ready(self._pinned(arrival.unpack()))
        except Exception:
            return Ready(self._failed())

    def stop(self) -> None:
        """Does nothing: no result waits for long."""

    def abandon(self) -> None:
        """Does nothing: no other code knows of the batch."""

    def close(self) -> None:
        """Ends the copying thread."""
        self._pinner = None

    def _pinned(self, batch: Any) -> Any:
        if isinstance(batch, internals.ExceptionWrapper):
            return batch
        with torch.enable_grad():
            return internals.pin_memory(batch, self._device)

    def _failed(self) -> Any:
        return internals.ExceptionWrapper(where=f"in pin memory thread for device {self._index}")
