"""The private parts of torch that ringloader stands in for, and whether they are still torch's own.

All private names of torch stand here. One that this torch does not have is no error: :func:`missing_name`
tells it, and the loader is torch's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import os
import warnings
from collections.abc import Callable, Generator
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import TYPE_CHECKING, Any, cast

import numpy
import torch
import torch.utils.data
from torch.utils.data import dataloader as torch_dataloader

if TYPE_CHECKING:
    # What torch says that `iter(loader)` is.
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    DeclaredIterator = _BaseDataLoaderIter

# Every private name that is needed, with its owner, and those of them that are missing.
_needed: list[tuple[Any, str]] = []
_missing: list[str] = []


def _private(owner: Any, name: str) -> Any:
    """What ``name`` is in ``owner``; None, and noted, when it is missing."""
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


_worker = _module("torch.utils.data._utils.worker")
_fetch = _module("torch.utils.data._utils.fetch")
_pin_memory = _module("torch.utils.data._utils.pin_memory")
_signal_handling = _module("torch.utils.data._utils.signal_handling")

# As they were when this module was imported: what ours are built on.
Loader = torch.utils.data.DataLoader
Iterator: Any = _private(torch_dataloader, "_MultiProcessingDataLoaderIter")
BaseIterator: Any = getattr(Iterator, "__base__", None)
_DatasetKind: Any = _private(torch_dataloader, "_DatasetKind")
ITERABLE = _private(_DatasetKind, "Iterable")
# Of a dataset that is asked for nothing before its first batch.
MAP = _private(_DatasetKind, "Map")
# Of an iterator without workers, as `worker_reset_fn` is given it.
worker_info: Any = _private(_worker, "WorkerInfo")
InfiniteConstantSampler: Any = _private(torch_dataloader, "_InfiniteConstantSampler")
ResumeIteration: Any = _private(_worker, "_ResumeIteration")
set_worker_pids: Any = _private(_signal_handling, "_set_worker_pids")
remove_worker_pids: Any = _private(_signal_handling, "_remove_worker_pids")
ExceptionWrapper: Any = _private(_module("torch._utils"), "ExceptionWrapper")
# Asked for by `_native`.
IterableDatasetStopIteration: Any = _private(_worker, "_IterableDatasetStopIteration")
from_dlpack: Any = _private(_module("torch._C"), "_from_dlpack")

# As it was when this module was imported; where it was replaced, torch's own thread pins.
pin_memory: Any = _private(_pin_memory, "pin_memory")
profiler_enabled: Any = _private(torch.autograd, "_profiler_enabled")
len_torch_function_stack: Any = _private(torch._C, "_len_torch_function_stack")

# A torch without one of these collates itself.
_collation: Any = torch.utils.data._utils.collate
collate_fn_map: dict[Any, Any] = getattr(_collation, "default_collate_fn_map", {})
# What it has, and what of torch the functions call.
_COLLATING = ("stack", "tensor", "as_tensor")
_COLLATE_FN_MAP: dict[Any, str] = {
    torch.Tensor: "collate_tensor_fn",
    numpy.ndarray: "collate_numpy_array_fn",
    (numpy.bool_, numpy.number, numpy.object_): "collate_numpy_scalar_fn",
    float: "collate_float_fn",
    int: "collate_int_fn",
    str: "collate_str_fn",
    bytes: "collate_str_fn",
}
# How many modes have a say in what torch's functions do.
_MODES = ("_len_torch_function_stack", "_len_torch_dispatch_stack")
MODES = [getattr(torch._C, name) for name in _MODES if hasattr(torch._C, name)]

_pop_function_mode: Any = getattr(torch.overrides, "_pop_mode_temporarily", None)
_without_dispatch_modes: Any = getattr(
    _module("torch.utils._python_dispatch"), "_disable_current_modes", contextlib.nullcontext
)


def is_in_modes() -> bool:
    """Whether modes of this thread have a say in what torch's functions do."""
    return any(count() for count in MODES)


