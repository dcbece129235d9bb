"""The datasets that have a part in a loader's state: which they are, and how their epochs begin."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from torch.utils.data import IterableDataset

from ringloader._options import kept
from ringloader._options.checks import THREAD
from ringloader._state.dataset_state import DatasetState, MapDatasetState
from ringloader._state.objects import Rule
from ringloader._state.parts import Part, Workers, has_state
from ringloader._state.saved import Saved
from ringloader._state.snapshots import Snapshots

if TYPE_CHECKING:
    from ringloader._common.protocols import OurIterator
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
    return kept.options_of(loader).snapshot_every_n_steps


def _are_threads(loader: TorchLoader) -> bool:
    return loader.num_workers > 0 and kept.options_of(loader).worker_method == THREAD


def share_dataset(loader: TorchLoader) -> bool:
    """True if several threads have one dataset, whose state is then no worker's."""
    return _are_threads(loader) and loader.num_workers > 1


def option_for(loader: TorchLoader) -> Snapshots | None:
    """Returns the option that takes the states of a loader's dataset, if it may have one."""
    if not is_asked(loader):
        return None
    is_iterable = decides(loader)
    rule = Rule(
        every=every(loader),
        workers=loader.num_workers,
        is_iterable=is_iterable,
        of_dataset=not share_dataset(loader),
        batches=bool(loader._auto_collation),
        is_here=loader.num_workers == 0 or _are_threads(loader),
    )
    return Snapshots(rule)


def lives_on(loader: TorchLoader) -> bool:
    """True if an epoch finds the dataset as the one before has left it, once there are workers."""
    return loader.num_workers == 0 or bool(loader.persistent_workers) or _are_threads(loader)


def state_for(
    loader: TorchLoader,
    iterator: OurIterator,
    size: int,
    begun: Workers | None = None,
    told: Collection[int] | None = None,
) -> DatasetState | None:
    """Returns the states of a loader's dataset in an epoch, if it may have any. See :class:`DatasetState`.

    Args:
        loader: The loader.
        iterator: Its iterator.
        size: The samples of a batch that is read again.
        begun: The positions from which the epoch goes on; None: the beginning.
        told: Workers that must be told them; None for all. One that is told of a beginning brings a dataset
            there that has gone on.
    """
    if not is_asked(loader):
        return None
    made = DatasetState if decides(loader) else MapDatasetState
    is_shared = share_dataset(loader) and has_state(loader.dataset)
    if begun is None:
        begun = _fresh(loader)
    told = range(len(begun.parts)) if told is None else told
    return made(loader, iterator, begun, told, size, is_shared)


def state_after(
    loader: TorchLoader, iterator: OurIterator, size: int, before: DatasetState | None, are_same: bool
) -> DatasetState | None:
    """Returns the states of a loader's dataset in an epoch that follows another one.

    Args:
        loader: The loader.
        iterator: Its iterator.
        size: The samples of a batch that is read again.
        before: The states in the epoch before, if it had any.
        are_same: True if the workers are the same.
    """
    finds_them = are_same or loader.num_workers == 0 or _are_threads(loader)
    if before is None or before.workers != loader.num_workers or not finds_them:
        return state_for(loader, iterator, size, told=())
    return state_for(loader, iterator, size, *before.next_epoch())


def _fresh(loader: TorchLoader) -> Workers:
    """Returns the positions of workers that begin."""
    many = loader.num_workers
    return Workers(many, (Part(),) * max(1, many), is_in_order=loader.in_order or many <= 1)


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
    has_own = any(part.snapshot is not None and part.snapshot.is_of_dataset() for part in workers.parts)
    if has_own and share_dataset(loader):
        raise ValueError(
            "load_state_dict(): the state has that of each worker's dataset, and the "
            f"{loader.num_workers} threads of this loader share one: use num_workers=1, or "
            'worker_method="multiprocessing"'
        )
    may_be_other = kept.options_of(loader).worker_reset_fn is not None
    if has_own and not may_be_other and not has_state(loader.dataset):
        raise ValueError(
            "load_state_dict(): the state has that of the dataset, and the "
            f"{type(loader.dataset).__name__} of this loader has no state_dict and load_state_dict"
        )
