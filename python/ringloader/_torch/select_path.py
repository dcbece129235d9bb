"""The path that a loader takes. Nothing is drawn, started or allocated here."""

from __future__ import annotations

import operator
import os
from multiprocessing import process
from typing import Any, NamedTuple

import torch
import torch.multiprocessing

import ringloader._native as _native
from ringloader._log import logger
from ringloader._torch import internals, replacements

_said: set[str] = set()

# The variable that sends every loader to torch's own.
SWITCH = "RINGLOADER"


def say_once(text: str) -> None:
    """Logs ``text`` as a warning, once in a process."""
    if text not in _said:
        _said.add(text)
        logger.warning(text)


class Reason(NamedTuple):
    """The reason why torch's own loader must run whole."""

    text: str
    # The warning that the user then gets once, if the reason may surprise.
    warning: str | None = None


def is_off() -> bool:
    """True if no loader of this process may be ours."""
    return os.environ.get(SWITCH) == "off"


def reason_of_user() -> Reason | None:
    """Returns the reason why no loader of this process may be ours, or None: the way back to torch's.

    Raises:
        ValueError: If the variable has a value without a meaning.
    """
    if is_off():
        return Reason(f"{SWITCH}=off is set")
    value = os.environ.get(SWITCH, "")
    if value not in ("", "on"):
        raise ValueError(f"the environment has {SWITCH}={value!r}: set it to off, to on, or not at all")
    return None


def reason_for_torch(loader: Any, get_iterator: Any) -> Reason | None:
    """Returns why a loader with workers must be torch's own, or None.

    Args:
        loader: The loader.
        get_iterator: What stands in the place of torch's ``DataLoader._get_iterator``, our hook aside.
    """
    try:
        operator.index(loader.num_workers)
    except TypeError:
        # torch draws before it refuses, and these draws must be torch's, too.
        return Reason("num_workers is no integer, which torch is about to refuse")
    if not _native.SUPPORTED:
        return Reason("this platform has no memfd; shared-memory rings need Linux")
    missing = internals.missing_name()
    if missing is not None:
        return _surprising(f"this torch has no {missing}, which ringloader needs")
    replaced = replacements.replaced_part(loader, get_iterator)
    if replaced is not None:
        return _surprising(f"{replaced} was replaced")
    if _pins_for_named_device(loader):
        return Reason("torch's own thread pins for the device that pin_memory_device names")
    kind = getattr(loader.multiprocessing_context or torch.multiprocessing, "Process", None)
    # Nothing is known of a function's processes before they are made, and by then torch has drawn.
    if not (isinstance(kind, type) and issubclass(kind, process.BaseProcess)):
        name = getattr(kind, "__qualname__", kind)
        return Reason(f"the workers of its multiprocessing_context ({name}) need not be processes")
    return None


def reason_against_own_iterator(get_iterator: Any) -> Reason | None:
    """Returns why a loader without workers must be torch's own, or None."""
    missing = internals.missing_name()
    if missing is not None:
        return Reason(f"num_workers is 0, and this torch has no {missing}, which ringloader needs")
    replaced = replacements.replaced_without_workers(get_iterator)
    return None if replaced is None else Reason(f"num_workers is 0, and {replaced} was replaced")


def _surprising(reason: str) -> Reason:
    return Reason(reason, f"{reason}, so torch's own loader runs")


def _pins_for_named_device(loader: Any) -> bool:
    return bool(loader.pin_memory and loader.pin_memory_device and internals.pins_for_named_device())


def reason_against_threads(loader: Any, get_iterator: Any) -> str | None:
    """Returns why a loader cannot have threads for workers here, or None."""
    if not _native.SUPPORTED:
        return "this build of ringloader has no native side; it needs Linux"
    missing = internals.missing_name()
    if missing is not None:
        return f"this torch has no {missing}, which ringloader needs"
    replaced = replacements.replaced_for_threads() or replacements.replaced_part(loader, get_iterator)
    if replaced is not None:
        return f"{replaced} was replaced"
    if _pins_for_named_device(loader):
        return "torch's own thread pins for the device that pin_memory_device names"
    return None