@contextlib.contextmanager
def without_modes() -> Generator[None]:
    """As in a thread of its own: no mode, a default device neither, has a say in torch's functions."""
    with contextlib.ExitStack() as stack:
        while _pop_function_mode and len_torch_function_stack():
            stack.enter_context(_pop_function_mode())
        stack.enter_context(_without_dispatch_modes())
        yield


StorageWeakRef: Any = _private(_module("torch.multiprocessing.reductions"), "StorageWeakRef")
# By which torch moves a storage to shared memory, for any caller. Not needed: a torch without one of them
# moves none by it.
_SHARING = ("_share_fd_cpu_", "_share_filename_cpu_")

# Called, overridden or replaced where they stand.
for _owner, _names in (
    (Loader, ("_get_iterator",)),
    (Iterator, ("_mark_worker_as_unavailable", "_shutdown_workers")),
    (BaseIterator, ("_reset", "_next_data", "_next_index")),
    (torch_dataloader, ("_BaseDataLoaderIter", "_SingleProcessDataLoaderIter")),
    (_worker, ("_worker_loop",)),
    (_fetch, ("_MapDatasetFetcher", "_IterableDatasetFetcher")),
    (torch.UntypedStorage, ("_new_shared",)),
):
    for _name in _names:
        _private(_owner, _name)

try:
    from torch.utils.data.datapipes.datapipe import IterDataPipe, MapDataPipe

    DATA_PIPES: tuple[type, ...] = (IterDataPipe, MapDataPipe)
except ImportError:
    DATA_PIPES = ()

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


# What ringloader reads of, or sets on, a loader and torch's iterator.
_ATTRIBUTES = (
    "_dataset_kind",
    "_in_order",
    "_index_queues",
    "_index_sampler",
    "_num_workers",
    "_persistent_workers",
    "_pin_memory",
    "_pin_memory_device",
    "_prefetch_factor",
    "_shared_seed",
    "_shutdown",
    "_timeout",
    "_worker_pids_set",
    "_workers",
    "_workers_done_event",
    "_workers_status",
)


def _missing_attributes() -> list[str]:
    """Those that torch's constructors never name. Of constructors that were replaced nothing is known."""
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
    """Whether this process, or this thread, is a worker of a loader."""
    return torch.utils.data.get_worker_info() is not None


def replaced_for_threads() -> str | None:
    """The replaced part of torch that threads as workers cannot stand in for, or None."""
    if not is_torchs_own(getattr(_worker, "_worker_loop", None), "_worker_loop"):
        return f"{_worker.__name__}._worker_loop"
    function: Any = getattr(_worker, "get_worker_info", None)
    # Torch's, which reads what it is known to read; or ours already.
    if is_torchs_own(function, "get_worker_info") and "_worker_info" in function.__code__.co_names:
        return None
    return f"{_worker.__name__}.get_worker_info"


def replace_worker_info(of_thread: Callable[[Any], Any]) -> None:
    """Has torch's ``get_worker_info`` return ``of_thread(that of the process)``, for whoever holds it.

    Its code is replaced, since code that imported the function holds the function itself.
    """
    name = "_ringloader_of_thread"
    setattr(_worker, name, of_thread)
    source = f"def get_worker_info():\n    return {name}(_worker_info)\n"
    made: dict[str, Any] = {}
    exec(compile(source, _worker.__file__, "exec"), made)
    _worker.get_worker_info.__code__ = made["get_worker_info"].__code__


def create_fetcher(*arguments: Any) -> Any:
    """A fetcher, as torch makes one in workers and without, by what stands there now."""
    kind: Any = torch_dataloader._DatasetKind
    return kind.create_fetcher(*arguments)


def missing_for_threads() -> str | None:
    """The private name of torch that threads as workers need and this torch does not have, or None."""
    needed = ("WorkerInfo", "_generate_state")
    return next((f"{_worker.__name__}.{name}" for name in needed if not hasattr(_worker, name)), None)


