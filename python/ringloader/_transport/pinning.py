"""``pin_memory=True``: batches in torch's pinned memory."""

from __future__ import annotations

from typing import Any

import torch

import ringloader._native as _native
from ringloader._torch import internals
from ringloader._transport.lookahead import Prepared, Ready


class Pinning:
    """Does what torch's pinning thread does, with the same results and errors, when batches are taken.

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
        """Does nothing: nobody else knows of the batch."""

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
