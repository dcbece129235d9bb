"""Checks that torch's parts are still torch's own, and that no other code has put its own in their place."""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType
from typing import Any

from torch.utils.data import dataloader as torch_dataloader

from ringloader._torch import internals

# Methods of torch's iterators that ringloader's mirror. `__next__` is not among them: tools put their own
# there, which ringloader's iterators call.
_WITH_WORKERS = (
    "__init__",
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
_WITHOUT_WORKERS = ("__init__", "_next_index", "_next_data")
_DATALOADER = torch_dataloader.__name__
_GET_ITERATOR = "torch.utils.data.DataLoader._get_iterator"


def replaced_for_threads() -> str | None:
    """Returns the replaced part of torch that threads as workers cannot do without, or None."""
    function: Any = getattr(internals.worker_module, "get_worker_info", None)
    # Torch's, which reads what it is known to read; or ours already.
    if internals.is_torchs_own(function, "get_worker_info") and "_worker_info" in function.__code__.co_names:
        return None
    return f"{internals.worker_module.__name__}.get_worker_info"


def fetches_by_index(fetcher: Any) -> bool:
    """True if a fetcher is torch's own of datasets that are asked by index."""
    return _is_own_fetcher(fetcher, "_MapDatasetFetcher")


def fetches_in_turn(fetcher: Any) -> bool:
    """True if a fetcher is torch's own of iterable datasets."""
    return _is_own_fetcher(fetcher, "_IterableDatasetFetcher")


def _is_own_fetcher(fetcher: Any, name: str) -> bool:
    cls = getattr(internals.fetch_module, name, None)
    return type(fetcher) is cls and internals.is_torchs_own(cls.fetch, f"{name}.fetch")


def is_not_replaced(cls: type, name: str) -> bool:
    """True if a method of numpy's, torch's or our own is what the class was written with."""
    found = getattr(cls, name, None)
    if isinstance(found, FunctionType):
        return found.__code__.co_qualname == f"{cls.__name__}.{name}"
    return isinstance(found, type(list.__len__))


def replaced_part(loader: Any, get_iterator: Any) -> str | None:
    """Returns a replaced part of torch that ringloader mirrors for loaders with workers, or None.

    Args:
        loader: The loader.
        get_iterator: What stands in the place of torch's ``DataLoader._get_iterator``, our hook aside.
    """
    found = _replaced_class("_MultiProcessingDataLoaderIter", internals.Iterator, _WITH_WORKERS, get_iterator)
    if found is not None:
        return found
    functions = [(internals.worker_module, "_worker_loop")]
    if loader.pin_memory:
        functions += [(internals.pin_memory_module, name) for name in ("_pin_memory_loop", "pin_memory")]
    for module, name in functions:
        if not internals.is_torchs_own(getattr(module, name, None), name):
            return f"{module.__name__}.{name}"
    return None


def replaced_without_workers(get_iterator: Any) -> str | None:
    """Returns a replaced part of torch that ringloader mirrors for loaders without workers, or None."""
    name, cls = "_SingleProcessDataLoaderIter", internals.SingleIterator
    return _replaced_class(name, cls, _WITHOUT_WORKERS, get_iterator)


def replaced_reading(loader: Any, get_iterator: Any) -> str | None:
    """Returns a replaced part of torch without which its own loader need not read the sampler, or None."""
    name = "_MultiProcessingDataLoaderIter" if loader.num_workers else "_SingleProcessDataLoaderIter"
    cls = getattr(torch_dataloader, name)
    if not (isinstance(cls, type) and issubclass(cls, internals.BaseIterator)):
        return f"{_DATALOADER}.{name}"
    if not internals.is_torchs_own(get_iterator, "DataLoader._get_iterator"):
        return _GET_ITERATOR
    return None


def _replaced_class(name: str, cls: Any, methods: Sequence[str], get_iterator: Any) -> str | None:
    # A class that was replaced before the import, perhaps under the same name, has torch's among its bases.
    of_that_name = [one for one in cls.__mro__ if (one.__module__, one.__name__) == (_DATALOADER, name)]
    if getattr(torch_dataloader, name) is not cls or of_that_name != [cls]:
        return f"{_DATALOADER}.{name}"
    if not internals.is_torchs_own(get_iterator, "DataLoader._get_iterator"):
        return _GET_ITERATOR
    base: Any = internals.BaseIterator
    if getattr(torch_dataloader, "_BaseDataLoaderIter", None) is not base:
        return f"{_DATALOADER}._BaseDataLoaderIter"
    owners: tuple[Any, ...] = (cls, base)
    for method in methods:
        for owner in owners:
            found = owner.__dict__.get(method)
            if found is not None and not internals.is_torchs_own(found, f"{owner.__name__}.{method}"):
                return f"{owner.__name__}.{method}"
    return None
