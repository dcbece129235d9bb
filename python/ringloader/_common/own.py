"""A value that an object keeps for itself: its copies and pickles do not have it."""

from __future__ import annotations

import weakref
from typing import Any


class _Own:
    """Holds the value as an attribute of its owner, so that both may refer to each other and be freed."""

    __slots__ = ("owner", "value")

    def __init__(self, owner: weakref.ref[Any] | None = None, value: Any = None) -> None:
        self.owner = owner
        self.value = value

    def __reduce__(self) -> Any:
        return _Own, ()


def keep_own(owner: Any, name: str, value: Any) -> None:
    """Sets the value of an object by its attribute's name."""
    vars(owner)[name] = _Own(weakref.ref(owner), value)


def own(owner: Any, name: str) -> Any:
    """Returns the value of an object, or None."""
    found = vars(owner).get(name)
    if type(found) is not _Own or found.owner is None or found.owner() is not owner:
        return None
    return found.value
