"""Notes about objects, beside them and not on them: frameworks copy, pickle and rebuild loaders."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class Notes(Generic[_T]):
    """A note for each of some objects, until the object goes.

    By what an object is, and not by what it equals: its class may compare and hash as it likes.

    INVARIANT: each use of the dict is one step for the interpreter: other threads, and finalizers, may come
    between any two of them.
    """

    def __init__(self) -> None:
        # By address, the oldest first.
        self._notes: dict[int, tuple[weakref.ref[Any], _T]] = {}

    def put(self, about: object, note: _T) -> None:
        """Notes it, in place of what was noted before; nothing for an object without weak references."""
        notes, address = self._notes, id(about)

        def forget(gone: weakref.ref[Any]) -> None:
            found = notes.get(address)
            if found is not None and found[0] is gone:
                notes.pop(address, None)

        try:
            reference = weakref.ref(about, forget)
        except TypeError:
            return
        notes.pop(address, None)
        notes[address] = (reference, note)

    def get(self, about: object) -> _T | None:
        """The note about an object."""
        found = self._notes.get(id(about))
        return found[1] if found is not None and found[0]() is about else None

    def pop(self, about: object) -> _T | None:
        """The same, which is forgotten."""
        note = self.get(about)
        if note is not None:
            self._notes.pop(id(about), None)
        return note

    def all(self) -> list[_T]:
        """All notes."""
        return [note for _, note in list(self._notes.values())]

    def keep_newest(self, most: int) -> None:
        """Forgets the oldest notes, until there are no more than ``most``."""
        for address in list(self._notes)[: max(0, len(self._notes) - most)]:
            self._notes.pop(address, None)
