"""The iterators that a loader has made, and their end before their time."""

from __future__ import annotations

import weakref
from typing import Any

import ringloader._native as _native
from ringloader._common import weak_registry
from ringloader._iterator import pausing
from ringloader._start import spawn
from ringloader._transport import segment_cache

# Iterators of a loader, each with the process that made it.
_Made = list[tuple[object, "weakref.ref[Any]"]]
_made: weak_registry.WeakRegistry[_Made] = weak_registry.WeakRegistry()


def note(loader: Any, iterator: Any) -> None:
    """Notes an iterator of a loader, and keeps neither alive."""
    try:
        reference = weakref.ref(iterator)
    except TypeError:
        # An iterator that other code makes, without weak references, is that code's to end.
        return
    alive = [one for one in _made.get(loader) or () if one[1]() is not None]
    _made.put(loader, [*alive, (_native.process_identity(), reference)])


def alive(loader: Any) -> list[Any]:
    """The iterators that a loader has made in this process and that are still there, the oldest first."""
    here = _native.process_identity()
    found = [reference() for process, reference in _made.get(loader) or () if process == here]
    return [iterator for iterator in found if iterator is not None]


def shut_down(loader: Any) -> None:
    """Ends the iterators that a loader has made in this process, and gives back what it keeps for others.

    Raises:
        BaseException: What ending one raised first. The others are ended nevertheless.
    """
    here = _native.process_identity()
    made = _made.pop(loader) or []
    ours = [iterator for process, found in made if process == here and (iterator := found()) is not None]
    if not any(process != here for process, _ in made):
        # Else, in a forked child, it is the parent's.
        loader._iterator = None
    errors = []
    # The newest first: what others were zipped with waits for nothing.
    for iterator in reversed(ours):
        try:
            _end(iterator)
        except BaseException as error:
            errors.append(error)
    segment_cache.forget(loader)
    spawn.forget(loader)
    if errors:
        raise errors[0]


def _end(iterator: Any) -> None:
    if isinstance(iterator, pausing.Pausing):
        pausing.end(iterator)
    for name in ("_shutdown_workers", "close"):
        close = getattr(iterator, name, None)
        if close is not None:
            close()
            return
