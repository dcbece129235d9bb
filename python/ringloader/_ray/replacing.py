"""Successors of lost actors, and messages about them."""

from __future__ import annotations

from typing import Any

from ringloader._log import logger
from ringloader._transport.overdue import LostWorker


class Replacing:
    """Replaces the lost workers of one iterator.

    Args:
        retries: How often a worker may be lost in the same batch and be replaced.
    """

    def __init__(self, retries: int) -> None:
        self._retries = retries
        # By worker: the first batch that it has not answered when it was lost, and how often there.
        self._losses: dict[int, tuple[int | None, int]] = {}

    def begin_epoch(self) -> None:
        """Forgets the losses of the epoch before."""
        self._losses.clear()

    def lost(self, lost: LostWorker, why: str) -> Any:
        """Starts a successor, and returns its handle; None if there may be none.

        Args:
            lost: The worker.
            why: Why it was lost, in words.
        """
        # This is the first batch of the worker without an answer.
        batch = None if lost.in_hand is None else lost.in_hand[1]
        before, times = self._losses.get(lost.worker, (None, 0))
        times = times + 1 if before == batch else 1
        self._losses[lost.worker] = batch, times
        if lost.refusal is not None:
            lost.notes.append(lost.refusal)
        elif times > self._retries:
            lost.notes.append(f"retries={self._retries}: it was lost {times} times in this batch")
        else:
            logger.warning(
                "DataLoader worker %d (pid %s on %s) was lost: %s; another actor does its tasks again",
                lost.worker,
                lost.handle.pid,
                lost.handle.node,
                why,
            )
            return lost.restart()
        return None
