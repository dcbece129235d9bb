"""The states of a dataset in the main process: the last of each worker, and what came since."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ringloader._native as _native
from ringloader._core.feature import StagePosition
from ringloader._features.state.objects import Sent, read_sent
from ringloader._features.state.positions import Part, Workers
from ringloader._features.state.snapshots import Asked, ResumePoint, Snapshots
from ringloader._worker.result import Result

if TYPE_CHECKING:
    from ringloader._common.protocols import OurWorkersIterator


class DatasetState:
    """The states of an iterable dataset in one epoch.

    Args:
        option: Takes the states.
        begun: The positions of the workers when the epoch begins.
        is_resumed: True if workers go on from there, and datasets that live on go back to where that is.
        size: The samples of a batch that is read again.
        is_shared: True if several threads share the dataset, and it has a state.
    """

    def __init__(
        self, option: Snapshots, begun: Workers, is_resumed: bool, size: int, is_shared: bool
    ) -> None:
        self.begun = begun
        self._option = option
        self._is_resumed = is_resumed
        self._is_shared = is_shared
        self._is_stateful, self.shared_seed = begun.is_stateful, begun.shared_seed
        many = len(begun.parts)
        self.worker_progress = _native.WorkerProgress(many, begun.next)
        # By worker: its last batch with a state.
        self._last: list[Sent | None] = [None] * many
        # The worker whose state came last, and the one that it had before.
        self._replaced: tuple[int, Sent | None] = (0, None)
        self._size = size

    def start_of(self, worker: int) -> ResumePoint | None:
        """Returns the point from which a worker resumes; None in an epoch that was not resumed."""
        return ResumePoint(self.begun.parts[worker], 0, self._size) if self._is_resumed else None

    def start_after(self, worker: int) -> tuple[bool, ResumePoint | None]:
        """Returns where the successor of a lost worker begins: after its last answer.

        Returns:
            False if the state after that answer is not known, and the beginning.
        """
        answered, passed = self.worker_progress.when_lost(worker)
        if not answered:
            return True, self.start_of(worker)
        last = self._last[worker]
        if last is None or not last.asked == answered == passed:
            return False, None
        return True, ResumePoint(Part(snapshot=last.snapshot), answered)

    position = StagePosition.SNAPSHOTS

    def around(self, take: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns ``take`` for batches that may come with states."""

        def take_next(iterator: OurWorkersIterator) -> Any:
            found = take(iterator)
            if type(found) is Result and found.snapshot is not None:
                self._record(read_sent(found.snapshot))
                return found if found.errors is not None else found.data
            return found

        return take_next

    def _record(self, found: Sent) -> None:
        self._is_stateful = True
        self._replaced = found.worker, self._last[found.worker]
        self._last[found.worker] = found

    def end(self) -> None:
        """Asks for no state any more: the epoch is over, or another one begins."""
        asked, self._option.here = self._option.here, None
        self._is_stateful = self._is_stateful or asked is not None

    def _look_at(self, asked: Asked, passed: int) -> None:
        """Takes the state of a dataset in this process, if it has made no more than the passed batches."""
        if passed and asked.is_after(passed):
            self._last[0] = asked.taken(passed)

    def _part(self, worker: int, passed: int) -> Part:
        begun, last = self.begun.parts[worker], self._last[worker]
        batches = begun.batches + passed
        if last is not None and last.asked > passed and self._replaced[0] == worker:
            # The last batch raised after the worker had made it.
            last = self._replaced[1]
        if last is not None and last.asked <= passed:
            return Part(batches, passed - last.asked, last.snapshot)
        return Part(batches, begun.since + passed, begun.snapshot)

    def saved(self, returned: int) -> Workers:
        """Returns the positions of all workers, once ``next`` has returned ``returned`` batches.

        Raises:
            RuntimeError: If several threads share a dataset that has a state.
        """
        passed, turn = self.worker_progress.position(returned)
        if self._is_shared and any(passed) and not self._is_stateful:
            raise RuntimeError(
                f"state_dict() of a loader whose {len(passed)} threads share one dataset that has a state: "
                "it is not that of one of them. Give the iterator that its __iter__ returns a state_dict and "
                'load_state_dict, or use num_workers=1, or worker_method="multiprocessing"'
            )
        asked = self._option.here
        if asked is not None:
            self._is_stateful = True
            self._look_at(asked, passed[0])
        return dataclasses.replace(
            self.begun,
            parts=tuple(self._part(worker, many) for worker, many in enumerate(passed)),
            next=turn,
            is_stateful=self._is_stateful,
            shared_seed=self.shared_seed,
        )


class MapDatasetState(DatasetState):
    """The states of a map-style dataset in one epoch, which come in addition to the sampler's position.

    Each batch of a worker comes with the state after it: to read batches again that came since a state would
    need the batches as they were.
    """

    def _look_at(self, asked: Asked, passed: int) -> None:
        # After a batch that raised, too: its sample is asked for again.
        self._last[0] = asked.taken(passed)

    def _part(self, worker: int, passed: int) -> Part:
        return Part(snapshot=super()._part(worker, passed).snapshot)
