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
from ringloader._transport.supervisor import LostWorker, Supervisor

if TYPE_CHECKING:
    from ringloader._features.table import Options
    from ringloader._torch.protocols import TorchLoader

# Seconds for which a successor waits for processes that its predecessor forked.
_ORPHANS_END_WITHIN = 2.0


def feature_for(loader: TorchLoader, options: Options, setup: Setup) -> Restarts | None:
    """Returns the feature of both options; None without workers."""
    return Restarts(loader, options, setup.workers) if setup.workers else None


class Restarts(Feature):
    """Adds the restarts of an iterator to its transport.

    Args:
        loader: The loader.
        options: Its options.
        workers: The most workers that it may have.
    """

    def __init__(self, loader: TorchLoader, options: Options, workers: int) -> None:
        self._most = options.restart_workers
        crashes, shares = "on_error" in options.changed, options.worker_task == "sample"
        self._make_notes: Callable[[], SampleNotes] | None = None
        if loader._dataset_kind != internals.ITERABLE:
            self._make_notes = functools.partial(
                SampleNotes, workers, options.sample_timeout, crashes, loader._auto_collation, shares
            )

    def attach(self, transport: Any) -> None:
        notes = None if self._make_notes is None else self._make_notes()
        options = () if notes is None else notes.options
        transport.add(*options, supervisor=Restarting(self._most, transport.engine, notes))


class Restarting(Supervisor):
    """The restarts of an iterator's epoch.

    Args:
        most: Restarts in an epoch, of all workers together. Those of samples that took too long do not
            count.
        engine: The engine of the workers.
        notes: What a lost worker asked for; None: that is not noted.
    """

    def __init__(self, most: int, engine: _native.Engine, notes: SampleNotes | None) -> None:
        self._most = most
        self._engine = engine
        self._notes = notes
        self._left = most
        # By worker: the last process of it that was lost, and what is known of that.
        self._losses: dict[int, tuple[Any, Loss]] = {}

    def schedule(self, scheduler: Any) -> None:
        """Makes the scheduler keep the indices of tasks that have no answer."""
        scheduler.keep_sent()

    def begin_epoch(self) -> None:
        """Begins another epoch, which has all restarts again."""
        self._left = self._most
        if self._notes is not None:
            self._notes.begin_epoch()

    def lost(self, lost: LostWorker) -> Any:
        """Starts a successor, which this logs, and returns its handle; None if there may be none."""
        lost.handle.join(1.0)
        loss = self._loss_of(lost)
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

    def _loss_of(self, lost: LostWorker) -> Loss:
        process, loss = self._losses.get(lost.worker, (None, Loss()))
        # Each further `next` after the error asks again.
        if process is not lost.handle:
            notes = self._notes
            loss = Loss() if notes is None else notes.loss(lost.worker, lost.in_hand, lost.handle.exitcode)
            self._losses[lost.worker] = lost.handle, loss
        return loss

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
                "%s was ended: %s took longer than %s in %s; another worker makes the rest of the batch "
                "again",
                who,
                loss.where,
                self._limit,
                batch or "a batch that nobody waits for",
            )
            return
        code = lost.handle.exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"exited with code {code}"
        logger.warning(
            "%s %s %s%s; it is restarted, and its tasks are done again (%d more restarts in this epoch)",
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
