"""Which path a loader takes. Nothing is drawn, started or allocated here."""

from __future__ import annotations

import logging
import operator
from multiprocessing import process
from typing import Any, NamedTuple

import torch
import torch.multiprocessing

import ringloader._native as _native
from ringloader._torch import internals, replacements, versions

_logger = logging.getLogger("ringloader")
_said: set[str] = set()


def say_once(text: str) -> None:
    """Logs ``text`` as a warning, once in a process."""
    if text not in _said:
        _said.add(text)
        _logger.warning(text)


class ReasonForTorch(NamedTuple):
    """Why torch's own iterator and transport must be used."""

    text: str
    # What the user is told once where it comes to that: for what may surprise.
    warning: str | None = None


def reason_for_torch(loader: Any, get_iterator: Any) -> ReasonForTorch | None:
    """Why torch's own iterator and transport must be used, or None."""
    if loader.num_workers == 0:
        return ReasonForTorch("num_workers is 0")
    try:
        operator.index(loader.num_workers)
    except TypeError:
        # What torch has drawn by then is torch's, too.
        return ReasonForTorch("num_workers is no integer, which torch is about to refuse")
    if not _native.SUPPORTED:
        return ReasonForTorch("this platform has no memfd; shared-memory rings need Linux")
    missing = internals.missing_name()
    if missing is not None:
        reason = f"this torch has no {missing}, which ringloader needs"
        return ReasonForTorch(reason, f"{reason}; batches travel by torch's own transport")
    replaced = replacements.replaced_transport(get_iterator)
    if replaced is not None:
        reason = f"{replaced} was replaced"
        return ReasonForTorch(reason, f"{reason}, so batches travel by torch's own transport")
    kind = getattr(loader.multiprocessing_context or torch.multiprocessing, "Process", None)
    # Of a function's processes nothing is known before they are made, and by then torch has drawn.
    if not (isinstance(kind, type) and issubclass(kind, process.BaseProcess)):
        name = getattr(kind, "__qualname__", kind)
        return ReasonForTorch(f"the workers of its multiprocessing_context ({name}) need not be processes")
    return None


def check_threads(loader: Any) -> None:
    """Raises a ``ValueError`` for a loader that cannot have threads for workers, with what to change."""
    context = loader.multiprocessing_context
    if context is not None:
        raise ValueError(
            f"worker_method='thread' and multiprocessing_context={context!r} do not go together: threads are "
            "not started by a context; leave one of them out"
        )
    if isinstance(loader.dataset, internals.DATA_PIPES):
        raise ValueError(
            "worker_method='thread' and a DataPipe as dataset do not go together: each worker needs a copy "
            "of its graph; leave worker_method out, or use a Dataset"
        )


def reason_against_threads(get_iterator: Any) -> str | None:
    """Why no loader can have threads for workers here, or None."""
    if not _native.SUPPORTED:
        return "this build of ringloader has no native side; it needs Linux"
    missing = internals.missing_name() or internals.missing_for_threads()
    if missing is not None:
        return f"this torch has no {missing}, which ringloader needs"
    replaced = replacements.replaced_for_threads() or replacements.replaced_transport(get_iterator)
    return None if replaced is None else f"{replaced} was replaced"


def reason_for_rings(loader: Any) -> str | None:
    """Why torch must schedule over the rings, or None for native scheduling."""
    replaced = replacements.replaced_scheduling()
    if replaced is not None:
        say_once(f"{replaced} was replaced, so torch's own scheduling runs over the rings")
        return f"{replaced} was replaced"
    if isinstance(loader.dataset, internals.DATA_PIPES):
        return "DataPipes are torch's own matter"
    if loader.pin_memory and loader.pin_memory_device and versions.pins_for_named_device():
        return "torch's own thread pins for the device that pin_memory_device names"
    if not isinstance(loader.prefetch_factor, int) or loader.prefetch_factor <= 0:
        return "torch's constructor is about to refuse the prefetch_factor"
    return None
