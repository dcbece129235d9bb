"""The private names of torch that ringloader needs, as they were when this module was imported.

One that this torch does not have is no error: :func:`missing_name` tells it, and the loader is torch's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.data
from torch.utils.data import dataloader as torch_dataloader
from torch.utils.data import get_worker_info

if TYPE_CHECKING:
    # The type that torch declares for `iter(loader)`.
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    from ringloader._torch.protocols import TorchIterator

    DeclaredIterator = _BaseDataLoaderIter

# Every private name that is needed, with its owner, and those of them that are missing.
_needed: list[tuple[Any, str]] = []
_missing: list[str] = []


def _private(owner: Any, name: str) -> Any:
    """Returns the attribute ``name`` of ``owner``. If it is missing, notes that and returns None."""
    _needed.append((owner, name))
    found = getattr(owner, name, None)
    if found is None:
        _missing.append(f"{getattr(owner, '__qualname__', None) or getattr(owner, '__name__', owner)}.{name}")
    return found


def _module(name: str) -> Any:
    _needed.append((None, name))
    try:
        return importlib.import_module(name)
    except ImportError:
        _missing.append(name)
        return None


worker_module = _module("torch.utils.data._utils.worker")
fetch_module = _module("torch.utils.data._utils.fetch")
pin_memory_module = _module("torch.utils.data._utils.pin_memory")
utils_module = _module("torch.utils.data._utils")
_signal_handling = _module("torch.utils.data._utils.signal_handling")

# The classes that ours are built on, and what they use.
Loader = torch.utils.data.DataLoader
Iterator: Any = _private(torch_dataloader, "_MultiProcessingDataLoaderIter")
BaseIterator: Any = getattr(Iterator, "__base__", None)
SingleIterator: Any = _private(torch_dataloader, "_SingleProcessDataLoaderIter")
get_iterator: Any = _private(Loader, "_get_iterator")
_DatasetKind: Any = _private(torch_dataloader, "_DatasetKind")
ITERABLE = _private(_DatasetKind, "Iterable")
WorkerInfo: Any = _private(worker_module, "WorkerInfo")
InfiniteConstantSampler: Any = _private(torch_dataloader, "_InfiniteConstantSampler")
generate_state: Any = _private(worker_module, "_generate_state")
set_worker_signal_handlers: Any = _private(_signal_handling, "_set_worker_signal_handlers")
ExceptionWrapper: Any = _private(_module("torch._utils"), "ExceptionWrapper")
# Asked for by `_native`.
IterableDatasetStopIteration: Any = _private(worker_module, "_IterableDatasetStopIteration")
from_dlpack: Any = _private(_module("torch._C"), "_from_dlpack")

# If other code has replaced it, torch's own thread pins.
pin_memory: Any = _private(pin_memory_module, "pin_memory")
profiler_enabled: Any = _private(torch.autograd, "_profiler_enabled")
len_torch_function_stack: Any = _private(torch._C, "_len_torch_function_stack")
without_dispatch_modes: Any = getattr(
    _module("torch.utils._python_dispatch"), "_disable_current_modes", contextlib.nullcontext
)
StorageWeakRef: Any = _private(_module("torch.multiprocessing.reductions"), "StorageWeakRef")

# Called, overridden or replaced where they stand.
for _owner, _names in (
    (Iterator, ("_shutdown_workers",)),
    (BaseIterator, ("_reset", "_next_data", "_next_index")),
    (torch_dataloader, ("_BaseDataLoaderIter",)),
    (Loader, ("check_worker_number_rationality",)),
    (worker_module, ("_worker_loop",)),
    (fetch_module, ("_MapDatasetFetcher", "_IterableDatasetFetcher")),
    (torch.UntypedStorage, ("_new_shared",)),
):
    for _name in _names:
        _private(_owner, _name)

try:
    from torch.utils.data.datapipes.datapipe import IterDataPipe, MapDataPipe

    DATA_PIPES: tuple[type, ...] = (IterDataPipe, MapDataPipe)
    sharding_worker_init_fn: Any = _private(torch_dataloader, "_sharding_worker_init_fn")
except ImportError:
    DATA_PIPES = ()

_HOME = os.path.dirname(torch.__file__) + os.sep  # noqa: PTH120

# Attributes of a loader and of torch's iterator that ringloader reads or sets.
_ATTRIBUTES = (
    "_dataset_kind",
    "_in_order",
    "_index_sampler",
    "_num_workers",
    "_persistent_workers",
    "_pin_memory",
    "_pin_memory_device",
    "_prefetch_factor",
    "_shared_seed",
    "_shutdown",
    "_timeout",
    "_worker_init_fn",
    "_workers",
    "_workers_status",
)


def is_torchs_own(function: Any, qualname: str) -> bool:
    """True if ``function`` is torch's of that name, by its code: ``functools.wraps`` copies the names."""
    return (
        isinstance(function, FunctionType)
        and function.__code__.co_filename.startswith(_HOME)
        and function.__code__.co_qualname == qualname
    )


def _own_fetcher(name: str) -> tuple[Any, Any]:
    """Returns a class of torch's fetchers and the code of its method, if both are torch's own."""
    cls = getattr(fetch_module, name, None)
    fetch: Any = getattr(cls, "fetch", None)
    return (cls, fetch.__code__) if is_torchs_own(fetch, f"{name}.fetch") else (None, None)


