"""Values of objects that are no attributes of them: frameworks copy, pickle and rebuild loaders."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class WeakRegistry(Generic[_T]):
    """A value for each of some objects, until the object goes.

    An object is told by its identity, not by equality: its class may compare and hash as it likes.

    INVARIANT: each use of the dict is one step for the interpreter: other threads, and finalizers, may come
    between any two of them.
    """

    def __init__(self) -> None:
        # Reference and value by the object's address, the oldest first.
        self._entries: dict[int, tuple[weakref.ref[Any], _T]] = {}

    def __bool__(self) -> bool:
        return bool(self._entries)

    def put(self, key: object, value: _T) -> None:
        """Keeps ``value``, in place of the one before; nothing for an object without weak references."""
        entries, address = self._entries, id(key)
        found = entries.pop(address, None)
        if found is not None and found[0]() is key:
            entries[address] = (found[0], value)
            return

        def forget(gone: weakref.ref[Any]) -> None:
            found = entries.get(address)
            if found is not None and found[0] is gone:
                entries.pop(address, None)

        try:
            reference = weakref.ref(key, forget)
        except TypeError:
            return
        entries[address] = (reference, value)

    def get(self, key: object) -> _T | None:
        """Returns the value of an object, or None."""
        found = self._entries.get(id(key))
        return found[1] if found is not None and found[0]() is key else None

    def pop(self, key: object) -> _T | None:
        """Returns the value of an object, or None, and forgets it."""
        value = self.get(key)
        if value is not None:
            self._entries.pop(id(key), None)
        return value

    def values(self) -> list[_T]:
        """Returns all values, the oldest first."""
        return [value for _, value in list(self._entries.values())]

    def keep_newest(self, most: int) -> None:
        """Forgets the oldest values, until there are no more than ``most``."""
        for address in list(self._entries)[: max(0, len(self._entries) - most)]:
            self._entries.pop(address, None)
