"""The objects of loaders that the processes of a pool hold, and their numbers."""

from __future__ import annotations

import collections
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any

from ringloader._options.kept import callables_of
from ringloader._start.pickled import Pickled

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader


class Entry:
    """An object of one loader or more. Not kept alive by this, where it can be referred to weakly."""

    def __init__(self, number: int, thing: Any) -> None:
        self.number = number
        # Loaders, and parcels that refer to it.
        self.users = 0
        # Sent to processes that need it. None: it was not pickled yet, or it is inherited.
        self.parcel: Parcel | None = None
        # True: it holds for one process only, and is pickled for each.
        self.is_for_each = False
        self.address = id(thing)
        self.find: Callable[[], Any]
        try:
            # A dataset may have its loader, and a loader has its pool.
            self.find = weakref.ref(thing)
        except TypeError:
            self.find = lambda: thing


class Parcel:
    """Some of what one loader has, in the state in which it was pickled.

    An object that an earlier parcel has is not pickled again: a process finds it by its number. One that has
    no parcel yet, and that the first one refers to, comes with it, so that it is one object there too.

    Args:
        first: What is pickled.
        loaders: All that its loader has.
        look: Called with the pickles, and may raise; None if nothing need be looked for.

    Raises:
        NotForAllError: If it must be pickled for each process.
        BaseException: What pickling raises, and ``look``.
    """

    def __init__(
        self, first: Entry, loaders: Sequence[Entry], look: Callable[[Any], None] | None = None
    ) -> None:
        # In the order in which they are pickled.
        self.entries = [first]
        # Entries of earlier parcels. A process must hold them before.
        self.refers: list[Entry] = []
        # The objects too: the address of one that goes meanwhile might be another's.
        things = [(one, one.find()) for one in loaders if one is not first]
        self._others = {id(thing): (one, thing) for one, thing in things if thing is not None}
        self.pickled = Pickled(self._things(), self._refer if self._others else None, look)
        self._others.clear()

    def _things(self) -> Iterator[object]:
        done = 0
        while done < len(self.entries):
            yield self.entries[done].find()
            done += 1

    def _refer(self, thing: object) -> int | None:
        entry, _ = self._others.get(id(thing), (None, None))
        if entry is None or entry.is_for_each:
            return None
        if entry.parcel is not None:
            if entry not in self.refers:
                self.refers.append(entry)
            return entry.number
        if entry not in self.entries:
            self.entries.append(entry)
        return None


class PoolObjects:
    """The objects of a pool. Used under the pool's lock, except for :meth:`note_gone`."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._entries: dict[int, Entry] = {}
        self._of_loaders: dict[int, tuple[weakref.finalize[Any, Any], list[Entry]]] = {}
        # Loaders that have gone, by address, and the numbers of what no loader has any more.
        self._gone: collections.deque[int] = collections.deque()
        self.dropped: list[int] = []

    def keep(self, loader: TorchLoader, when_gone: Callable[[int], None]) -> list[Entry]:
        """Returns what the workers of ``loader`` must hold: as it is now, which may differ from before."""
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

    def add(self, parcel: Parcel) -> None:
        """Has processes be sent a parcel, from now on; nothing where another thread was the first."""
        if any(entry.parcel is not None or entry.is_for_each for entry in parcel.entries):
            return
        for entry in parcel.entries:
            entry.parcel = parcel
        for entry in parcel.refers:
            entry.users += 1

    def renew(self, entries: Iterable[Entry]) -> None:
        """Has processes that hold these forget them, and be sent them as they are now."""
        for entry in entries:
            self.dropped.append(entry.number)
            entry.number = next(self._numbers)

    def all(self) -> dict[int, Any]:
        """Returns all objects by number, for a process that inherits them."""
        found = ((entry.number, entry.find()) for entry in self._entries.values())
        return {number: thing for number, thing in found if thing is not None}

    def note_gone(self, loader: int) -> None:
        """Notes that a loader has gone. Called from a finalizer, so anywhere: :meth:`tidy` does the rest."""
        self._gone.append(loader)

    def has_gone(self) -> bool:
        """True if :meth:`tidy` has something to do."""
        return bool(self._gone)

    def tidy(self) -> None:
        """Notes what no loader has any more."""
        while self._gone:
            self._release(self._gone.popleft())

    def _release(self, loader: int) -> None:
        ended, entries = self._of_loaders.pop(loader, (None, []))
        if ended is not None:
            ended.detach()
        self._let_go(entries)

    def _let_go(self, entries: Iterable[Entry]) -> None:
        pending = list(entries)
        while pending:
            entry = pending.pop()
            entry.users -= 1
            together = [entry] if entry.parcel is None else entry.parcel.entries
            if any(one.users for one in together):
                continue
            if entry.parcel is not None:
                pending += entry.parcel.refers
            for one in list(together):
                self.dropped.append(one.number)
                # Breaks a cycle, so that its memory goes as soon as no lease has it.
                one.parcel = None
                if self._entries.get(one.address) is one:
                    del self._entries[one.address]


def _are_same(entries: list[Entry], things: list[Any]) -> bool:
    pairs = zip(entries, things, strict=False)
    return len(entries) == len(things) and all(entry.find() is thing for entry, thing in pairs)


def _held_of(loader: TorchLoader) -> Iterable[Any]:
    yield loader.dataset
    for thing in (loader.collate_fn, loader.worker_init_fn, *callables_of(loader)):
        if thing is not None and not _has_a_name(thing):
            yield thing


def _has_a_name(thing: Any) -> bool:
    """True if every process finds it by its name. A process may have an older state of the main module."""
    if not isinstance(thing, (FunctionType, BuiltinFunctionType, type)) or thing.__module__ == "__main__":
        return False
    found: Any = sys.modules.get(thing.__module__ or "")
    for name in thing.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is thing