_BY_INDEX, _FETCH_BY_INDEX = _own_fetcher("_MapDatasetFetcher")
_IN_TURN, _FETCH_IN_TURN = _own_fetcher("_IterableDatasetFetcher")


def fetches_by_index(fetcher: Any) -> bool:
    """True if a fetcher is torch's own of datasets that are asked by index."""
    return type(fetcher) is _BY_INDEX and getattr(_BY_INDEX.fetch, "__code__", None) is _FETCH_BY_INDEX


def fetches_in_turn(fetcher: Any) -> bool:
    """True if a fetcher is torch's own of iterable datasets."""
    return type(fetcher) is _IN_TURN and getattr(_IN_TURN.fetch, "__code__", None) is _FETCH_IN_TURN


# torch's own; None if other code has put its own there.
next_of_iterator: Any = getattr(BaseIterator, "__next__", None)
if not is_torchs_own(next_of_iterator, "_BaseDataLoaderIter.__next__"):
    next_of_iterator = None


def _missing_attributes() -> list[str]:
    """Returns attributes that no method of torch's iterators names; none where a constructor was replaced."""
    names: set[str] = set()
    for owner in (Iterator, BaseIterator):
        for name, function in vars(owner).items():
            if is_torchs_own(function, f"{owner.__name__}.{name}"):
                names.update(function.__code__.co_names)
            elif name == "__init__":
                return []
    return [f"{Iterator.__name__}.{name}" for name in _ATTRIBUTES if name not in names]


@functools.cache
def missing_name() -> str | None:
    """The first private name that ringloader needs and this torch does not have, or None."""
    return next(iter(_missing or _missing_attributes()), None)


def is_in_worker() -> bool:
    """True if this process, or this thread, is a worker of a loader."""
    return get_worker_info() is not None


def create_fetcher(*arguments: Any) -> Any:
    """Makes a fetcher as torch does in workers and without, by the function that stands there now."""
    kind: Any = torch_dataloader._DatasetKind
    return kind.create_fetcher(*arguments)


# Newer versions have these.
RNG: Any = getattr(worker_module, "_RNG", None)
set_thread_name: Callable[[str], None] = getattr(torch.multiprocessing, "_set_thread_name", lambda _: None)
# Seconds for which torch waits for workers that are to end.
JOIN_SECONDS: float = getattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 5.0)


def counts_tasks_per_worker() -> bool:
    """True if torch, with ``in_order=False``, chooses a worker with room: 2.6 goes round in any case."""
    return "_workers_num_tasks" in Iterator._try_put_index.__code__.co_names


def pins_for_named_device() -> bool:
    """True if torch pins for ``pin_memory_device``: newer ones pin for the current accelerator."""
    return "current_accelerator" not in inspect.unwrap(BaseIterator.__init__).__code__.co_names


@functools.cache
def pins_each_tensor_alike() -> bool:
    """True if torch keeps a batch's lists, tuples and dicts and pins each tensor: 2.6 makes tuples lists."""
    pinned = pin_memory(("", [""], {"": ""}), None)
    return [type(pinned), *(type(item) for item in pinned)] == [tuple, str, list, dict]


def warns_of_pickle_errors() -> bool:
    """True if torch warns of ``spawn`` and ``forkserver`` where a worker's arguments cannot be pickled."""
    return "PicklingError" in Iterator.__init__.__code__.co_names


def seeded(dataset: Any, seed: int | None) -> Any:
    """Returns a dataset whose DataPipes are seeded with the shared seed, if there is one.

    MIRRORS torch worker.py::_worker_loop.
    """
    if seed is None or not isinstance(dataset, DATA_PIPES[:1]):
        return dataset
    pipe: Any = dataset
    return torch.utils.data.graph_settings.apply_random_seed(pipe, torch.Generator().manual_seed(seed))


def init_fn_for(
    iterator: TorchIterator, init_fn: Callable[[int], object] | None
) -> Callable[[int], object] | None:
    """Returns a ``worker_init_fn`` that shards the DataPipes of an iterator before it calls ``init_fn``.

    MIRRORS torch dataloader.py::_MultiProcessingDataLoaderIter.__init__.
    """
    if not isinstance(iterator._dataset, DATA_PIPES):
        return init_fn
    return functools.partial(sharding_worker_init_fn, init_fn, iterator._world_size, iterator._rank)


def shard(iterator: TorchIterator) -> None:
    """Shards the DataPipes of an iterator without workers.

    MIRRORS torch dataloader.py::_SingleProcessDataLoaderIter.__init__.
    """
    pipe: Any = iterator._dataset
    if isinstance(iterator._dataset, DATA_PIPES):
        torch.utils.data.graph_settings.apply_sharding(pipe, iterator._world_size, iterator._rank)


def tree_flatten_with_path(batch: Any) -> tuple[list[tuple[str, Any]], Any]:
    """Returns the leaves of a batch, each after its place, and the batch's structure."""
    from torch.utils import _pytree

    leaves, structure = _pytree.tree_flatten_with_path(batch)
    return [(_pytree.keystr(path), leaf) for path, leaf in leaves], structure
