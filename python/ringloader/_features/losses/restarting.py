"""Successors of lost workers, for ``restart_workers=`` and ``sample_timeout=``, and messages about them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ringloader._native as _native
from ringloader._core.feature import Feature, Setup
from ringloader._features.losses.samples import Loss, SampleNotes
from ringloader._log import logger
from ringloader._torch import internals
from ringloader._transport import overdue
from ringloader._transport.overdue import LostWorker

if TYPE_CHECKING:
    from ringloader._features.table import Options
    from ringloader._torch.protocols import TorchLoader

# Seconds for which a successor waits for processes that its predecessor forked.
_ORPHANS_END_WITHIN = 2.0
# Seconds in which a coroutine that takes too long is cancelled.
_GRACE_SECONDS = 1.0


def feature_for(loader: TorchLoader, options: Options, setup: Setup) -> Restarting | None:
    """Returns the feature of both options; None without workers."""
    return Restarting(loader, options, setup.workers) if setup.workers else None


class Restarting(Feature):
    """The restarts of an iterator's workers.

    Args:
        loader: The loader.
        options: Its options.
        workers: The most workers that it may have.
    """

    _engine: _native.Engine

    def __init__(self, loader: TorchLoader, options: Options, workers: int) -> None:
        # Restarts in an epoch, of all workers together. Those of samples that took too long do not count.
        self._most = self._left = options.restart_workers
        # The task of a lost worker; None: it is not noted.
        self._notes: SampleNotes | None = None
        crashes, shares = "on_error" in options.changed, options.worker_task == "sample"
        grace = _GRACE_SECONDS if options.worker_concurrency > 1 else 0.0
        self._make_notes: Callable[[], SampleNotes] | None = None
        if loader._dataset_kind != internals.ITERABLE:
            self._make_notes = functools.partial(
                SampleNotes, workers, options.sample_timeout, crashes, loader._auto_collation, shares, grace
            )

    def attach(self, transport: Any) -> None:
        self._engine = transport.engine
        if self._make_notes is not None:
            self._notes = self._make_notes()
            transport.add(*self._notes.options)

    def schedule(self, scheduler: Any) -> None:
        """Makes the scheduler keep the indices of tasks that have no answer."""
        scheduler.keep_sent()

    def begin_epoch(self, _loader: TorchLoader) -> None:
        """Begins another epoch, which has all restarts again."""
        self._left = self._most
        if self._notes is not None:
            self._notes.begin_epoch()

    def lost(self, lost: LostWorker) -> Any:
        """Starts a successor, which this logs, and returns its handle; None if there may be none."""
        lost.handle.join(1.0)
        notes = self._notes
        loss = Loss() if notes is None else notes.loss(lost.worker, lost.in_hand, lost.handle.exitcode)
        if lost.refusal is None and (self._left or loss.is_late) and self._is_deserted(lost.worker):
            if not loss.is_late:
                self._left -= 1
            self._log(lost, loss)
            return lost.restart()
        if loss.is_late:
            lost.notes.append(f"{loss.where} took longer than {self._limit}")
        elif loss.where is not None:
            lost.notes.append(f"it died in {loss.where}")
        if lost.refusal is not None:
            lost.notes.append(f"restart_workers: {lost.refusal}")
        elif self._left:
            lost.notes.append(
                "restart_workers: a process that the worker forked still has the worker's memory, which a "
                "successor would fill; have such processes end with the worker"
            )
        elif self._most:
            lost.notes.append(f"restart_workers={self._most}: all restarts of this epoch are used")
        return None

    def _is_deserted(self, worker: int) -> bool:
        """Returns whether no process that a lost worker forked has the memory that a successor would fill.

        A process that ends with the worker may take a moment.
        """
        until = time.monotonic() + _ORPHANS_END_WITHIN
        while not self._engine.is_deserted(worker):
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True

    @property
    def _limit(self) -> str:
        assert self._notes is not None
        return f"sample_timeout={self._notes.seconds} s"

    def _log(self, lost: LostWorker, loss: Loss) -> None:
        who, batch = f"DataLoader worker {lost.worker} (pid {lost.handle.pid})", None
        if lost.in_hand is not None:
            batch = overdue.batch(*lost.in_hand[1:])
        if loss.is_late:
            logger.warning(
                "%s was killed: %s took longer than %s in %s; another worker makes the rest of the batch "
                "again",
                who,
                loss.where,
                self._limit,
                batch or "an abandoned batch",
            )
            return
        code = lost.handle.exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"exited with code {code}"
        logger.warning(
            "%s %s %s%s; another worker makes its batches (%d more restarts in this epoch)",
            who,
            how,
            "outside of a batch" if batch is None else f"in {batch}",
            "" if loss.where is None else f", where it died in {loss.where}",
            self._left,
        )

    def close(self) -> None:
        """Gives the memory back in which workers note what they ask for."""
        if self._notes is not None:
            self._notes.close()
