"""Successors of lost actors, and messages about them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from ringloader._late import overdue
from ringloader._log import logger
from ringloader._transport.successors import Restarts, Successions


class Replaces(Restarts, Protocol):
    """The transport of an iterator."""

    def why_lost(self, worker: int) -> str:
        """Returns why a worker was lost, in words."""

    def failure(self, worker: int) -> str | None:
        """Returns why this process could not take a batch of a worker, if the worker was lost by that."""


class Replacing(Successions):
    """Replaces the lost workers of one iterator.

    Args:
        retries: How often a worker may be lost in the same batch and be replaced.
        is_iterable: True for a dataset whose workers cannot go on where they were.
        transport: The iterator's.
    """

    def __init__(self, retries: int, is_iterable: bool, transport: Replaces) -> None:
        super().__init__(is_iterable, transport)
        self._retries = retries
        self._transport = transport
        # By worker: the first batch that it has not answered when it was lost, and how often there.
        self._losses: dict[int, tuple[int | None, int]] = {}

    def begin_epoch(self) -> None:
        """Forgets the losses of the epoch before."""
        self._losses.clear()

    def _may_follow(self, lost: Any, worker: int, in_hand: overdue.Late | None) -> bool:
        # `in_hand` is the first batch of the worker without an answer.
        batch = None if in_hand is None else in_hand[1]
        before, times = self._losses.get(worker, (None, 0))
        times = times + 1 if before == batch else 1
        self._losses[worker] = batch, times
        # Another one would send the same.
        is_ours = self._transport.failure(worker) is not None
        if self._refusal(worker) is not None or times > self._retries or is_ours:
            return False
        logger.warning(
            "DataLoader worker %d (pid %s on %s) was lost: %s; another actor does its tasks again",
            worker,
            lost.pid,
            lost.node,
            self._transport.why_lost(worker),
        )
        return True

    def why_not(self, worker: int) -> Iterator[str]:
        """Yields the reason why a lost worker got no successor, for its error."""
        refusal = self._refusal(worker)
        _, times = self._losses.get(worker, (None, 0))
        if self._transport.failure(worker) is not None:
            return
        if refusal is not None:
            yield refusal
        elif times > self._retries:
            yield f"retries={self._retries}: it was lost {times} times in this batch"
