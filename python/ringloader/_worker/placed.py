"""An index on its way to a worker that seeds its generators by the places of samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Placed(NamedTuple):
    """An index, and where its samples stand in the epoch. Made by the main process, natively for workers.

    Attributes:
        index: The index of the task.
        key: The key of the epoch.
        first: The place of the first sample; of the next one, if the index asks for none.
        places: The places of all samples, in the order of the index.
    """

    index: Any
    key: int
    first: int
    places: Sequence[int]
