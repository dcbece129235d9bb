"""The attributes of torch's loaders and iterators that ringloader reads, as types: mypy refuses any other.

They are for annotations only. Attributes that ringloader adds to a loader are not among them: those are set
and read through ``_common/attributes.py``, ``_features/table.py`` or ``vars``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol


class TorchLoader(Protocol):
    """A ``torch.utils.data.DataLoader`` of any class."""

    dataset: Any
    batch_size: int | None
    num_workers: int
    sampler: Any
    batch_sampler: Any
    # Any object: torch refuses one that is no generator only when it draws.
    generator: Any
    collate_fn: Callable[[Any], Any]
    pin_memory: bool
    pin_memory_device: str
    timeout: float
    worker_init_fn: Callable[[int], Any] | None
    prefetch_factor: int | None
    persistent_workers: bool
    in_order: bool
    _dataset_kind: Any
    # The iterator whose workers persist.
    _iterator: Any

    @property
    def multiprocessing_context(self) -> Any: ...

    @property
    def _auto_collation(self) -> bool: ...

    @property
    def _index_sampler(self) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...

    def check_worker_number_rationality(self) -> None: ...


class TorchIterator(Protocol):
    """An iterator of torch's, or one of ringloader's, which has the same attributes."""

    _dataset: Any
    _base_seed: int
    # For DataPipes; the process and the number of processes too.
    _shared_seed: int | None
    _rank: int
    _world_size: int
    _index_sampler: Any
    _sampler_iter: Iterator[Any]

    def __next__(self) -> Any: ...

    def _reset(self, loader: TorchLoader, first_iter: bool = False) -> None: ...
