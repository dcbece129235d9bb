"""Batches that a worker reads again, between its state and where its epoch goes on."""

from __future__ import annotations

from typing import Any

from ringloader._state.objects import Objects
from ringloader._state.parts import Part
from ringloader._worker.options import Failing


class Reading:
    """The batches that are read again, between the state of a worker and where its epoch goes on.

    Args:
        objects: The fetcher, and what it reads.
        part: The position.
        index: The index of a batch.
        worker: The worker.
    """

    def __init__(self, objects: Objects, part: Part, index: Any, worker: int) -> None:
        self._objects = objects
        self._index = index
        self._worker = worker
        was_ended = part.snapshot is not None and part.snapshot.is_ended
        # Batches in the epoch of the state, epochs that are read to their end, and batches in this epoch.
        self._first = part.since if part.ends == 0 or (part.ends > 0 and not was_ended) else 0
        self._epochs = max(0, part.ends - was_ended)
        self._last = part.batches if part.ends else 0
        if part.ends > 0 and was_ended:
            objects.fetcher = _Again(objects)

    def is_needed(self) -> bool:
        """True if there are any."""
        return bool(self._first or self._epochs or self._last)

    def read(self) -> None:
        """Reads them, and drops them.

        Raises:
            ValueError: If there are fewer.
        """
        self._pass_over(self._first)
        for _ in range(self._epochs):
            while self._objects.dropped(self._index):
                pass
            self._objects.begin_anew()
        self._pass_over(self._last)

    def _pass_over(self, batches: int) -> None:
        for number in range(batches):
            if not self._objects.dropped(self._index):
                raise ValueError(
                    f"load_state_dict(): the dataset of worker {self._worker} has ended after {number} of "
                    f"the {batches} batches that are read again: it is another one than that of the state"
                )


class Later:
    """Reads batches again when the first task has come.

    Args:
        objects: The fetcher, and what it reads.
        reading: The batches.
    """

    def __init__(self, objects: Objects, reading: Reading) -> None:
        self._objects = objects
        self._reading: Reading | None = reading
        self._fetcher = objects.fetcher

    def fetch(self, index: Any, /) -> Any:
        reading, self._reading = self._reading, None
        if reading is not None:
            try:
                reading.read()
            except Exception as error:
                self._fetcher = Failing(error, once=True)
            self._objects.begin_batch()
        return self._fetcher.fetch(index)


class _Again:
    """The fetcher of an epoch whose dataset was given its state at the end of the epoch before.

    Some datasets then have nothing to give once, and after that all. Others are ready for the next epoch.

    Args:
        objects: The fetcher, and what it reads.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._fetcher = objects.fetcher
        self._is_first = True

    def fetch(self, index: Any, /) -> Any:
        is_first, self._is_first = self._is_first, False
        try:
            return self._fetcher.fetch(index)
        except StopIteration:
            if not is_first:
                raise
        self._objects.begin_anew()
        self._objects.begin_batch()
        return self._fetcher.fetch(index)
