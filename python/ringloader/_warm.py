"""Memory of batches that stays warm from one epoch to the next, for workers that end with their epoch."""

from __future__ import annotations

import os
import weakref
from typing import Any

from ringloader import _native

SWITCH = "RINGLOADER_WARM"

# Bytes that the loaders which nobody iterates keep at most, and how many of them keep any.
MOST_BYTES = 256 << 20
MOST_LOADERS = 4


class Shelf:
    """Where an iterator finds the memory of its loader's last epoch, and leaves it for the next.

    Args:
        loader: Whose memory it is. It goes with the loader, which is not kept alive.
        plan: All that the memory was made for. Another plan gets new memory.
    """

    def __init__(self, loader: Any, plan: tuple[object, ...]) -> None:
        self._plan = (os.getpid(), *plan)
        self._found = _remove(loader)
        if self._found is not None and self._found[0] != self._plan:
            self._found = None
        try:
            self._loader: weakref.ref[Any] | None = weakref.ref(loader)
        except TypeError:
            self._loader = None

    @property
    def resident(self) -> int:
        """Bytes of the memory that :meth:`take` may return."""
        return 0 if self._found is None else self._found[1].resident

    def take(self, share: int) -> _native.Engine | None:
        """An engine over the memory of the last epoch, if its workers had about ``share`` bytes each."""
        found, self._found = self._found, None
        if found is None or not share // 2 <= found[1].share <= 2 * share:
            return None
        return found[1].resume()

    def keep(self, engine: _native.Engine) -> None:
        """Closes an engine whose workers have ended, and keeps its memory if it can."""
        loader = None if self._loader is None else self._loader()
        if loader is None or os.environ.get(SWITCH) == "0":
            engine.close()
            return
        _remove(loader)
        for oldest in _kept.keyrefs()[: 1 - MOST_LOADERS]:
            _remove(oldest())
        others = sum(parked.resident for _, parked in list(_kept.values()))
        parked = engine.park(max(0, MOST_BYTES - others))
        if parked is None:
            return
        try:
            _kept[loader] = (self._plan, parked)
        except TypeError:
            # A subclass that cannot be hashed goes without: dropped, the memory is given back.
            return


# The oldest first. Beside the loaders and not on them: frameworks copy and pickle loaders.
_kept: weakref.WeakKeyDictionary[Any, tuple[tuple[object, ...], _native.Parked]] = weakref.WeakKeyDictionary()


def _remove(loader: Any) -> tuple[tuple[object, ...], _native.Parked] | None:
    try:
        return _kept.pop(loader, None)
    except TypeError:
        return None