WorkerInfo: Any = getattr(_worker, "WorkerInfo", None)
# Of newer versions.
RNG: Any = getattr(_worker, "_RNG", None)
generate_state: Any = getattr(_worker, "_generate_state", None)
set_thread_name: Callable[[str], None] = getattr(torch.multiprocessing, "_set_thread_name", lambda _: None)
# Seconds for which torch waits for workers that are to end.
JOIN_SECONDS: float = getattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 5.0)


def is_torchs_own(function: Any, qualname: str) -> bool:
    """Whether ``function`` is torch's of that name, by its code: ``functools.wraps`` copies the names."""
    return isinstance(function, FunctionType) and _is_torchs_code(function.__code__, qualname)


def _is_torchs_code(code: CodeType, qualname: str) -> bool:
    return code.co_filename.startswith(_HOME) and code.co_qualname == qualname


def drop_fetcher(iterator: Any) -> None:
    """Has an iterator without workers let go of its dataset's iterator, as the end of workers does."""
    vars(iterator).pop("_dataset_fetcher", None)


def counts_tasks_per_worker() -> bool:
    """Whether torch, with ``in_order=False``, chooses a worker with room: 2.6 goes round in any case."""
    return "_workers_num_tasks" in Iterator._try_put_index.__code__.co_names


def pins_for_named_device() -> bool:
    """Whether torch pins for ``pin_memory_device``: newer ones pin for the current accelerator."""
    return "current_accelerator" not in BaseIterator.__init__.__code__.co_names


def on_cuda_device_in_use() -> contextlib.AbstractContextManager[Any]:
    """Makes a device of this process's the current one that has a context, if there is one."""
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    devices = range(torch.cuda.device_count()) if has_context is not None else ()
    in_use = next((index for index in devices if has_context and has_context(index)), None)
    return contextlib.nullcontext() if in_use is None else torch.cuda.device(in_use)


def current_device_index() -> int:
    """Of the device that torch pins for, as its pinning thread finds it."""
    return int(torch.accelerator.current_device_index())


@functools.cache
def pins_each_tensor_alike() -> bool:
    """Whether torch keeps a batch's lists, tuples and dicts and pins each tensor: 2.6 makes tuples lists."""
    pinned = pin_memory(("", [""], {"": ""}), None)
    return [type(pinned), *(type(item) for item in pinned)] == [tuple, str, list, dict]


def parts_of_collate() -> list[tuple[dict[str, Any], str, Any]]:
    """What torch's ``collate`` calls: variables, a name in them, its value."""
    return [(vars(torch), name, getattr(torch, name)) for name in _COLLATING]


def parts_of_convert(function: Any) -> list[tuple[dict[str, Any], str, Any]]:
    """The same for ``default_convert``; nothing for any other function, and where it was replaced."""
    ours, name = vars(_collation), "default_convert"
    return [(ours, name, function)] if function is ours.get(name) and is_torchs_own(function, name) else []


def parts_of_default_collate() -> list[tuple[dict[str, Any], str, Any]]:
    """What torch's ``default_collate`` calls, itself too."""
    ours = vars(_collation)
    return [*parts_of_collate(), *((ours, name, ours[name]) for name in ("collate", "default_collate"))]


def is_default_collate(function: Any) -> bool:
    """Whether it is torch's own ``default_collate``."""
    own = function is getattr(_collation, "default_collate", None)
    return own and is_torchs_own(function, "default_collate")


def collate_of_columns() -> Any:
    """What ``default_collate`` calls, and what calls itself for what is in containers."""
    return _collation.collate


def collates_rows(fetcher: Any, stand_in: type) -> bool:
    """Whether a fetcher is torch's own for lists of samples, which it gives to torch's ``default_collate``.

    In a worker ``stand_in`` is the class of what may stand in for the ``collate`` that this calls.
    """
    cls = getattr(_fetch, "_MapDatasetFetcher", None)
    return (
        type(fetcher) is cls
        and is_torchs_own(cls.fetch, "_MapDatasetFetcher.fetch")
        and fetcher.auto_collation
        and is_default_collate(fetcher.collate_fn)
        and collates_as_torch(stand_in)
        and not _others_collate_rows()
    )


