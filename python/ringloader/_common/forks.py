"""Tells the native side of each fork of this process: a child has the memory of the batches that are held."""

from __future__ import annotations

import functools
import os

import ringloader._native as _native


@functools.cache
def tell_native() -> None:
    """Begins to tell it, in this process and those that it forks; not of children that C code forks."""
    os.register_at_fork(
        before=_native.before_fork,
        after_in_parent=_native.after_fork_in_parent,
        after_in_child=_native.after_fork_in_child,
    )
