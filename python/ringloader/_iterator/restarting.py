"""``restart_workers=``: successors of workers that were lost, how many, and the messages about them."""

from __future__ import annotations

import time
from typing import Any

from ringloader._log import logger
from ringloader._options import overdue
from ringloader._transport.processes import ProcessTransport
from ringloader._worker.options import EpochStart

# Seconds for which a successor waits for processes that its predecessor forked.
_ORPHANS_END_WITHIN = 2.0


class Restarting:
    """The restarts of an iterator's epoch.

    Args:
        most: Restarts in an epoch, of all workers together.
        is_iterable: Whether the dataset is one whose workers cannot go on where they were.
        transport: The iterator's. Its workers were not started yet.
    """

    def __init__(self, most: int, is_iterable: bool, transport: ProcessTransport) -> None:
        self._most = most
        self._transport = transport
        transport.keep_work()
        self._left = most
        self._is_iterable = is_iterable
        # Workers whose successor's start has failed or was interrupted: its process may run all the same.
        self._not_again: set[int] = set()
        # Workers the state of whose dataset is not known as of their last answer.
        self._unknown: set[int] = set()

    def begin_epoch(self) -> None:
        """All restarts are there again."""
        self._left = self._most

    def record_state(self, worker: int, is_known: bool) -> None:
        """Notes if a successor of a worker can have the state of its dataset."""
        if is_known:
            self._unknown.discard(worker)
        else:
            self._unknown.add(worker)

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
        if worker in self._unknown or self._left == 0 or self._is_iterable or not self._is_deserted(worker):
            return None
        if self._transport.is_without_guard(lost):
            return None
        self._left -= 1
        self._log(lost, worker, in_hand)
        try:
            return self._transport.restart(worker, start)
        except BaseException:
            # INVARIANT: no two processes are at the rings of one worker. This one may run unknown.
            self._not_again.add(worker)
            raise

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

    def list_all(self, workers: list[Any]) -> None:
        """Adds each successor to the list of an iterator's processes, to be ended with it."""
        for worker in range(len(workers)):
            running = self._transport.process_of(worker)
            if running is not None:
                workers[worker] = running

    def why_not(self, worker: int) -> str:
        """Returns the reason why a lost worker got no successor, for its error."""
        if worker in self._not_again:
            return "restart_workers: the start of a successor has failed or was interrupted"
        if self._is_iterable:
            return "restart_workers: an IterableDataset is not restarted, which would begin its part again"
        if worker in self._unknown:
            return (
                "restart_workers: the dataset has a state, unknown as it was behind its last answer: "
                "that batch was not handed out yet, or has no state (snapshot_every_n_steps)"
            )
        if self._left == 0:
            return f"restart_workers={self._most}: all restarts of this epoch are used"
        return (
            "restart_workers: a process that the worker forked still has the worker's memory, which a "
            "successor would fill; have such processes end with the worker"
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