def _others_collate_rows() -> bool:
    """Whether others taught ``default_collate`` what to make of arrays' rows, tuples or dicts."""
    for other in others_in_collate():
        for cls in other if isinstance(other, tuple) else (other,):
            if not isinstance(cls, type) or issubclass(cls, (numpy.generic, numpy.memmap)):
                return True
            if any(issubclass(kind, cls) for kind in (tuple, dict, numpy.generic, numpy.ndarray)):
                return True
    return False


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
        and is_torchs_own(cls._next_data, "_SingleProcessDataLoaderIter._next_data")
        and hasattr(iterator, "_dataset_fetcher")
    )


def replace_fetcher(iterator: Any, make: Callable[[Any], Any]) -> None:
    """Puts ``make(its fetcher)`` in place of what an iterator without workers asks for batches."""
    iterator._dataset_fetcher = make(iterator._dataset_fetcher)


def collates_as_torch(stand_in: type | tuple[()] = ()) -> bool:
    """Whether torch's ``default_collate`` is made of what torch has made it of, or of a stand-in of ours."""
    collate = getattr(_collation, "collate", None)
    return (
        is_torchs_own(getattr(_collation, "default_collate", None), "default_collate")
        and (isinstance(collate, stand_in) or is_torchs_own(collate, "collate"))
        and list(collate_fn_map)[: len(_COLLATE_FN_MAP)] == list(_COLLATE_FN_MAP)
        and all(is_torchs_own(collate_fn_map[key], name) for key, name in _COLLATE_FN_MAP.items())
        and all(isinstance(getattr(torch, name), BuiltinFunctionType) for name in _COLLATING)
    )


def others_in_collate() -> list[Any]:
    """The classes that others taught torch's ``default_collate``, which it asks after its own."""
    return list(collate_fn_map)[len(_COLLATE_FN_MAP) :]


def replace_collate(make: Callable[[Any], Any]) -> None:
    """Puts ``make(torch's own)`` in place of the ``collate`` that torch's ``default_collate`` calls."""
    _collation.collate = make(_collation.collate)


def replace_new_shared(make: Callable[[Any], Any]) -> None:
    """Puts ``make(torch's own)`` in place of what allocates shared memory in a worker."""
    torchs_own = torch.UntypedStorage._new_shared.__func__  # type: ignore[attr-defined]
    torch.UntypedStorage._new_shared = classmethod(make(torchs_own))  # type: ignore[method-assign,assignment]


def is_in_worker_process() -> bool:
    """Whether this is a process in which a loader's worker runs, and no thread of the main process."""
    return torch.utils.data.get_worker_info() is not None and multiprocessing.parent_process() is not None


def new_shared(size: int) -> torch.UntypedStorage | None:
    """Shared memory of so many bytes, as ``default_collate`` has it in a worker; None if torch has no way."""
    allocate = getattr(torch.UntypedStorage, "_new_shared", None)
    return None if allocate is None else cast("torch.UntypedStorage", allocate(size))


def replace_sharing(make: Callable[[Any], Any]) -> None:
    """Puts ``make(torch's own)`` in place of what moves a storage to shared memory."""
    for name in _SHARING:
        torchs_own = getattr(torch.UntypedStorage, name, None)
        if torchs_own is not None:
            setattr(torch.UntypedStorage, name, make(torchs_own))


def replace_create_fetcher(make: Callable[[Any], Any]) -> None:
    """Puts ``make(torch's own)`` in place of what makes the fetchers of torch's worker loop."""
    global _own_create_fetcher
    kind = torch_dataloader._DatasetKind
    _own_create_fetcher = make(kind.create_fetcher)
    kind.create_fetcher = staticmethod(_own_create_fetcher)  # type: ignore[method-assign]


