"""Successors of lost actors, and messages about them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from ringloader._late import overdue
from ringloader._log import logger
from ringloader._worker.options import EpochStart


class Restarts(Protocol):
    """Restarts workers: the transport of an iterator."""

    def handle_of(self, worker: int) -> Any:
        """Returns the handle of the actor that was started last as a worker; None before."""

    def why_lost(self, worker: int) -> str:
        """Returns why a worker was lost, in words."""

    def restart(self, worker: int, start: EpochStart) -> Any:
        """Starts a successor of a lost worker, and returns its handle."""


class Replacing:
    """Replaces the lost workers of one iterator.

    Args:
        retries: How often a worker may be lost in the same batch and be replaced.
        is_iterable: True for a dataset whose workers cannot go on where they were.
        transport: The iterator's.
    """

    def __init__(self, retries: int, is_iterable: bool, transport: Restarts) -> None:
        self._retries = retries
        self._is_iterable = is_iterable
        self._transport = transport
        # Workers whose successor's start has failed or was interrupted.
        self._not_again: set[int] = set()
        # By worker: the first batch that it has not answered when it was lost, and how often there.
        self._losses: dict[int, tuple[int | None, int]] = {}
        # Workers the state of whose dataset is not known as of their last answer.
        self._unknown: set[int] = set()

    def begin_epoch(self) -> None:
        """Forgets the losses of the epoch before."""
        self._losses.clear()

    def record_state(self, worker: int, is_known: bool) -> None:
        """Notes if a successor of a worker can have the state of its dataset."""
        if is_known:
            self._unknown.discard(worker)
        else:
            self._unknown.add(worker)

    def successor(self, lost: Any, worker: int, start: EpochStart, in_hand: overdue.Late | None) -> Any:
        """Returns the handle of a worker's successor, which is connected; None if there may be none.

        Args:
            lost: The handle of the actor that was lost.
            worker: The worker's number.
            start: The beginning of the successor's part of the epoch.
            in_hand: Its first batch without an answer.
        """
        if worker in self._not_again:
            return None
        running = self._transport.handle_of(worker)
        if running is not lost:
            # A signal handler raised between its start and its caller's note of it.
            return running
        batch = None if in_hand is None else in_hand[1]
        before, times = self._losses.get(worker, (None, 0))
        times = times + 1 if before == batch else 1
        self._losses[worker] = batch, times
        if worker in self._unknown or self._is_iterable or times > self._retries:
            return None
        logger.warning(
            "DataLoader worker %d (pid %s on %s) was lost: %s; another actor does its tasks again",
            worker,
            lost.pid,
            lost.node,
            self._transport.why_lost(worker),
        )
        try:
            return self._transport.restart(worker, start)
        except BaseException:
            self._not_again.add(worker)
            raise

    def list_all(self, workers: list[Any]) -> None:
        """Adds each successor to the list of an iterator's workers, to be ended with it."""
        for worker in range(len(workers)):
            running = self._transport.handle_of(worker)
            if running is not None:
                workers[worker] = running

    def why_not(self, worker: int) -> Iterator[str]:
        """Yields the reason why a lost worker got no successor, for its error."""
        _, times = self._losses.get(worker, (None, 0))
        if worker in self._not_again:
            yield "the start of a successor has failed or was interrupted"
        elif self._is_iterable:
            yield "a worker of an IterableDataset is not replaced, which would begin its part again"
        elif worker in self._unknown:
            yield (
                "the dataset has a state, unknown as it was behind the worker's last answer: that batch was "
                "not handed out yet, or has no state (snapshot_every_n_steps)"
            )
        elif times > self._retries:
            yield f"retries={self._retries}: it was lost {times} times in this batch"
