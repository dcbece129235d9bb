"""Successors of lost workers, for ``restart_workers=`` and ``sample_timeout=``, and messages about them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from ringloader._late import overdue
from ringloader._late.samples import Loss
from ringloader._log import logger
from ringloader._transport.processes import ProcessTransport
from ringloader._transport.successors import Successions

# Seconds for which a successor waits for processes that its predecessor forked.
_ORPHANS_END_WITHIN = 2.0


class Restarting(Successions):
    """The restarts of an iterator's epoch.

    Args:
        most: Restarts in an epoch, of all workers together. Those of samples that took too long do not
            count.
        is_iterable: True for a dataset whose workers cannot go on where they were.
        transport: The iterator's. Its workers were not started yet.
    """

    def __init__(self, most: int, is_iterable: bool, transport: ProcessTransport) -> None:
        super().__init__(is_iterable, transport)
        self._most = most
        self._transport = transport
        transport.keep_work()
        self._left = most
        # By worker: the last process of it that was lost, and what is known of that.
        self._losses: dict[int, tuple[Any, Loss]] = {}

    def begin_epoch(self) -> None:
        """Begins another epoch, which has all restarts again."""
        self._left = self._most
        if self._transport.sample_notes is not None:
            self._transport.sample_notes.begin_epoch()

    def _may_follow(self, lost: Any, worker: int, in_hand: overdue.Late | None) -> bool:
        lost.join(1.0)
        loss = self._loss_of(lost, worker, in_hand)
        if worker in self._unknown or not (self._left or loss.is_late) or self._is_iterable:
            return False
        if self._transport.is_without_guard(lost) or not self._is_deserted(worker):
            return False
        if loss.is_late:
            self._log_late(lost, worker, in_hand, loss)
        else:
            self._left -= 1
            self._log(lost, worker, in_hand, loss)
        return True

    def _loss_of(self, lost: Any, worker: int, in_hand: overdue.Late | None) -> Loss:
        process, loss = self._losses.get(worker, (None, Loss()))
        # An interrupt may make the iterator ask again.
        if process is not lost:
            notes = self._transport.sample_notes
            loss = Loss() if notes is None else notes.loss(worker, in_hand, lost.exitcode)
            self._losses[worker] = lost, loss
        return loss

    def _is_deserted(self, worker: int) -> bool:
        """Returns whether no process that a lost worker forked has the memory that a successor would fill.

        A process that ends with the worker may take a moment.
        """
        until = time.monotonic() + _ORPHANS_END_WITHIN
        while not self._transport.engine.is_deserted(worker):
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True

    def why_not(self, worker: int) -> Iterator[str]:
        """Yields the reason why a lost worker got no successor, for its error; nothing if none was wanted."""
        process, loss = self._losses.get(worker, (None, Loss()))
        if loss.where is not None and process is self._transport.process_of(worker):
            yield (
                f"{loss.where} took longer than {self._limit}" if loss.is_late else f"it died in {loss.where}"
            )
        refusal = self._refusal(worker)
        if refusal is not None:
            yield f"restart_workers: {refusal}"
        elif not self._most:
            # Only samples that take too long have successors.
            return
        elif self._left == 0:
            yield f"restart_workers={self._most}: all restarts of this epoch are used"
        else:
            yield (
                "restart_workers: a process that the worker forked still has the worker's memory, which a "
                "successor would fill; have such processes end with the worker"
            )

    @property
    def _limit(self) -> str:
        assert self._transport.sample_notes is not None
        return f"sample_timeout={self._transport.sample_notes.seconds} s"

    def _log_late(self, lost: Any, worker: int, in_hand: overdue.Late | None, loss: Loss) -> None:
        logger.warning(
            "DataLoader worker %d (pid %s) was ended: %s took longer than %s in %s; another worker makes the "
            "rest of the batch again",
            worker,
            lost.pid,
            loss.where,
            self._limit,
            "a batch that nobody waits for" if in_hand is None else overdue.batch(*in_hand[1:]),
        )

    def _log(self, lost: Any, worker: int, in_hand: overdue.Late | None, loss: Loss) -> None:
        code = lost.exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"exited with code {code}"
        where = "outside of a batch" if in_hand is None else f"in {overdue.batch(*in_hand[1:])}"
        logger.warning(
            "DataLoader worker %d (pid %s) %s %s%s; it is restarted, and its tasks are done again "
            "(%d more restarts in this epoch)",
            worker,
            lost.pid,
            how,
            where,
            "" if loss.where is None else f", where it died in {loss.where}",
            self._left,
        )