class WorkerParts:
    """What a worker has of torch's, as it is now, before ours is put in its place."""

    def __init__(self) -> None:
        self._collate = _collation.collate
        self._new_shared = vars(torch.UntypedStorage).get("_new_shared")
        self._create_fetcher = vars(torch_dataloader._DatasetKind)["create_fetcher"]
        self._own_create_fetcher = _own_create_fetcher

    def restore(self) -> None:
        """Puts it back, and ends what the worker loop of older torch leaves behind."""
        global _own_create_fetcher
        _collation.collate = self._collate
        if self._new_shared is None:
            if "_new_shared" in vars(torch.UntypedStorage):
                del torch.UntypedStorage._new_shared
        else:
            torch.UntypedStorage._new_shared = self._new_shared  # type: ignore[method-assign]
        torch_dataloader._DatasetKind.create_fetcher = self._create_fetcher  # type: ignore[method-assign]
        _own_create_fetcher = self._own_create_fetcher
        _worker._worker_info = None


# Ours in this worker, which leaves the fetchers of other loaders alone.
_own_create_fetcher: Any = None


def is_code_of_worker_loop(code: CodeType) -> bool:
    """Whether it is the code of torch's own worker loop."""
    return _is_torchs_code(code, "_worker_loop")


def get_iterator(
    torchs_own: Any,
    loader: Any,
    make: Callable[[Any], Any],
    make_without_workers: Callable[[Any], Any] | None = None,
) -> Any:
    """Runs torch's own ``DataLoader._get_iterator`` with ``make`` in place of its iterator class.

    So what else it does stays torch's, now and in versions to come: its warnings too, and the file they name.
    """
    # A dict for each call, since threads may iterate at once.
    names = {**_get_iterator_globals, "_MultiProcessingDataLoaderIter": make}
    if make_without_workers is not None:
        names["_SingleProcessDataLoaderIter"] = make_without_workers
    return FunctionType(torchs_own.__code__, names)(loader)


def get_iterator_of_torch(torchs_own: Any, loader: Any, view: Callable[[Any], Any]) -> Any:
    """As torch's own ``_get_iterator``, with ``view(loader)`` in the place of the loader for the iterator."""

    def make(name: str) -> Callable[[Any], Any]:
        return lambda loader: call_from_torch(getattr(torch_dataloader, name), view(loader))

    without_workers = make("_SingleProcessDataLoaderIter")
    return get_iterator(torchs_own, loader, make("_MultiProcessingDataLoaderIter"), without_workers)


# One registry for all calls: a warning that was shown once is not shown again.
_get_iterator_globals = {**vars(torch_dataloader), "__warningregistry__": {}}


def _torchs_call() -> Callable[[Callable[[Any], Any], Any], Any]:
    """``function(argument)`` from a frame that passes for torch's own.

    Warnings of torch's constructor name the file that called it, and filters go by that. A traceback shows
    the line: it is that of torch's own call, the last in ``_get_iterator``, and reads like it.
    """
    own = getattr(getattr(Loader, "_get_iterator", None), "__code__", None)
    line = 2 if own is None else max(line for _, _, line in own.co_lines() if line is not None)
    head = "def _get_iterator(_MultiProcessingDataLoaderIter, self):\n"
    body = f"{'':12}return _MultiProcessingDataLoaderIter(self)\n"
    exec(compile("\n" * (line - 2) + head + body, torch_dataloader.__file__, "exec"), _get_iterator_globals)
    return cast(Callable[[Callable[[Any], Any], Any], Any], _get_iterator_globals.pop("_get_iterator"))


call_from_torch = _torchs_call()


class _WarningsFromBeneath:
    """The module ``warnings`` for code of torch's that runs one frame deeper than it takes for granted."""

    def warn(
        self, message: Any, category: type[Warning] | None = None, stacklevel: int = 1, **others: Any
    ) -> None:
        # This frame, and, where the warning names torch's caller, the function of ours which called torch's.
        warnings.warn(message, category, stacklevel + (2 if stacklevel > 1 else 1), **others)

    def __getattr__(self, name: str) -> Any:
        return getattr(warnings, name)


def _from_beneath(function: Any) -> Any:
    """A function of torch's, to be called by one of ours in its place: warnings still name the caller."""
    if not isinstance(function, FunctionType):
        return function
    names = {**function.__globals__, "warnings": _WarningsFromBeneath()}
    made = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


