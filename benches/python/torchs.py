"""Torch's own parts without its workers: what gives indices, and what makes a batch of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _DatasetKind


def in_process(dataset: Dataset[Any], arguments: dict[str, Any]) -> DataLoader[Any]:
    """Torch's loader for the same arguments, but without workers: its samplers and its collation."""
    changed = {**arguments, "num_workers": 0, "prefetch_factor": None, "in_order": True}
    return DataLoader(dataset, **changed)


def index_batches(loader: DataLoader[Any]) -> tuple[Iterator[Any], int]:
    """The indices of an epoch batch by batch, and the base of its workers' seeds.

    Torch's own iterator makes both, so the draws are torch's, and come when torch's do.
    """
    iterator: Any = iter(loader)
    return iterator._sampler_iter, iterator._base_seed


def fetch_of(loader: DataLoader[Any]) -> Callable[[Any], Any]:
    """Returns what torch's worker does for one batch's indices: takes the samples and collates them."""
    fetcher = _DatasetKind.create_fetcher(
        _DatasetKind.Map, loader.dataset, loader._auto_collation, loader.collate_fn, loader.drop_last
    )
    fetch: Callable[[Any], Any] = fetcher.fetch
    return fetch
