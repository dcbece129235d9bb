"""The places of samples in their epoch, where no native code counts them: for a loader without workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

_MASK = (1 << 64) - 1


class Placed(NamedTuple):
    """An index, and where its samples stand in the epoch. Has the attributes of ``_native.Placed``."""

    # In the place of a method of tuples, which is not called here.
    index: Any
    key: int
    first: int
    places: Sequence[int]


class Places:
    """Gives each index the places of its samples. MIRRORS core::plan::places of an epoch from its beginning.

    Args:
        key: The key of the epoch.
        first: The place of the sampler's first sample.
        step: The distance to the place of the next one.
        batches: True if an index is a batch's.
        whole: True if batch ``k`` has the places from ``k * 2**32`` on.
    """

    def __init__(self, key: int, first: int, step: int, batches: bool, whole: bool) -> None:
        self._key = key
        self._next = first
        self._step = step
        self._batches = batches
        self._whole = whole

    def placed(self, index: Any) -> Placed:
        """Returns an index that was read from the sampler, with the places of its samples."""
        index, count = self._counted(index)
        place = self._next
        self._next = (place + (1 if self._whole else count) * self._step) & _MASK
        if self._whole:
            place = place << 32 & _MASK
        places = range(place, place + count * self._step, self._step)
        return Placed(index, self._key, place, places)

    def _counted(self, index: Any) -> tuple[Any, int]:
        """Returns an index and the number of its samples. One without a length becomes a list."""
        if not self._batches:
            return index, 1
        try:
            return index, len(index)
        except Exception:
            pass
        try:
            index = list(index)
        except Exception:
            # The fetcher refuses it, as torch's does.
            return index, 1
        return index, len(index)
