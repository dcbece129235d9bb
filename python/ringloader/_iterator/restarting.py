"""Successors of lost workers, for ``restart_workers=`` and ``sample_timeout=``, and messages about them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from ringloader._late import overdue
from ringloader._log import logger
from ringloader._transport.processes import ProcessTransport
from ringloader._transport.successors import Successions
from ringloader._worker.options import EpochStart

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
        # By worker: the process that has ended because a sample took too long, and which one did.
        self._late: dict[int, tuple[int, str]] = {}

    def begin_epoch(self) -> None:
        """All restarts are there again."""
        self._left = self._most

    def successor(self, lost: Any, worker: int, start: EpochStart, in_hand: overdue.Late | None) -> Any:
        """The process of a worker's successor, which runs; None if there may be none.

        Args:
            lost: The process that has ended.
            worker: The worker's number.
            start: The beginning of the successor's part of the epoch.
            in_hand: What it was in.
        """
        if worker in self._not_again:
            return None
        running = self._transport.process_of(worker)
        if running is not lost:
            # A signal handler raised between its start and its caller's note of it.
            return running
        lost.join(1.0)
        late = self._too_late(lost, worker, in_hand)
        if worker in self._unknown or not (self._left or late) or self._is_iterable:
            return None
        if self._transport.is_without_guard(lost) or not self._is_deserted(worker):
            return None
        if late:
            self._log_late(lost, worker, in_hand, late)
        else:
            self._left -= 1
            self._log(lost, worker, in_hand)
        return self._restart(worker, start)

    def _too_late(self, lost: Any, worker: int, in_hand: overdue.Late | None) -> str | None:
        """Returns the sample that took too long, in words, if a worker has ended because of one, or None."""
        timeouts = self._transport.timeouts
        # An interrupt may make the iterator ask again.
        exceeded = None if timeouts is None else timeouts.exceeded(worker, in_hand)
        if exceeded is not None:
            self._late[worker] = lost.pid, exceeded
        pid, late = self._late.get(worker, (None, None))
        return late if pid == lost.pid else None

    def _is_deserted(self, worker: int) -> bool:
        """True if no process that a lost worker forked has the memory that a successor would fill.

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
        running = self._transport.process_of(worker)
        pid, late = self._late.get(worker, (None, None))
        if running is not None and pid == running.pid:
            assert self._transport.timeouts is not None
            yield f"{late} took longer than sample_timeout={self._transport.timeouts.seconds} s"
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

    def _log_late(self, lost: Any, worker: int, in_hand: overdue.Late | None, late: str) -> None:
        assert self._transport.timeouts is not None
        logger.warning(
            "DataLoader worker %d (pid %s) was ended: %s took longer than sample_timeout=%s s in %s; "
            "another worker makes the rest of the batch again",
            worker,
            lost.pid,
            late,
            self._transport.timeouts.seconds,
            "a batch that nobody waits for" if in_hand is None else overdue.batch(*in_hand[1:]),
        )

    def _log(self, lost: Any, worker: int, in_hand: overdue.Late | None) -> None:
        code = lost.exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"exited with code {code}"
        where = "outside of a batch" if in_hand is None else f"in {overdue.batch(*in_hand[1:])}"
        logger.warning(
            "DataLoader worker %d (pid %s) %s %s; it is restarted, and its tasks are done again "
            "(%d more restarts in this epoch)",
            worker,
            lost.pid,
            how,
            where,
            self._left,
        )