# As it was when this module was imported.
torchs_next: Any = getattr(Iterator, "__next__", None)
next_from_beneath: Any = _from_beneath(torchs_next)


def replaced_transport(get_iterator: Any) -> str | None:
    """The replaced part of torch that takes effect on torch's own path only, or None.

    ``get_iterator`` is what stands in the place of torch's ``DataLoader._get_iterator``, our hook aside.
    """
    name = "_MultiProcessingDataLoaderIter"
    # One that was replaced before the import, perhaps under the same name, has torch's among its bases.
    of_that_name = [cls for cls in Iterator.__mro__ if (cls.__module__, cls.__name__) == (_DATALOADER, name)]
    if getattr(torch_dataloader, name) is not Iterator or of_that_name != [Iterator]:
        return f"{_DATALOADER}.{name}"
    if not is_torchs_own(get_iterator, "DataLoader._get_iterator"):
        return "torch.utils.data.DataLoader._get_iterator"
    return None


_DATALOADER = torch_dataloader.__name__


def replaced_method() -> str | None:
    """The replaced method of torch's iterator, which takes effect under torch's scheduling, or None."""
    for name in _ITERATOR_METHODS:
        for owner in (Iterator, BaseIterator):
            found = owner.__dict__.get(name)
            if found is not None and not is_torchs_own(found, f"{owner.__name__}.{name}"):
                return f"{owner.__name__}.{name}"
    return None


def replaced_scheduling() -> str | None:
    """The replaced part of torch that takes effect only where torch schedules, or None."""
    if getattr(torch_dataloader, "_BaseDataLoaderIter", None) is not BaseIterator:
        return f"{_DATALOADER}._BaseDataLoaderIter"
    method = replaced_method()
    if method is not None:
        return method
    functions = ((_worker, "_worker_loop"), (_pin_memory, "_pin_memory_loop"), (_pin_memory, "pin_memory"))
    for module, name in functions:
        if not is_torchs_own(getattr(module, name, None), name):
            return f"{module.__name__}.{name}"
    create_fetcher = getattr(torch_dataloader._DatasetKind, "create_fetcher", None)
    if create_fetcher is None or (
        create_fetcher is not _own_create_fetcher
        and not is_torchs_own(create_fetcher, "_DatasetKind.create_fetcher")
    ):
        return "_DatasetKind.create_fetcher"
    for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher"):
        fetcher = getattr(_fetch, name)
        own = is_torchs_own(getattr(fetcher, "fetch", None), f"{name}.fetch") and any(
            is_torchs_own(fetcher.__init__, f"{cls.__name__}.__init__") for cls in fetcher.__mro__
        )
        if not own:
            return f"{_fetch.__name__}.{name}"
    return None


@contextlib.contextmanager
def _stream_context(stream: Any) -> Any:
    """``with stream``, which torch 2.6 does not have."""
    device = torch.accelerator.current_device_index()
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        # Each sets the device too.
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(device)


# What makes a stream, and its device, the current ones.
stream_context: Callable[[Any], Any] = (
    (lambda stream: stream) if hasattr(torch.Stream, "__enter__") else _stream_context
)


def device_in_bad_fork() -> str | None:
    """A device that was initialised in the process from which this one was forked, and is unusable here.

    Of those which do not tell this: one that was initialised at all.
    """
    get_name = getattr(torch._C, "_get_privateuse1_backend_name", None)
    names: list[str] = [*_DEVICES, *([] if get_name is None else [get_name()])]
    for name in dict.fromkeys(names):
        device = getattr(torch, name, None)
        ask = getattr(device, "_is_in_bad_fork", None) or getattr(device, "is_initialized", None)
        # Where one's package is there without its other half.
        with contextlib.suppress(AttributeError, NotImplementedError):
            if ask is not None and ask():
                return name
    return None


# `hpu` is put there by its own package; a device of a name of its own is the private one.
_DEVICES = ("cuda", "xpu", "mps", "mtia", "hpu")
