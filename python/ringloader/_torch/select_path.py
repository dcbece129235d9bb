"""The path that a loader takes, and the parts of torch that must be torch's own for it.

Nothing is drawn, started or allocated here.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
from collections.abc import Sequence
from multiprocessing import process
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.multiprocessing
from torch.utils.data import dataloader as torch_dataloader

import ringloader._native as _native
from ringloader._log import logger
from ringloader._torch import internals

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

_logged: set[object] = set()

NEEDS_LINUX = "ringloader's own workers need Linux"

# The variable that sends every loader to torch's own, and its values, in any case.
SWITCH = "RINGLOADER"
_OFF = ("off", "0", "false", "no")
_ON = ("", "on", "1", "true", "yes")
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
# Functions that do what torch's do, in the place of torch's: the part, and the module that puts it there.
_KNOWN = {
    ("_BaseDataLoaderIter.__init__", "speechbrain.dataio.dataloader"),
    ("_BaseDataLoaderIter._reset", "speechbrain.dataio.dataloader"),
}
# A loader with this attribute resumes within its next epoch: speechbrain's constructor passes over indices.
_SKIPS_TO = "_speechbrain_recovery_skip_to"
_RECOVERS = "speechbrain resumes within this epoch, by torch's own iterator"


def log_once(text: str, key: object = None) -> None:
    """Logs ``text`` as a warning, once in a process for each ``key``, which is the text itself by default."""
    if (key or text) not in _logged:
        _logged.add(key or text)
        logger.warning("%s", text)


class Reason(NamedTuple):
    """The reason why torch's own loader must run whole."""

    text: str
    # The warning that the user then gets once, if the reason may surprise.
    warning: str | None = None


def is_off() -> bool:
    """True if no loader of this process may be ours."""
    return os.environ.get(SWITCH, "").lower() in _OFF


def reason_of_user() -> Reason | None:
    """Returns the reason why no loader of this process may be ours, or None: the way back to torch's.

    Raises:
        ValueError: If the variable has a value without a meaning.
    """
    value = os.environ.get(SWITCH)
    if value is None:
        return None
    if value.lower() in _OFF:
        return Reason(f"{SWITCH}={value} is set")
    if value.lower() not in _ON:
        raise ValueError(f"the environment has {SWITCH}={value!r}: set it to off, to on, or not at all")
    return None


def reason_for_torch(loader: TorchLoader, get_iterator: Any) -> Reason | None:
    """Returns why a loader with workers must be torch's own, or None.

    Args:
        loader: The loader.
        get_iterator: What stands in the place of torch's ``DataLoader._get_iterator``, our hook aside.
    """
    try:
        operator.index(loader.num_workers)
    except TypeError:
        # torch draws before it refuses, and these draws must be torch's, too.
        return Reason("num_workers is not an int: torch raises the error")
    found = _obstacle(loader, get_iterator)
    if found is not None:
        return found
    kind = getattr(loader.multiprocessing_context or torch.multiprocessing, "Process", None)
    # Nothing is known of a function's processes before they are made, and by then torch has drawn.
    if not (isinstance(kind, type) and issubclass(kind, process.BaseProcess)):
        name = getattr(kind, "__qualname__", kind)
        return Reason(f"its multiprocessing_context ({name}) may start workers that are not processes")
    return None


def reason_against_own_iterator(loader: TorchLoader, get_iterator: Any) -> Reason | None:
    """Returns why a loader without workers must be torch's own, or None."""
    missing = internals.missing_name()
    if missing is not None:
        return Reason(f"num_workers is 0, and this torch has no {missing}, which ringloader needs")
    name, cls = "_SingleProcessDataLoaderIter", internals.SingleIterator
    found = _replaced_class(name, cls, _WITHOUT_WORKERS, get_iterator)
    if found is not None:
        return Reason(f"num_workers is 0, and {found}")
    return Reason(_RECOVERS) if _recovers(loader) else None


def _obstacle(loader: TorchLoader, get_iterator: Any, is_for_threads: bool = False) -> Reason | None:
    """Returns why a loader can have no workers of ours, be they processes or threads, or None.

    Args:
        loader: The loader.
        get_iterator: As above.
        is_for_threads: True if the workers would be threads.
    """
    if not _native.SUPPORTED:
        return _without_rings()
    missing = internals.missing_name()
    if missing is not None:
        return _surprising(f"this torch has no {missing}, which ringloader needs")
    found = _replaced_for_threads() if is_for_threads else None
    found = found or _replaced_part(loader, get_iterator)
    if found is not None:
        return _surprising(found, f"; for ringloader's, {_WHAT_TO_DO}")
    if _recovers(loader):
        return Reason(_RECOVERS)
    if loader.pin_memory and loader.pin_memory_device and internals.pins_for_named_device():
        return Reason("torch's own thread pins for the device that pin_memory_device names")
    return None


