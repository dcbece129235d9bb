"""The datasets that have a part in a loader's state, and their states in the main process.

These are the last state of each worker, and what came since.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

import ringloader._native as _native
from ringloader._core.feature import StagePosition
from ringloader._features.rules import THREAD
from ringloader._features.state.saved import Part, Saved, Workers, has_state
from ringloader._features.state.snapshots import (
    Asked,
    ResumePoint,
    Sent,
    SnapshotPolicy,
    Snapshots,
    read_sent,
)
from ringloader._features.table import options_of
from ringloader._worker.fetch import Result

if TYPE_CHECKING:
    from ringloader._common.protocols import OurWorkersIterator
    from ringloader._torch.protocols import TorchLoader


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

    def start_after(self, worker: int) -> tuple[str | None, ResumePoint | None]:
        """Returns where the successor of a lost worker begins: after its last answer.

        Returns:
            The reason if the state after that answer is not known, and the beginning.
        """
        answered, passed = self.worker_progress.when_lost(worker)
        if not answered:
            return None, self.start_of(worker)
        last = self._last[worker]
        if last is None or not last.asked == answered == passed:
            why = "that batch was not handed out yet, or has no state (snapshot_every_n_steps)"
            return f"the dataset's state after the worker's last batch is not known: {why}", None
        return None, ResumePoint(Part(snapshot=last.snapshot), answered)

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


# In place of a sampler's name, in the state of an iterable dataset.
_KIND = "IterableDataset"


def decides(loader: TorchLoader) -> bool:
    """True if the dataset of a loader decides where an epoch is, and no sampler."""
    return isinstance(loader.dataset, IterableDataset)


def is_asked(loader: TorchLoader) -> bool:
    """True if the dataset of a loader may have a part in the loader's state."""
    return decides(loader) or (every(loader) is not None and has_state(loader.dataset))


def every(loader: TorchLoader) -> int | None:
    """Returns after how many batches states are taken; None: never."""
    return options_of(loader).snapshot_every_n_steps


def share_dataset(loader: TorchLoader) -> bool:
    """True if several threads have one dataset, whose state is then no worker's."""
    return loader.num_workers > 1 and options_of(loader).worker_method == THREAD


def option_for(loader: TorchLoader) -> Snapshots | None:
    """Returns the option that takes the states of a loader's dataset, if it may have one."""
    if not is_asked(loader):
        return None
    policy = SnapshotPolicy(
        every=every(loader),
        workers=loader.num_workers,
        is_iterable=decides(loader),
        of_dataset=not share_dataset(loader),
    )
    return Snapshots(policy)


def state_for(loader: TorchLoader, option: Snapshots, begun: Saved, is_resumed: bool) -> DatasetState:
    """Returns the states of a loader's dataset in an epoch. See :class:`DatasetState`.

    Args:
        loader: The loader.
        option: Takes the states.
        begun: The epoch's beginning, or the state from which it goes on.
        is_resumed: True if a state was loaded: a dataset that has gone on since goes back.
    """
    workers, size = begun.workers or _fresh(loader), begun.batch_size
    is_shared = share_dataset(loader) and has_state(loader.dataset)
    if decides(loader):
        return DatasetState(option, workers, is_resumed, size, is_shared)
    workers = dataclasses.replace(workers, is_stateful=not is_shared)
    return MapDatasetState(option, workers, is_resumed, size, is_shared)


def _fresh(loader: TorchLoader) -> Workers:
    """Returns the positions of workers that begin."""
    many = loader.num_workers
    return Workers(many, (Part(),) * max(1, many))


def beginning(loader: TorchLoader) -> Saved:
    """Returns the state of an iterable dataset before the next epoch."""
    return Saved(
        sampler=_KIND,
        batch_size=loader._index_sampler.batch_size if loader._auto_collation else 1,
        passed=None,
        fingerprint=None,
        workers=_fresh(loader),
    )


def check(loader: TorchLoader, workers: Workers | None) -> None:
    """Checks that the positions of a state can be those of a loader's workers.

    Raises:
        ValueError: If they cannot.
    """
    if workers is None:
        if decides(loader):
            raise ValueError("load_state_dict() needs the key 'workers', and in this state it is None")
        return
    if workers.num_workers != loader.num_workers:
        raise ValueError(
            f"load_state_dict(): the state is that of num_workers={workers.num_workers}, and this loader has "
            f"num_workers={loader.num_workers}: its dataset is read in other parts; use as many workers"
        )
    states = (part.snapshot.states() for part in workers.parts if part.snapshot is not None)
    has_own = any("dataset" in found for found in states)
    if has_own and share_dataset(loader):
        raise ValueError(
            "load_state_dict(): the state has that of each worker's dataset, and the "
            f"{loader.num_workers} threads of this loader share one: use num_workers=1, or "
            'worker_method="multiprocessing"'
        )
    may_be_other = options_of(loader).worker_reset_fn is not None
    if has_own and not may_be_other and not has_state(loader.dataset):
        raise ValueError(
            "load_state_dict(): the state has that of the dataset, and the "
            f"{type(loader.dataset).__name__} of this loader has no state_dict and load_state_dict"
        )
