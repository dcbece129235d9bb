"""The attributes that ``load_state_dict`` of a dataset has set, and how they were before."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from ringloader._common.looking import class_has_method

# In place of an attribute that is not there.
_NONE = object()


class Rebound:
    """Loads states into a dataset, and can set back the attributes that this has set.

    So a dataset that keeps a loaded state begins its epochs as if none had been loaded, exactly: its first
    state is not always that of a beginning, as the program may have read a sample of it before.
    """

    def __init__(self) -> None:
        # Of each attribute: its object, its name, its value before, and the value that it got.
        self._found: list[tuple[weakref.ref[Any], str, Any, Any]] = []
        # The state that was loaded last, and the containers in it: what an attribute may keep of it.
        self._kept: list[Any] = []

    def load(self, dataset: Any, state: Any) -> None:
        """Loads a state into a dataset, and notes which attributes it sets."""
        before = [(holder, dict(vars(holder))) for holder in _holders(dataset, set())]
        dataset.load_state_dict(state)
        self._kept = list(_containers(state))
        for holder, had in before:
            has = vars(holder)
            for name in {*had, *has}:
                old, new = had.get(name, _NONE), has.get(name, _NONE)
                if old is not new:
                    self._note(holder, name, old, new)

    def _note(self, holder: Any, name: str, old: Any, new: Any) -> None:
        for at, (reference, noted, first, value) in enumerate(self._found):
            if reference() is holder and noted == name:
                # A state that was loaded over another one: the value before both of them.
                self._found[at] = reference, name, first if value is old else old, new
                return
        # An object of a class without weak references is not set back.
        with contextlib.suppress(TypeError):
            self._found.append((weakref.ref(holder), name, old, new))

    def holds(self) -> bool:
        """True if an attribute still has the value that it got."""
        return any(_is_bound(reference(), name, new) for reference, name, _, new in self._found)

    def holds_state(self) -> bool:
        """True if an attribute still has the state itself, or a container in it."""
        bound = (new for reference, name, _, new in self._found if _is_bound(reference(), name, new))
        return any(new is kept for new in bound for kept in self._kept)

    def set_back(self) -> bool:
        """Sets back the attributes that nothing else has set since. False: there is none."""
        has_set = False
        for reference, name, old, new in self._found:
            holder = reference()
            if not _is_bound(holder, name, new):
                continue
            has_set = True
            if old is _NONE:
                del vars(holder)[name]
            else:
                vars(holder)[name] = old
        self._found, self._kept = [], []
        return has_set


def _is_bound(holder: Any, name: str, value: Any) -> bool:
    return holder is not None and vars(holder).get(name, _NONE) is value


def _containers(state: Any) -> Iterator[Any]:
    """Yields a state if it is a container, and the containers in it."""
    if type(state) in (dict, list, tuple):
        yield state
        for part in state.values() if type(state) is dict else state:
            yield from _containers(part)


def _holders(thing: Any, seen: set[int]) -> Iterator[Any]:
    """Yields a dataset, and the objects with a state that it has: it hands its state over to them."""
    if id(thing) in seen or not hasattr(thing, "__dict__"):
        return
    seen.add(id(thing))
    yield thing
    for value in list(vars(thing).values()):
        parts = value if type(value) in (list, tuple) else value.values() if type(value) is dict else (value,)
        for part in parts:
            if not isinstance(part, type) and class_has_method(part, "load_state_dict"):
                yield from _holders(part, seen)
