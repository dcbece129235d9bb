"""The datasets that have a part in a loader's state: which they are, and how their epochs begin."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from torch.utils.data import IterableDataset

from ringloader._features.rules import THREAD
from ringloader._features.state.dataset_state import DatasetState, MapDatasetState
from ringloader._features.state.objects import SnapshotPolicy
from ringloader._features.state.positions import Part, Workers, has_state
from ringloader._features.state.saved import Saved
from ringloader._features.state.snapshots import Snapshots
from ringloader._features.table import options_of

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

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
    is_iterable = decides(loader)
    policy = SnapshotPolicy(
        every=every(loader),
        workers=loader.num_workers,
        is_iterable=is_iterable,
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
