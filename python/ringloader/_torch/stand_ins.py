"""Parts that ringloader puts in the place of torch's, and takes out again, and the memory that they fill."""

from __future__ import annotations

import inspect
import multiprocessing
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.data

import ringloader._native as _native
from ringloader._torch import collating, internals

# The worker's end of the transport in this process, for collation that is not torch's. None in a process that
# is no worker of ours. One that a worker forks gets no memory of it.
port: _native.Port | None = None

# torch's methods that move a storage to shared memory, for any caller. They may be missing: a torch
# without one of them moves no storage by it.
_SHARING = ("_share_fd_cpu_", "_share_filename_cpu_")


def replace_worker_info(of_thread: Callable[[Any], Any]) -> None:
    """Makes torch's ``get_worker_info`` return ``of_thread(info of the process)``, for all its holders.

    Its code is replaced, since code that imported the function holds the function itself.
    """
    name = "_ringloader_of_thread"
    setattr(internals.worker_module, name, of_thread)
    source = f"def get_worker_info():\n    return {name}(_worker_info)\n"
    made: dict[str, Any] = {}
    exec(compile(source, internals.worker_module.__file__, "exec"), made)
    internals.worker_module.get_worker_info.__code__ = made["get_worker_info"].__code__


def replace_new_shared(make: Callable[[Any], Any]) -> None:
    """Puts ``make(torch's own)`` in place of what allocates shared memory in a worker."""
    torchs_own = torch.UntypedStorage._new_shared.__func__  # type: ignore[attr-defined]
    torch.UntypedStorage._new_shared = classmethod(make(torchs_own))  # type: ignore[method-assign,assignment]


def is_in_worker_process() -> bool:
    """True if a loader's worker runs in this process; false in a thread of the main process."""
    return torch.utils.data.get_worker_info() is not None and multiprocessing.parent_process() is not None


def replace_sharing(make: Callable[[Any], Any]) -> None:
    """Puts ``make(torch's own)`` in place of what moves a storage to shared memory."""
    for name in _SHARING:
        torchs_own = getattr(torch.UntypedStorage, name, None)
        if torchs_own is not None:
            setattr(torch.UntypedStorage, name, make(torchs_own))


class WorkerParts:
    """torch's parts in a worker, as they are before ringloader's take their place."""

    def __init__(self) -> None:
        self._collate = collating.collate_of_columns()
        # The class method itself, and not one that is bound.
        self._new_shared = inspect.getattr_static(torch.UntypedStorage, "_new_shared")

    def restore(self) -> None:
        """Puts them back, and forgets the port."""
        global port
        port = None
        collating.replace_collate(lambda _: self._collate)
        torch.UntypedStorage._new_shared = self._new_shared  # type: ignore[method-assign]
