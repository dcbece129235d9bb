"""Seeds and shards of DataPipes, as torch's iterators give them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ringloader._torch import internals

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchIterator


def seeded(dataset: Any, seed: int | None) -> Any:
    """Returns a dataset whose DataPipes are seeded with the shared seed, if there is one.

    MIRRORS torch worker.py::_worker_loop.
    """
    if seed is None or not isinstance(dataset, internals.DATA_PIPES[:1]):
        return dataset
    pipe: Any = dataset
    return torch.utils.data.graph_settings.apply_random_seed(pipe, torch.Generator().manual_seed(seed))


def init_fn_for(
    iterator: TorchIterator, init_fn: Callable[[int], object] | None
) -> Callable[[int], object] | None:
    """Returns a ``worker_init_fn`` that shards the DataPipes of an iterator before it calls ``init_fn``.

    MIRRORS torch dataloader.py::_MultiProcessingDataLoaderIter.__init__.
    """
    if not isinstance(iterator._dataset, internals.DATA_PIPES):
        return init_fn
    return functools.partial(internals.sharding_worker_init_fn, init_fn, iterator._world_size, iterator._rank)


def shard(iterator: TorchIterator) -> None:
    """Shards the DataPipes of an iterator without workers.

    MIRRORS torch dataloader.py::_SingleProcessDataLoaderIter.__init__.
    """
    pipe: Any = iterator._dataset
    if isinstance(iterator._dataset, internals.DATA_PIPES):
        torch.utils.data.graph_settings.apply_sharding(pipe, iterator._world_size, iterator._rank)
