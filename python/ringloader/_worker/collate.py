"""torch's own collation in a worker: native while no part of it was replaced, and into slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch

import ringloader._native as _native
from ringloader._torch import collating, modes, stand_ins


def replace_collate(port: _native.Port) -> None:
    """Lets torch's ``default_collate`` work natively, for any caller, and write into the slot."""
    if collating.collates_as_torch():

        def make(torchs_own: Any) -> _native.Collate:
            return _native.Collate(
                port,
                torchs_own,
                collating.parts_of_collate(),
                modes.MODES,
                collating.collate_fn_map,
                collating.others_in_collate(),
            )

        collating.replace_collate(make)


def native(argument: Any) -> Any:
    """A native callable for torch's own ``default_convert``; anything else as it is."""
    parts = collating.parts_of_convert(argument)
    return _native.Convert(argument, parts) if parts else argument


def allocate_in_slots(port: _native.Port) -> None:
    """Lets code that allocates shared memory for a batch write into the slot: torch's collate, and PyG's."""

    def make(torchs_own: Callable[..., Any]) -> Callable[..., Any]:
        def _new_shared(cls: Any, size: int, *, device: Any = "cpu") -> Any:
            if torch.device(device).type == "cpu":
                storage = port.new_storage(size)
                return _private_storage(size) if storage is None else storage
            return torchs_own(cls, size, device=device)

        return _new_shared

    stand_ins.replace_new_shared(make)


def _private_storage(size: int) -> Any:
    """Memory of the worker's own, copied when it is sent; as little resizable as shared memory is."""
    return torch.from_numpy(numpy.empty(size, numpy.uint8)).untyped_storage()
