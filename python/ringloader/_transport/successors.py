"""Successors of lost workers: what every transport's are alike in."""

from __future__ import annotations

import abc
from typing import Any, Protocol

from ringloader._late import overdue
from ringloader._worker.options import EpochStart


class Restarts(Protocol):
    """Restarts workers: the transport of an iterator."""

    def restart(self, worker: int, start: EpochStart) -> Any:
        """Starts a successor of a lost worker, and returns its handle."""


class Successions(abc.ABC):
    """Starts successors of the lost workers of one iterator.

    Args:
        is_iterable: True for a dataset whose workers cannot go on where they were.
        transport: The iterator's.
    """

    def __init__(self, is_iterable: bool, transport: Restarts) -> None:
        self._is_iterable = is_iterable
        self._restarts = transport
        # Workers the state of whose dataset is not known as of their last answer.
        self._unknown: set[int] = set()

    def record_state(self, worker: int, is_known: bool) -> None:
        """Notes if a successor of a worker can have the state of its dataset."""
        if is_known:
            self._unknown.discard(worker)
        else:
            self._unknown.add(worker)

    def successor(self, lost: Any, worker: int, start: EpochStart, in_hand: overdue.Late | None) -> Any:
        """Starts a successor of a worker and returns its handle; None if there may be none.

        Args:
            lost: The handle of the worker that was lost.
            worker: The worker's number.
            start: The beginning of the successor's part of the epoch.
            in_hand: What it was in.
        """
        return self._restarts.restart(worker, start) if self._may_follow(lost, worker, in_hand) else None

    @abc.abstractmethod
    def _may_follow(self, lost: Any, worker: int, in_hand: overdue.Late | None) -> bool:
        """Returns whether a lost worker gets a successor, which this logs."""

    def _refusal(self, worker: int) -> str | None:
        """Returns why a worker may have no successor, however it was lost; None if it may."""
        if self._is_iterable:
            return "a worker of an IterableDataset is not restarted, which would begin its part again"
        if worker in self._unknown:
            return (
                "the dataset's state after the worker's last batch is not known: that batch was not handed "
                "out yet, or has no state (snapshot_every_n_steps)"
            )
        return None
