"""torch's own ``default_collate`` of one fetcher: native while no part of it was replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ringloader._native as _native
from ringloader._torch import collating, internals, modes


def put_native(fetcher: Any) -> None:
    """Has a fetcher of torch's collate natively, where it would call torch's own ``default_collate``.

    Nothing else in the process is changed: ``default_collate`` itself is torch's for every caller.

    Args:
        fetcher: A fetcher of this thread, which is a worker or the caller of a loader without workers.
    """
    torchs_own: Any = getattr(fetcher, "collate_fn", None)
    if _native.SUPPORTED and collating.is_default_collate(torchs_own) and collating.collates_as_torch():
        fetcher.collate_fn = Collation(torchs_own)


class Collation:
    """Stands in for ``default_collate``. The native part calls no code of the user's."""

    def __init__(self, torchs_own: Callable[[Any], Any]) -> None:
        self._torchs_own = torchs_own
        self._native = _native.Collate(
            None,
            collating.collate_of_columns(),
            collating.parts_of_default_collate(),
            modes.MODES,
            collating.collate_fn_map,
            collating.others_in_collate(),
            internals.is_in_worker(),
        ).collated

    def __call__(self, batch: Any) -> Any:
        made = self._native(batch)
        return self._torchs_own(batch) if made is None else made
