"""``DataLoader.shutdown``: the end of the iterators that a loader has made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ringloader._native as _native
from ringloader._core import notes
from ringloader._core.pausing import Pausing, end, has_ended

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader


def alive(loader: TorchLoader) -> list[Any]:
    """The iterators that a loader has made in this process and that have not ended, the oldest first."""
    return [iterator for iterator in notes.iterators_of(loader) if not has_ended(iterator)]


def shut_down(loader: TorchLoader) -> None:
    """Ends the iterators that a loader has made in this process, and gives back what it keeps for others.

    Raises:
        BaseException: What ending one raised first. The others are ended nevertheless.
    """
    if notes.is_of_this_process(loader):
        # In a forked child the iterator is the parent's.
        loader._iterator = None
    errors = []
    # Newest first: with `zip(a, b)`, ending `b` first cannot leave `a` waiting.
    for iterator in reversed(alive(loader)):
        try:
            _shut_down(iterator)
        except BaseException as error:
            errors.append(error)
    if (kept := notes.beyond_iterators.pop(loader)) is not None:
        kept.close()
    if _native.SUPPORTED:
        from ringloader._features import spawn_server
        from ringloader._transport import segment_cache

        segment_cache.forget(loader)
        spawn_server.forget(loader)
    if errors:
        raise errors[0]


def _shut_down(iterator: Pausing) -> None:
    end(iterator)
    for name in ("_shutdown_workers", "close"):
        close = getattr(iterator, name, None)
        if close is not None:
            close()
            return
