"""Which objects of loaders the processes of a pool hold, under which numbers."""

from __future__ import annotations

import collections
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, FunctionType
from typing import Any

from ringloader._options import callables_of


class Entry:
    """An object of one loader or more. Not kept alive by this, where it can be referred to weakly."""

    def __init__(self, number: int, thing: Any) -> None:
        self.number = number
        self.users = 0
        self.address = id(thing)
        self.find: Callable[[], Any]
        try:
            # A dataset may have its loader, and a loader has its pool.
            self.find = weakref.ref(thing)
        except TypeError:
            self.find = lambda: thing


class PoolObjects:
    """To be used under the pool's lock, but for :meth:`note_gone`."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._entries: dict[int, Entry] = {}
        self._of_loaders: dict[int, tuple[weakref.finalize[Any, Any], list[Entry]]] = {}
        # Loaders that have gone, by address, and the numbers of what no loader has any more.
        self._gone: collections.deque[int] = collections.deque()
        self.dropped: list[int] = []

    def keep(self, loader: Any, when_gone: Callable[[int], None]) -> list[Entry]:
        """What the workers of ``loader`` must hold: as it is now, which may be other than before."""
        self.tidy()
        things = list(_held_of(loader))
        _, entries = self._of_loaders.get(id(loader), (None, None))
        if entries is not None and _are_same(entries, things):
            return entries
        found = [self._entry(thing) for thing in things]
        for entry in found:
            entry.users += 1
        if entries is not None:
            self._release(id(loader))
        ended = weakref.finalize(loader, when_gone, id(loader))
        ended.atexit = False
        self._of_loaders[id(loader)] = (ended, found)
        return found

    def _entry(self, thing: Any) -> Entry:
        entry = self.entry_of(thing)
        if entry is None:
            entry = self._entries[id(thing)] = Entry(next(self._numbers), thing)
        return entry

    def entry_of(self, thing: Any) -> Entry | None:
        """The entry of an object that loaders have."""
        entry = self._entries.get(id(thing))
        return entry if entry is not None and entry.find() is thing else None

    def all(self) -> dict[int, Any]:
        """All objects by number, for a process that inherits them."""
        found = ((entry.number, entry.find()) for entry in self._entries.values())
        return {number: thing for number, thing in found if thing is not None}

    def note_gone(self, loader: int) -> None:
        """A loader has gone. From a finalizer, so anywhere: :meth:`tidy` follows."""
        self._gone.append(loader)

    def has_gone(self) -> bool:
        """Whether :meth:`tidy` has something to do."""
        return bool(self._gone)

    def tidy(self) -> None:
        """Notes what no loader has any more."""
        while self._gone:
            self._release(self._gone.popleft())

    def _release(self, loader: int) -> None:
        ended, entries = self._of_loaders.pop(loader, (None, []))
        if ended is not None:
            ended.detach()
        for entry in entries:
            entry.users -= 1
            if entry.users == 0:
                self.dropped.append(entry.number)
                if self._entries.get(entry.address) is entry:
                    del self._entries[entry.address]


def _are_same(entries: list[Entry], things: list[Any]) -> bool:
    pairs = zip(entries, things, strict=False)
    return len(entries) == len(things) and all(entry.find() is thing for entry, thing in pairs)


def _held_of(loader: Any) -> Iterable[Any]:
    yield loader.dataset
    for thing in (loader.collate_fn, loader.worker_init_fn, *callables_of(loader)):
        if thing is not None and not _has_a_name(thing):
            yield thing


def _has_a_name(thing: Any) -> bool:
    """Whether a process finds it by its name, at any time: of the main module it may have an older state."""
    if not isinstance(thing, (FunctionType, BuiltinFunctionType, type)) or thing.__module__ == "__main__":
        return False
    found: Any = sys.modules.get(thing.__module__ or "")
    for name in thing.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is thing
