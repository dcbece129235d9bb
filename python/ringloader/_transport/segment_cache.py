"""Memory of batches that stays warm from one epoch to the next, for workers that end with their epoch."""

from __future__ import annotations

import os
import resource
import weakref
from typing import TYPE_CHECKING, Protocol

import ringloader._native as _native
from ringloader._common import weak_registry

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

SWITCH = "RINGLOADER_WARM"

# Bytes that loaders keep at most while they are not iterated, and how many of them keep any.
MOST_BYTES = 256 << 20
MOST_LOADERS = 4
# The part of all descriptors that they may take together, and of the memory that is left.
_PART = 4


class Beside(Protocol):
    """An object of a feature that goes with the memory of an engine, from one epoch to the next."""

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that cannot be given back while it is open."""

    def close(self) -> None:
        """Ends it. Nothing uses the memory in its way any more."""


class SegmentCache:
    """The place where an iterator finds memory of its loader's last epoch, and leaves it for the next.

    Args:
        loader: Whose memory it is. It goes with the loader, which is not kept alive.
        workers: How many share it.
        plan: All else that the memory was made for. Another plan gets new memory.
    """

    def __init__(self, loader: TorchLoader, workers: int, plan: tuple[object, ...]) -> None:
        self._workers = workers
        self._plan = (_native.process_identity(), workers, *plan)
        self._found = _warm.pop(loader)
        if self._found is not None and self._found[0] != self._plan:
            _end(self._found)
            self._found = None
        self._loader = weakref.ref(loader)

    @property
    def resident(self) -> int:
        """Bytes of the memory that :meth:`take` may return."""
        return 0 if self._found is None else self._found[1].resident

    def take(self, share: int) -> tuple[_native.Engine, Beside | None] | None:
        """An engine over the memory of the last epoch, if its workers had about ``share`` bytes each.

        With what is beside it.
        """
        found, self._found = self._found, None
        if found is None:
            return None
        if not share // 2 <= found[1].share <= 2 * share:
            _end(found)
            return None
        return found[1].take(), found[2]

    def store(self, engine: _native.Engine, beside: Beside | None = None) -> None:
        """Closes an engine whose workers have ended. Keeps its and the neighbouring memory, if it can."""
        if not self._store(engine, beside) and beside is not None:
            beside.close()

    def _store(self, engine: _native.Engine, beside: Beside | None) -> bool:
        loader = self._loader()
        if loader is None or os.environ.get(SWITCH) == "0" or not _is_affordable(self._workers):
            engine.close()
            return False
        _warm.pop(loader)
        _warm.keep_newest(MOST_LOADERS - 1)
        others = sum(segment.resident for _, segment, _ in _warm.values())
        most = min(MOST_BYTES, _native.available_memory() // _PART)
        most = max(0, most - others)
        if beside is not None and beside.nbytes > most:
            beside.close()
            beside = None
        segment = engine.store(most)
        if segment is None:
            return False
        _warm.put(loader, (self._plan, segment, beside))
        # Other threads may have put theirs meanwhile.
        _warm.keep_newest(MOST_LOADERS)
        return True


def forget(loader: TorchLoader) -> None:
    """Gives back what is kept for the next epoch of a loader, if anything is. In a forked child nothing."""
    found = _warm.get(loader)
    if found is None or found[0][0] != _native.process_identity():
        return
    _warm.pop(loader)
    _end(found)


def _end(found: _Warm) -> None:
    """Ends the memory next to memory that is not used again."""
    if found[2] is not None:
        found[2].close()


_Warm = tuple[tuple[object, ...], "_native.CachedSegment", Beside | None]
_warm: weak_registry.WeakRegistry[_Warm] = weak_registry.WeakRegistry()


def _is_affordable(workers: int) -> bool:
    """True if the process can spare the descriptors and the address space of what is kept."""
    # Segment, watch, bell and the process's own handle; each worker's bell.
    descriptors = MOST_LOADERS * (4 + workers)
    try:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    except OSError:
        # A sandbox may refuse the question. To keep memory is optional.
        return False
    enough = most == resource.RLIM_INFINITY or _PART * descriptors <= most
    return enough and address_space == resource.RLIM_INFINITY
