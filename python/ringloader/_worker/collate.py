"""torch's own collation, native while no part of it was replaced.

In a worker process it is native for any caller, and into slots. A worker that is a thread, and a loader
without workers, change their own fetcher only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch.utils.data import get_worker_info

import ringloader._native as _native
from ringloader._torch import collating, internals, modes, stand_ins


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


def put_native(fetcher: Any) -> None:
    """Puts native collation into a fetcher of torch's that would call torch's own ``default_collate``.

    Nothing else in the process is changed: ``default_collate`` itself is torch's for every caller.

    Args:
        fetcher: A fetcher of this thread, which is a worker or the caller of a loader without workers.
    """
    torchs_own: Any = getattr(fetcher, "collate_fn", None)
    if _native.SUPPORTED and collating.is_default_collate(torchs_own) and collating.collates_as_torch():
        fetcher.collate_fn = Collation(torchs_own)


def put_native_again(fetcher: Any) -> None:
    """Puts native collation into the fetcher of a loader without workers, the same as before if it still may.

    Not in a worker of torch's, which sends the batch, and has its memory for it.

    The native part of a collation finds out by itself if a part of torch was replaced, and leaves each batch
    to torch then.
    """
    global _kept
    if get_worker_info() is not None:
        return
    collation = _kept
    if (
        collation is None
        or fetcher.collate_fn is not collation.torchs_own
        or len(collating.collate_fn_map) != collation.known
    ):
        put_native(fetcher)
        if type(fetcher.collate_fn) is Collation:
            _kept = fetcher.collate_fn
    else:
        fetcher.collate_fn = collation


_kept: Collation | None = None


class Collation:
    """Stands in for ``default_collate``. The native part calls no code of the user's."""

    def __init__(self, torchs_own: Any) -> None:
        self.torchs_own = torchs_own
        # Others may teach torch more classes.
        self.known = len(collating.collate_fn_map)
        parts = collating.parts_of_default_collate()
        self._native = _native.Collate(
            None,
            collating.collate_of_columns(),
            parts,
            modes.MODES,
            collating.collate_fn_map,
            collating.others_in_collate(),
            internals.is_in_worker(),
        ).collated
        # Collates the rows of arrays; None where others taught torch what to make of them.
        self.gather = (
            None
            if collating.others_collate_rows()
            else _native.Gather(None, parts, modes.MODES, collating.collate_fn_map)
        )

    def __call__(self, batch: Any) -> Any:
        made = self._native(batch)
        return self.torchs_own(batch) if made is None else made
