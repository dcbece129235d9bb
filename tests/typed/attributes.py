"""The protocols of loaders and iterators, for mypy --strict: their objects, and the lines that it refuses.

It is checked, not run. An ``ignore`` without an error is an error itself, so each one shows a refusal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_type

import torch.utils.data
from torch.utils.data import Dataset

import ringloader
import ringloader._core.epochs as epochs
import ringloader._features.shutdown as shutdown
from ringloader._core.base import LoaderIterator
from ringloader._core.torchs import TorchsIterator
from ringloader._core.with_workers import WorkersIterator
from ringloader._core.without_workers import SingleProcessIterator

if TYPE_CHECKING:
    from ringloader._common.protocols import OurIterator, OurWorkersIterator
    from ringloader._torch.protocols import TorchIterator, TorchLoader


def loaders(
    torchs: torch.utils.data.DataLoader[int],
    ours: ringloader.DataLoader[int],
    stateful: ringloader.StatefulDataLoader[int],
) -> tuple[TorchLoader, ...]:
    return torchs, ours, stateful


def iterators(
    base: LoaderIterator, single: SingleProcessIterator, workers: WorkersIterator, torchs: TorchsIterator
) -> tuple[OurIterator, ...]:
    return base, single, workers, torchs


def iterators_with_workers(workers: WorkersIterator) -> OurWorkersIterator:
    return workers


def read(
    loader: TorchLoader, torchs: TorchIterator, ours: OurIterator, workers: OurWorkersIterator
) -> tuple[object, ...]:
    assert_type((loader.num_workers, workers._batches_returned), tuple[int, int])
    return (
        loader.num_worker,  # type: ignore[attr-defined]
        loader.shuffle,  # type: ignore[attr-defined]
        loader._ringloader_epoch,  # type: ignore[attr-defined]
        torchs._batches_returned,  # type: ignore[attr-defined]
        ours._num_yield,  # type: ignore[attr-defined]
        ours._scheduler,  # type: ignore[attr-defined]
        workers._sheduler,  # type: ignore[attr-defined]
        workers._scheduler.takeover(),  # type: ignore[union-attr]
    )


def write(loader: TorchLoader, workers: OurWorkersIterator) -> None:
    loader._index_sampler = []  # type: ignore[misc]
    loader.timeout = "1"  # type: ignore[assignment]
    workers._shutdown = "1"  # type: ignore[assignment]


def give(loader: TorchLoader, torchs: TorchIterator, ours: OurIterator, dataset: Dataset[int]) -> None:
    epochs.next_of(loader)
    epochs.next_of(dataset)  # type: ignore[arg-type]
    epochs.next_of(None)  # type: ignore[arg-type]
    shutdown.shut_down(torchs)  # type: ignore[arg-type]
    iterators_with_workers(ours)  # type: ignore[arg-type]
