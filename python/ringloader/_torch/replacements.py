"""Whether torch's parts are still torch's own, or other code has put its own in their place."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from torch.utils.data import dataloader as torch_dataloader

from ringloader._torch import internals, stand_ins

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


def replaced_for_threads() -> str | None:
    """The replaced part of torch that threads as workers cannot stand in for, or None."""
    if not internals.is_torchs_own(getattr(internals.worker_module, "_worker_loop", None), "_worker_loop"):
        return f"{internals.worker_module.__name__}._worker_loop"
    function: Any = getattr(internals.worker_module, "get_worker_info", None)
    # Torch's, which reads what it is known to read; or ours already.
    if internals.is_torchs_own(function, "get_worker_info") and "_worker_info" in function.__code__.co_names:
        return None
    return f"{internals.worker_module.__name__}.get_worker_info"


def fetches_by_index(fetcher: Any) -> bool:
    """Whether a fetcher is torch's own of datasets that are asked by index."""
    return _is_own_fetcher(fetcher, "_MapDatasetFetcher")


def fetches_in_turn(fetcher: Any) -> bool:
    """Whether a fetcher is torch's own of iterable datasets."""
    return _is_own_fetcher(fetcher, "_IterableDatasetFetcher")


def _is_own_fetcher(fetcher: Any, name: str) -> bool:
    cls = getattr(internals.fetch_module, name, None)
    return type(fetcher) is cls and internals.is_torchs_own(cls.fetch, f"{name}.fetch")


def is_not_replaced(cls: type, name: str) -> bool:
    """Whether a method of numpy's, torch's or our own is what the class was written with."""
    found = getattr(cls, name, None)
    if isinstance(found, FunctionType):
        return found.__code__.co_qualname == f"{cls.__name__}.{name}"
    return isinstance(found, type(list.__len__))


def has_own_fetcher(iterator: Any) -> bool:
    """Whether it is torch's own iterator without workers, which asks an attribute of its own for batches."""
    cls: Any = getattr(torch_dataloader, "_SingleProcessDataLoaderIter", None)
    return (
        type(iterator) is cls
        and internals.is_torchs_own(cls._next_data, "_SingleProcessDataLoaderIter._next_data")
        and hasattr(iterator, "_dataset_fetcher")
    )


def replaced_transport(get_iterator: Any) -> str | None:
    """The replaced part of torch that takes effect on torch's own path only, or None.

    ``get_iterator`` is what stands in the place of torch's ``DataLoader._get_iterator``, our hook aside.
    """
    name = "_MultiProcessingDataLoaderIter"
    # One that was replaced before the import, perhaps under the same name, has torch's among its bases.
    of_that_name = [
        cls for cls in internals.Iterator.__mro__ if (cls.__module__, cls.__name__) == (_DATALOADER, name)
    ]
    if getattr(torch_dataloader, name) is not internals.Iterator or of_that_name != [internals.Iterator]:
        return f"{_DATALOADER}.{name}"
    if not internals.is_torchs_own(get_iterator, "DataLoader._get_iterator"):
        return "torch.utils.data.DataLoader._get_iterator"
    return None


_DATALOADER = torch_dataloader.__name__


def replaced_method() -> str | None:
    """The replaced method of torch's iterator, which takes effect under torch's scheduling, or None."""
    for name in _ITERATOR_METHODS:
        for owner in (internals.Iterator, internals.BaseIterator):
            found = owner.__dict__.get(name)
            if found is not None and not internals.is_torchs_own(found, f"{owner.__name__}.{name}"):
                return f"{owner.__name__}.{name}"
    return None


def replaced_scheduling() -> str | None:
    """The replaced part of torch that takes effect only where torch schedules, or None."""
    if getattr(torch_dataloader, "_BaseDataLoaderIter", None) is not internals.BaseIterator:
        return f"{_DATALOADER}._BaseDataLoaderIter"
    method = replaced_method()
    if method is not None:
        return method
    functions = (
        (internals.worker_module, "_worker_loop"),
        (internals.pin_memory_module, "_pin_memory_loop"),
        (internals.pin_memory_module, "pin_memory"),
    )
    for module, name in functions:
        if not internals.is_torchs_own(getattr(module, name, None), name):
            return f"{module.__name__}.{name}"
    create_fetcher = getattr(torch_dataloader._DatasetKind, "create_fetcher", None)
    if create_fetcher is None or (
        create_fetcher is not stand_ins.own_create_fetcher
        and not internals.is_torchs_own(create_fetcher, "_DatasetKind.create_fetcher")
    ):
        return "_DatasetKind.create_fetcher"
    for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher"):
        fetcher = getattr(internals.fetch_module, name)
        own = internals.is_torchs_own(getattr(fetcher, "fetch", None), f"{name}.fetch") and any(
            internals.is_torchs_own(fetcher.__init__, f"{cls.__name__}.__init__") for cls in fetcher.__mro__
        )
        if not own:
            return f"{internals.fetch_module.__name__}.{name}"
    return None
