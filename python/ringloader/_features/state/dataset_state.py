"""The states of a dataset in the main process: the last of each worker, and what came since."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ringloader._native as _native
from ringloader._core.feature import StagePosition
from ringloader._features.state.objects import Sent, read_sent
from ringloader._features.state.positions import Part, Workers, returned_by
from ringloader._features.state.snapshots import Asked, ResumePoint, Snapshots
from ringloader._worker.result import Result

if TYPE_CHECKING:
    from ringloader._common.protocols import OurIterator, OurWorkersIterator
    from ringloader._torch.protocols import TorchLoader


class DatasetState:
    """The states of an iterable dataset in one epoch.

    Args:
        loader: The loader.
        iterator: Its iterator, which this does not keep alive.
        begun: The positions of the workers when the epoch begins.
        is_resumed: True if workers go on from there, and datasets that live on go back to where that is.
        size: The samples of a batch that is read again.
        is_shared: True if several threads share the dataset, and it has a state.
    """

    def __init__(
        self,
        loader: TorchLoader,
        iterator: OurIterator,
        begun: Workers,
        is_resumed: bool,
        size: int,
        is_shared: bool,
    ) -> None:
        # Batches that `next` has returned.
        self.returned = functools.partial(returned_by, weakref.ref(iterator))
        self._is_resumed = is_resumed
        self.workers: int = loader.num_workers
        self._is_in_order = loader.in_order or self.workers <= 1
        self._is_shared = is_shared
        self._is_stateful, self.shared_seed = self._begins_stateful(begun), begun.shared_seed
        self._begun = begun.parts
        many = len(begun.parts)
        self.worker_progress = _native.WorkerProgress(many, begun.next)
        # By worker: its last batch with a state.
        self._last: list[Sent | None] = [None] * many
        # The worker whose state came last, and the one that it had before.
        self._replaced: tuple[int, Sent | None] = (0, None)
        self._size = size
        # Without workers, the fetcher that has the state. It goes with its iterator.
        self._asked: weakref.ref[Asked] | None = None

    def _begins_stateful(self, begun: Workers) -> bool:
        """True if the dataset is known to have a state before a batch comes with one."""
        return begun.is_stateful

    def start_of(self, worker: int) -> ResumePoint | None:
        """Returns the point from which a worker resumes; None in an epoch that was not resumed."""
        return ResumePoint(self._begun[worker], 0, self._size) if self._is_resumed else None

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

    def ask_here(self, option: Snapshots) -> None:
        """Records the fetcher of an iterator without workers, if that has a state."""
        asked, option.here = option.here, None
        if asked is not None:
            self._is_stateful = True
            self._asked = weakref.ref(asked)
            asked.on_end = self._record_end

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
        if found.snapshot is not None:
            self._replaced = found.worker, self._last[found.worker]
            self._last[found.worker] = found

    def record_error(self, iterator: OurIterator) -> None:
        """Records that ``next`` has raised."""
        self.worker_progress.raised(iterator._num_yielded)

    def end(self) -> None:
        """Asks for no state any more: the epoch is over, or another one begins."""
        self._asked = None

    def _record_end(self, asked: Asked) -> None:
        """Records the state of an iterator without workers that goes, and its fetcher with it."""
        if self._asked is not None:
            self._look_at(asked)

    def _parts(self) -> list[Part]:
        """Returns the positions of the workers."""
        asked = None if self._asked is None else self._asked()
        if asked is not None:
            self._look_at(asked)
        passed, _ = self.worker_progress.position(self.returned())
        return [self._part(worker, many) for worker, many in enumerate(passed)]

    def _look_at(self, asked: Asked) -> None:
        """Takes the state of a dataset in this process, if it has made no more than the passed batches."""
        passed, _ = self.worker_progress.position(self.returned())
        last = self._last[0]
        if passed[0] and asked.is_after(passed[0]) and (last is None or last.asked != passed[0]):
            self._last[0] = asked.taken(passed[0])

    def _part(self, worker: int, passed: int) -> Part:
        begun, last = self._begun[worker], self._last[worker]
        batches = begun.batches + passed
        if last is not None and last.asked > passed and self._replaced[0] == worker:
            # The last batch raised after the worker had made it.
            last = self._replaced[1]
        if last is not None and last.asked <= passed:
            return Part(batches, passed - last.asked, last.snapshot)
        return Part(batches, begun.since + passed, begun.snapshot)

    def saved(self) -> Workers:
        """Returns the positions of all workers.

        Raises:
            RuntimeError: If several threads share a dataset that has a state.
        """
        passed, turn = self.worker_progress.position(self.returned())
        if self._is_shared and any(passed) and not self._is_stateful:
            raise RuntimeError(
                f"state_dict() of a loader whose {self.workers} threads share one dataset that has a state: "
                "it is not that of one of them. Give the iterator that its __iter__ returns a state_dict and "
                'load_state_dict, or use num_workers=1, or worker_method="multiprocessing"'
            )
        return Workers(
            num_workers=self.workers,
            parts=tuple(self._parts()),
            next=turn,
            is_stateful=self._is_stateful,
            is_in_order=self._is_in_order,
            shared_seed=self.shared_seed,
        )


class MapDatasetState(DatasetState):
    """The states of a map-style dataset in one epoch, which come in addition to the sampler's position.

    Each batch of a worker comes with the state after it: to read batches again that came since a state would
    need the batches as they were.
    """

    def _begins_stateful(self, _begun: Workers) -> bool:
        return not self._is_shared

    def _look_at(self, asked: Asked) -> None:
        passed, _ = self.worker_progress.position(self.returned())
        # After a batch that raised, too: its sample is asked for again.
        self._last[0] = asked.taken(passed[0])

    def _part(self, worker: int, passed: int) -> Part:
        return Part(snapshot=super()._part(worker, passed).snapshot)
