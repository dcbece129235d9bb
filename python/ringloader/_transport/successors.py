"""Successors of lost workers: what every transport's are alike in."""

from __future__ import annotations

import abc
from typing import Any, Protocol

from ringloader._late import overdue
from ringloader._worker.options import EpochStart


class Restarts(Protocol):
    """Restarts workers: the transport of an iterator."""

    def process_of(self, worker: int) -> Any:
        """Returns the handle that was started last as a worker; None before."""

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
        # Workers whose successor's start has failed or was interrupted: its process may run all the same.
        self._not_again: set[int] = set()
        # Workers the state of whose dataset is not known as of their last answer.
        self._unknown: set[int] = set()

    def record_state(self, worker: int, is_known: bool) -> None:
        """Notes if a successor of a worker can have the state of its dataset."""
        if is_known:
            self._unknown.discard(worker)
        else:
            self._unknown.add(worker)

    def successor(self, lost: Any, worker: int, start: EpochStart, in_hand: overdue.Late | None) -> Any:
        """Returns the handle of a worker's successor, which runs; None if there may be none.

        Args:
            lost: The handle of the worker that was lost.
            worker: The worker's number.
            start: The beginning of the successor's part of the epoch.
            in_hand: What it was in.
        """
        if worker in self._not_again:
            return None
        running = self._restarts.process_of(worker)
        if running is not lost:
            # A signal handler raised between its start and its caller's note of it.
            return running
        if not self._may_follow(lost, worker, in_hand):
            return None
        try:
            return self._restarts.restart(worker, start)
        except BaseException:
            # INVARIANT: no two processes are at the rings of one worker. This one may run unknown.
            self._not_again.add(worker)
            raise

    @abc.abstractmethod
    def _may_follow(self, lost: Any, worker: int, in_hand: overdue.Late | None) -> bool:
        """Returns whether a lost worker gets a successor, which this logs."""

    def list_all(self, workers: list[Any]) -> None:
        """Adds each successor to the list of an iterator's workers, to be ended with it."""
        for worker in range(len(workers)):
            running = self._restarts.process_of(worker)
            if running is not None:
                workers[worker] = running

    def _refusal(self, worker: int) -> str | None:
        """Returns why a worker may have no successor, however it was lost; None if it may."""
        if worker in self._not_again:
            return "the start of a successor has failed or was interrupted"
        if self._is_iterable:
            return "a worker of an IterableDataset is not restarted, which would begin its part again"
        if worker in self._unknown:
            return (
                "the dataset's state after the worker's last batch is not known: that batch was not handed "
                "out yet, or has no state (snapshot_every_n_steps)"
            )
        return None
