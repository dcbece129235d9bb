"""The workers of an iterator, as one object: which run, get tasks, and end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ringloader._native as _native
from ringloader._common.protocols import Handle
from ringloader._core.feature import Feature
from ringloader._transport.overdue import Late, LostWorker
from ringloader._transport.protocol import Transport
from ringloader._worker.loop import Work
from ringloader._worker.options import EpochStart


@dataclasses.dataclass(slots=True)
class Workers:
    """The workers of an iterator. The first ones run, and the last of them ends first.

    INVARIANT: no reference leads from here to the iterator, whose workers end when its last user drops it.

    Attributes:
        transport: Starts them, and carries tasks and batches.
        most: The most that there may be.
        running: How many get tasks. Others that have been started are to end.
        prefetch_factor: torch's.
        handles: The handles of those that were started and have not left.
        statuses: torch's: False for a worker that was lost, told to end, or has come to its data's end.
        scheduler: Hands out tasks, once :meth:`schedule` has made it.
    """

    transport: Transport
    most: int
    running: int
    prefetch_factor: Any
    handles: list[Handle] = dataclasses.field(default_factory=list)
    statuses: list[bool] = dataclasses.field(default_factory=list)
    scheduler: Any = None
    # Notes for the error of the worker that was lost last.
    _why_not_replaced: list[str] = dataclasses.field(default_factory=list)

    @property
    def shares_tasks(self) -> bool:
        """True if all workers share the tasks, and none has any of its own."""
        return self.transport.joint_tasks is not None

    def most_tasks(self) -> int:
        """Returns the most tasks that may be out while these workers get them."""
        shared = self.transport.joint_tasks
        most: int = self.prefetch_factor * self.running if shared is None else shared(self.running)
        return most

    def begin(self, work_of: Callable[[int], Work]) -> None:
        """Starts the first ones."""
        for worker in range(self.running):
            self.handles.append(self.transport.start(work_of(worker)))

    def begin_epoch(self, start_of: Callable[[int], EpochStart]) -> None:
        """Tells each the beginning of its part of another epoch."""
        for worker in range(self.running):
            self.transport.send(worker, start_of(worker))

    def schedule(
        self,
        source: _native.IndexSource,
        order: _native.Order,
        is_iterable: bool,
        timeout: float,
        features: Sequence[Feature],
    ) -> Any:
        """Returns the scheduler, before its first task.

        Args:
            source: The indices of the first epoch.
            order: The order of batches.
            is_iterable: True for an iterable dataset.
            timeout: Seconds to wait for a batch.
            features: The features that are on.
        """
        transport, factor = self.transport, self.prefetch_factor
        self.scheduler = made = transport.scheduler(
            transport.scheduled, source, self.most, factor, order, is_iterable, timeout
        )
        transport.schedule(made)
        if not self.shares_tasks and not all(feature.in_turn for feature in features):
            made.balance()
        for feature in features:
            feature.schedule(made)
        if self.running < self.most:
            made.use_first(self.running, self.most_tasks())
        return made

    def living(self) -> Iterator[tuple[int, Handle]]:
        """Yields the numbers and handles of the workers that were not told to end."""
        for worker, handle in enumerate(self.handles):
            if not self.transport.has_been_ended(worker):
                yield worker, handle

    def replace(self, lost: LostWorker) -> bool:
        """Starts a successor of a worker that has ended. Returns False if there may be none."""
        self._why_not_replaced = lost.notes
        successor = self.transport.lost(lost)
        if successor is not None:
            self.handles[lost.worker] = successor
        return successor is not None

    def error_of_lost(self, worker: int, in_hand: Late | None) -> RuntimeError:
        """Returns the error of a worker that has ended, and has no successor."""
        self.statuses[worker] = False
        return self.transport.error_of_lost(worker, self.handles[worker], in_hand, *self._why_not_replaced)

    def end(self, are_persistent: bool) -> None:
        """Ends all. Persistent workers that were told already are told again, as torch does."""
        self.transport.end(self.handles, lambda worker: self._is_to_be_told(worker) or are_persistent)

    def _is_to_be_told(self, worker: int) -> bool:
        """True for a worker that is still to be told to end, which this notes."""
        status, self.statuses[worker] = self.statuses[worker], False
        return status
