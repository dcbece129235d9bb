"""An epoch of an iterator, as it was decided before its first index is read."""

from __future__ import annotations

from typing import NamedTuple

from ringloader._common import states


class EpochPlan(NamedTuple):
    """All that tells one epoch from another. Iterators, workers, seeds and states only read it.

    Attributes:
        number: The number of the epoch, as ``Seeds`` count; None if no option counts epochs.
        key_number: The number from which ``seeding`` makes keys: the sampler's epoch, or ``number``.
        told: The epoch that ``set_epoch`` of the loader has named for it; None: it was not called.
        last_told: That epoch, or the last one before it; None: it was never called. A worker that begins
            anew in mid-epoch is told it.
        tracked: The epoch as a state knows it; None for a loader without states.
        of_tasks: The epoch in the numbers of its tasks; None for the first one, and until workers are told.
    """

    number: int | None = None
    key_number: int | None = None
    told: int | None = None
    last_told: int | None = None
    tracked: states.Epoch | None = None
    of_tasks: int | None = None
