"""Notes of loaders and their iterators, for reports: paths, and what is counted. They keep none alive.

INVARIANT: there is no lock. An end of a loader or an iterator may come between any two steps of a thread, so
each use of a list is one step for the interpreter.
"""

from __future__ import annotations

import collections
import os
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ringloader._common.attributes import attribute
from ringloader._common.weak_registry import WeakRegistry

if TYPE_CHECKING:
    from ringloader._common.protocols import OurIterator, PathName

# The number of loaders that are remembered: the newest ones.
MOST = 1000


class LoaderNotes:
    """The notes of one loader, which outlive it.

    Args:
        loader: The loader.

    Attributes:
        name: The name of its class.
        loader: Returns the loader, or None once it is gone.
        process: The process in which it has made the iterators.
        path: The path of its last iterator.
        reason: The reason for that.
        iterators: References to the iterators of ringloader's that live, the oldest first.
        uncounted: How many iterators were other code's, whose batches nobody counts.
        batches: Batches that ``next`` has returned, without those of epochs that run.
        waited: Seconds for which it had to wait for them; None where nobody measures that.
        more: The notes of a report at exit; None if none is asked for.
    """

    path: PathName
    reason: str

    def __init__(self, loader: object) -> None:
        cls = type(loader)
        self.name = f"{cls.__module__}.{cls.__qualname__}"
        self.loader: Callable[[], object | None] = weakref.ref(loader)
        self.process = os.getpid()
        self.iterators: list[weakref.ref[OurIterator]] = []
        self.uncounted = self.batches = 0
        self.waited: float | None = None
        self.more: Any = None

    def alive(self) -> list[OurIterator]:
        """Returns the iterators of ringloader's that live, the oldest first."""
        found = [reference() for reference in self.iterators[:]]
        return [iterator for iterator in found if iterator is not None]


class Note:
    """The note of one iterator, which outlives it. The last one of a loader goes with the loader.

    Args:
        of_loader: The notes of its loader.
        path: Its path.
        reason: The reason for that.
        counters: Returns what a report counts. It leads to nothing of the user's.

    Attributes:
        more: The notes of features, by their names.
    """

    __slots__ = ("_batches", "_waited", "counters", "more", "of_loader", "path", "reason")

    def __init__(
        self,
        of_loader: LoaderNotes,
        path: PathName,
        reason: str,
        counters: Callable[[], Mapping[str, int]],
    ) -> None:
        self.of_loader = of_loader
        self.path = of_loader.path = path
        self.reason = of_loader.reason = reason
        self.counters = counters
        self.more: dict[str, Any] = {}
        # Counted in the loader's sums: batches of the present epoch, and seconds.
        self._batches, self._waited = 0, 0.0

    def follow(self, iterator: OurIterator) -> None:
        """Counts what ``iterator``, one of ringloader's, returns."""
        iterator._noted = self
        references = self.of_loader.iterators
        references.append(weakref.ref(iterator, references.remove))

    def unsettled(self, iterator: OurIterator) -> tuple[int, float | None]:
        """Returns the batches and seconds of the iterator that its loader's sums do not have yet."""
        waited = iterator._seconds_waited()
        return iterator._batches_returned - self._batches, None if waited is None else waited - self._waited

    def settle(self, iterator: OurIterator) -> None:
        """Adds what the iterator has counted to its loader's sums, before it goes."""
        batches, waited = self.unsettled(iterator)
        self._batches += batches
        self.of_loader.batches += batches
        if waited is not None:
            self._waited += waited
            self.of_loader.waited = (self.of_loader.waited or 0.0) + waited

    def end_epoch(self, returned: int) -> None:
        """Notes the end of an epoch of ``returned`` batches, after which the iterator counts from 0."""
        self.of_loader.batches += returned - self._batches
        self._batches = 0


# The last note of each loader, and that of each iterator of other code's.
_notes: WeakRegistry[Note] = WeakRegistry()
# In the order of first use.
_loaders: collections.deque[LoaderNotes] = collections.deque(maxlen=MOST)


def note(
    loader: object,
    iterator: Any,
    path: PathName,
    reason: str,
    counters: Callable[[], Mapping[str, int]] = dict,
) -> Note:
    """Notes how an iterator, of any class, that a loader has made gets its batches.

    Args:
        loader: The loader.
        iterator: The iterator.
        path: Its path.
        reason: The reason for that.
        counters: Returns what a report counts.
    """
    before = _notes.get(loader)
    # A forked child has none of its parent's.
    if before is None or before.of_loader.process != os.getpid():
        of_loader = LoaderNotes(loader)
        _loaders.append(of_loader)
    else:
        of_loader = before.of_loader
    made = Note(of_loader, path, reason, counters)
    _notes.put(loader, made)
    if hasattr(type(iterator), "_seconds_waited"):
        made.follow(iterator)
    else:
        of_loader.uncounted += 1
        _notes.put(iterator, made)
    return made


def pass_on(loader: object, iterator: object, other: OurIterator) -> None:
    """Makes ``other``, which stands in front of an iterator of a loader, the one that is counted."""
    # Other code may have put an iterator of its own in the place of the one that was noted.
    found = of(iterator) or of(loader)
    if found is not None:
        if _notes.pop(iterator) is not None:
            found.of_loader.uncounted -= 1
        found.follow(other)


def add(loader: object, text: str) -> None:
    """Adds ``text`` to the reason that was noted last for a loader."""
    found = _notes.get(loader)
    if found is not None:
        found.reason += f"; {text}"
        found.of_loader.reason = found.reason


def of(key: object) -> Note | None:
    """Returns the note of an iterator, or of the last iterator of a loader."""
    if hasattr(type(key), "_seconds_waited"):
        found: Note | None = key._noted  # type: ignore[attr-defined]
        return found
    return _notes.get(key)


def of_or_behind(key: object) -> Note | None:
    """Returns the note of an iterator or a loader, or of the loader that it stands in front of."""
    found = of(key)
    # The attributes where accelerate, Lightning and Ray keep that loader.
    for name in ("base_dataloader", "_dataloader"):
        found = found or of(attribute(key, name))
    return found


def iterators_of(loader: object) -> list[Any]:
    """Returns the iterators that a loader has made in this process and that live, the oldest first.

    One that other code has made is not among them: it is that code's to end.
    """
    found = _notes.get(loader)
    return [] if found is None or not is_of_this_process(loader) else list(found.of_loader.alive())


def is_of_this_process(loader: object) -> bool:
    """False for a loader whose last iterator is one of the parent process."""
    found = _notes.get(loader)
    return found is None or found.of_loader.process == os.getpid()


def all_loaders() -> list[LoaderNotes]:
    """Returns the notes of the loaders that this process has iterated, in the order of first use."""
    return [one for one in list(_loaders) if one.process == os.getpid()]


class Closes(Protocol):
    """An object with a method ``close``."""

    def close(self) -> None:
        """Closes it. Calling it again does nothing."""


# Objects that a loader keeps beyond its iterators. `shutdown` closes them.
beyond_iterators: WeakRegistry[Closes] = WeakRegistry()