def _without_rings() -> Reason:
    """Returns why a loader has no workers of ours in this installation."""
    if sys.platform != "linux":
        return Reason("this platform has no memfd; shared-memory rings need Linux")
    # pip takes that wheel where no wheel of Linux fits.
    return _surprising(
        "this is ringloader's wheel for other systems than Linux, without shared-memory rings",
        "; for ringloader's, build it here: pip install --no-binary ringloader ringloader",
    )


# With a part of torch that was replaced.
_WHAT_TO_DO = "leave out what replaced it, or put torch's back before the epoch"


def _surprising(reason: str, what_to_do: str = "") -> Reason:
    return Reason(reason, f"{reason}, so torch's own loader runs{what_to_do}")


def reason_against_threads(loader: TorchLoader, get_iterator: Any) -> Reason | None:
    """Returns why a loader cannot have threads for workers here, or None."""
    return _obstacle(loader, get_iterator, is_for_threads=True)


def _replaced_for_threads() -> str | None:
    """Returns the replaced part of torch that threads as workers cannot do without, or None."""
    function: Any = getattr(internals.worker_module, "get_worker_info", None)
    # Torch's, which reads what it is known to read; or ours already.
    if internals.is_torchs_own(function, "get_worker_info") and "_worker_info" in function.__code__.co_names:
        return None
    return _replaced(f"{internals.worker_module.__name__}.get_worker_info", function)


def _replaced_part(loader: TorchLoader, get_iterator: Any) -> str | None:
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
        function = getattr(module, name, None)
        if not internals.is_torchs_own(function, name):
            return _replaced(f"{module.__name__}.{name}", function)
    return None


def reason_against_reading(loader: TorchLoader, get_iterator: Any) -> str | None:
    """Returns the reason why torch's own loader may read the sampler in another way than ours, or None."""
    name = "_MultiProcessingDataLoaderIter" if loader.num_workers else "_SingleProcessDataLoaderIter"
    cls = getattr(torch_dataloader, name)
    if not (isinstance(cls, type) and issubclass(cls, internals.BaseIterator)):
        return f"{_replaced(f'{_DATALOADER}.{name}', cls)}, which may read the sampler in another way"
    if not internals.is_torchs_own(get_iterator, "DataLoader._get_iterator"):
        return f"{_replaced(_GET_ITERATOR, get_iterator)}, which may read the sampler in another way"
    return _RECOVERS if _recovers(loader) else None


def _replaced_class(name: str, cls: Any, methods: Sequence[str], get_iterator: Any) -> str | None:
    parts = [
        get_iterator,
        getattr(torch_dataloader, name, None),
        getattr(torch_dataloader, "_BaseDataLoaderIter", None),
        *map(vars(cls).get, methods),
        *map(vars(internals.BaseIterator).get, methods),
    ]
    if _own.get(name) == parts:
        return None
    found = _find_replaced(name, cls, methods, get_iterator)
    if found is None:
        _own[name] = parts
    return found


# By the class of iterators: parts that were found to be torch's own. The same ones need no other look.
_own: dict[str, list[Any]] = {}


def _find_replaced(name: str, cls: Any, methods: Sequence[str], get_iterator: Any) -> str | None:
    # A class that was replaced before the import, perhaps under the same name, has torch's among its bases.
    of_that_name = [one for one in cls.__mro__ if (one.__module__, one.__name__) == (_DATALOADER, name)]
    found: Any = getattr(torch_dataloader, name)
    if found is not cls or of_that_name != [cls]:
        return _replaced(f"{_DATALOADER}.{name}", found)
    if not internals.is_torchs_own(get_iterator, "DataLoader._get_iterator"):
        return _replaced(_GET_ITERATOR, get_iterator)
    base: Any = internals.BaseIterator
    found = getattr(torch_dataloader, "_BaseDataLoaderIter", None)
    if found is not base:
        return _replaced(f"{_DATALOADER}._BaseDataLoaderIter", found)
    owners: tuple[Any, ...] = (cls, base)
    for method in methods:
        for owner in owners:
            found = owner.__dict__.get(method)
            if (
                found is not None
                and not internals.is_torchs_own(found, f"{owner.__name__}.{method}")
                and not _is_known(f"{owner.__name__}.{method}", found)
            ):
                return _replaced(f"{owner.__name__}.{method}", found)
    return None


def _replaced(name: str, found: Any) -> str:
    """Says that a part of torch was replaced, and names the module if that is known."""
    while isinstance(found, functools.partial):
        found = found.func
    found = getattr(found, "__func__", found)
    # Of a function, not its `__module__`, which functools.wraps copies.
    module = getattr(found, "__globals__", {}).get("__name__")
    if module is None:
        module = (found if isinstance(found, type) else type(found)).__module__
    is_named = isinstance(module, str) and module != "builtins" and module.partition(".")[0] != "torch"
    return f"{name} was replaced by {module}" if is_named else f"{name} was replaced"


def _is_known(name: str, found: Any) -> bool:
    """True for a function of the table above."""
    return (name, getattr(found, "__globals__", {}).get("__name__")) in _KNOWN


def _recovers(loader: TorchLoader) -> bool:
    """True if speechbrain makes a loader resume within its next epoch."""
    return vars(loader).get(_SKIPS_TO) is not None
