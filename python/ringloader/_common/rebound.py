"""The attributes that ``load_state_dict`` of a dataset has set, and how they were before."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

from ringloader._common.equality import are_equal, pickled
from ringloader._common.looking import class_has_method

# In place of an attribute that is not there.
_NONE = object()


class _Attribute(NamedTuple):
    """An attribute that a loaded state has set.

    Attributes:
        holder: Its object.
        old: The value before; before all loaded states, if several have set it.
        new: The value that it got.
        state: The pickle of that value, if it is the loaded state itself, or a container in it.
    """

    holder: weakref.ref[Any]
    old: Any
    new: Any
    state: bytes | None


class Rebound:
    """Loads states into a dataset, and can set back the attributes that this has set.

    So a dataset that keeps a loaded state begins its epochs as if none had been loaded, exactly: its first
    state is not always that of a beginning, as the program may have read a sample of it before.
    """

    def __init__(self) -> None:
        # By the holder's address and the attribute's name.
        self._found: dict[tuple[int, str], _Attribute] = {}

    def load(self, dataset: Any, state: Any) -> None:
        """Loads a state into a dataset, and records which attributes it sets."""
        before = [(holder, dict(vars(holder))) for holder in _holders(dataset, set())]
        dataset.load_state_dict(state)
        containers = list(_containers(state))
        for holder, had in before:
            for name in {*had, *vars(holder)}:
                old, new = had.get(name, _NONE), vars(holder).get(name, _NONE)
                if old is new:
                    continue
                last = self._found.get((id(holder), name))
                if last is not None and last.holder() is holder and last.new is old:
                    old = last.old
                is_state = any(new is container for container in containers)
                # An object of a class without weak references is not set back.
                with contextlib.suppress(TypeError):
                    self._found[id(holder), name] = _Attribute(
                        weakref.ref(holder), old, new, pickled(new) if is_state else None
                    )

    def set_back(self, only_states: bool = False) -> bool:
        """Sets back the attributes that nothing else has set since. False: there is none.

        Args:
            only_states: Only attributes that have the loaded state itself, which nothing has changed since.
        """
        has_set = False
        for (address, name), (reference, old, new, state) in list(self._found.items()):
            holder = reference()
            if holder is None or vars(holder).get(name, _NONE) is not new:
                continue
            if only_states and (state is None or not are_equal(state, pickled(new))):
                continue
            if old is _NONE:
                del vars(holder)[name]
            else:
                vars(holder)[name] = old
            del self._found[address, name]
            has_set = True
        return has_set


def _containers(state: Any) -> Iterator[Any]:
    """Yields a state if it is a container, and the containers in it."""
    if type(state) in (dict, list, tuple):
        yield state
        for part in state.values() if type(state) is dict else state:
            yield from _containers(part)


def _holders(thing: Any, seen: set[int]) -> Iterator[Any]:
    """Yields a dataset, and the objects with a state in it, to which it hands parts of its state over."""
    if id(thing) in seen or not hasattr(thing, "__dict__"):
        return
    seen.add(id(thing))
    yield thing
    for value in list(vars(thing).values()):
        parts = value if type(value) in (list, tuple) else value.values() if type(value) is dict else (value,)
        for part in parts:
            if not isinstance(part, type) and class_has_method(part, "load_state_dict"):
                yield from _holders(part, seen)
