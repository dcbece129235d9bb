"""The private parts of torch that ringloader stands in for, and whether they are still torch's own."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.utils.data
from torch.utils.data import _utils
from torch.utils.data import dataloader as torch_dataloader

# As they were when this module was imported: what ours are built on.
Loader = torch.utils.data.DataLoader
BaseIterator: Any = torch_dataloader._BaseDataLoaderIter
Iterator: Any = torch_dataloader._MultiProcessingDataLoaderIter

ITERABLE = torch_dataloader._DatasetKind.Iterable
# From 2.7 on, with ``in_order=False``, a worker with room is chosen; 2.6 goes round, whoever is busy.
COUNTS_TASKS_PER_WORKER = "_workers_num_tasks" in Iterator._reset.__code__.co_names

_HOME = os.path.dirname(torch.__file__) + os.sep  # noqa: PTH120

_ITERATOR_METHODS = (
    "__init__",
    "__next__",
    "_next_index",
    "_reset",
    "_next_data",
    "_try_put_index",
    "_get_data",
    "_try_get_data",
    "_process_data",
    "_mark_worker_as_unavailable",
    "_shutdown_workers",
    "__del__",
)


def is_torchs_own(function: Any) -> bool:
    """Whether ``function`` was written in torch, by its code: ``functools.wraps`` copies names and module."""
    return isinstance(function, FunctionType) and function.__code__.co_filename.startswith(_HOME)


def get_iterator(torchs_own: Any, loader: Any, make: Callable[[Any], Any]) -> Any:
    """Runs torch's own ``DataLoader._get_iterator`` with ``make`` in place of its iterator class.

    So what else it does stays torch's, now and in versions to come: its warnings too, and the file they name.
    """
    names = {**vars(torch_dataloader), "_MultiProcessingDataLoaderIter": make, "__warningregistry__": _warned}
    return FunctionType(torchs_own.__code__, names)(loader)


# One for all calls: what was shown once is not shown again.
_warned: dict[Any, Any] = {}


def replaced_transport(get_iterator: Any) -> str | None:
    """The replaced part of torch that takes effect on torch's own path only, or None.

    ``get_iterator`` is what stands in the place of torch's ``DataLoader._get_iterator``, our hook aside.
    """
    found = torch_dataloader._MultiProcessingDataLoaderIter
    # The first may also have happened before this module was imported.
    if found.__module__ != torch_dataloader.__name__ or found is not Iterator:
        return "torch.utils.data.dataloader._MultiProcessingDataLoaderIter"
    if not is_torchs_own(get_iterator):
        return "torch.utils.data.DataLoader._get_iterator"
    return None


def replaced_control() -> str | None:
    """The replaced part of torch's control or worker, which takes effect under torch's control, or None."""
    if torch_dataloader._BaseDataLoaderIter is not BaseIterator:
        return "torch.utils.data.dataloader._BaseDataLoaderIter"
    for name in _ITERATOR_METHODS:
        for owner in (Iterator, BaseIterator):
            found = owner.__dict__.get(name)
            if found is not None and not _is_method(found, owner, name):
                return f"{owner.__name__}.{name}"
    functions = (
        (_utils.worker, "_worker_loop"),
        (_utils.pin_memory, "_pin_memory_loop"),
        (_utils.pin_memory, "pin_memory"),
    )
    for module, name in functions:
        found = getattr(module, name)
        if not is_torchs_own(found) or found.__code__.co_qualname != name:
            return f"{module.__name__}.{name}"
    if not is_torchs_own(torch_dataloader._DatasetKind.create_fetcher):
        return "_DatasetKind.create_fetcher"
    for fetcher in ("_MapDatasetFetcher", "_IterableDatasetFetcher"):
        found = getattr(_utils.fetch, fetcher)
        if not is_torchs_own(getattr(found, "fetch", None)) or not is_torchs_own(found.__init__):
            return f"torch.utils.data._utils.fetch.{fetcher}"
    return None


def _is_method(found: Any, owner: Any, name: str) -> bool:
    return is_torchs_own(found) and found.__code__.co_qualname == f"{owner.__name__}.{name}"


__all__ = [
    "COUNTS_TASKS_PER_WORKER",
    "ITERABLE",
    "BaseIterator",
    "Iterator",
    "Loader",
    "get_iterator",
    "is_torchs_own",
    "replaced_control",
    "replaced_transport",
]
