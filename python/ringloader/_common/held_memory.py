"""Memory of batches that others still read: children that this process forks, and views made before.

torch moves a storage to shared memory when it is shared with another process. Arrays and DLPack capsules that
were made of it before still read the old memory. All of them hold the storage, so the old memory stays for as
long as the storage. A weak reference tells when the storage is gone. It is looked at when the next storage is
moved, and when an iterator is made.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import ringloader._native as _native
from ringloader._torch import internals, stand_ins

# Weak references to storages that torch has moved, each with the object that keeps its old memory. Not as an
# attribute of the storage: torch 2.6 lets the garbage collector take attributes of a storage that lives on.
kept_views: list[tuple[Any, _native.Kept]] = []


@functools.cache
def tell_of_forks() -> None:
    """Tells the native side of each fork, whose child has the memory of the batches that are held.

    Of this process and those that it forks; not of children that C code forks.
    """
    os.register_at_fork(
        before=_native.before_fork,
        after_in_parent=_native.after_fork_in_parent,
        after_in_child=_native.after_fork_in_child,
    )


def drop_unread() -> None:
    """Drops the old memory of storages that are gone, and all views with them."""
    # Other threads, and finalizers, may come between any two of these steps.
    for entry in list(kept_views):
        if entry[0].expired():
            # Another thread may be faster.
            with contextlib.suppress(ValueError):
                kept_views.remove(entry)


def _keeping(torchs_own: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``torchs_own`` in a wrapper that keeps what our deleters would drop during the call."""

    @functools.wraps(torchs_own)
    def share(self: Any, *args: Any, **options: Any) -> Any:
        drop_unread()
        kept = _native.Kept()
        try:
            return torchs_own(self, *args, **options)
        finally:
            if kept.finish():
                kept_views.append((internals.StorageWeakRef(self), kept))

    return share


@functools.cache
def keep_views() -> None:
    """Keeps views from now on: in the main process, and in workers, where collate hands out slot memory."""
    stand_ins.replace_sharing(_keeping)
