"""Supervisors of an iterator's workers: they replace lost workers, and report late ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

# A worker, its task, and that task's index; None where it is not known.
Late = tuple[int, int, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class LostWorker:
    """A worker that has ended and should not have. Its results were taken.

    Attributes:
        worker: Its number.
        handle: Its handle.
        in_hand: What it was in; None if that is not known.
        restart: Starts a successor, and returns its handle.
        is_iterable: True for a dataset whose workers cannot continue where they were.
        state_is_known: True if a successor can have the state of its dataset.
        notes: Why it got no successor, for the error.
    """

    worker: int
    handle: Any
    in_hand: Late | None
    restart: Callable[[], Any]
    is_iterable: bool
    state_is_known: bool
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def refusal(self) -> str | None:
        """Why it may have no successor, however it was lost; None if it may."""
        if self.is_iterable:
            return "a worker of an IterableDataset is not restarted, which would begin its part again"
        if not self.state_is_known:
            return (
                "the dataset's state after the worker's last batch is not known: that batch was not handed "
                "out yet, or has no state (snapshot_every_n_steps)"
            )
        return None


class Supervisor:
    """Supervises the workers of one iterator.

    INVARIANT: it has no reference to the iterator, whose workers end when its last user drops it.
    """

    def schedule(self, scheduler: Any) -> None:
        """Sets up the scheduler, before its first task."""

    def begin_epoch(self) -> None:
        """Begins another epoch of the same workers."""

    def lost(self, lost: LostWorker) -> Any:  # noqa: ARG002
        """Starts a successor of a lost worker, and returns its handle; None if there may be none."""
        return None

    def waits(self, seconds: float, workers: Sequence[Any], owing: Sequence[Late]) -> None:
        """Notes that no batch has come for some seconds. ``owing``: the tasks that workers owe."""

    def late(self, error: BaseException, workers: Sequence[Any], late: Sequence[Late]) -> None:
        """Adds notes to the error of a timeout. ``late``: the tasks that are waited for."""

    def close(self) -> None:
        """Gives back memory and descriptors, once the workers have ended."""
