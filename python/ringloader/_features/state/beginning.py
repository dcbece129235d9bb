"""A dataset that keeps a loaded state in an attribute, and begins each epoch there."""

from __future__ import annotations

import contextlib
import pickle
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

from ringloader._common.attributes import class_has_method
from ringloader._common.weak_registry import WeakRegistry

# Stands for a missing attribute.
_NONE = object()


class _Held(NamedTuple):
    """An attribute that has a loaded state itself, or a container in it.

    Attributes:
        holder: Its object.
        name: Its name.
        before: The value before.
        state: The value that it got.
        pickled: The pickle of that value.
    """

    holder: weakref.ref[Any]
    name: str
    before: Any
    state: Any
    pickled: bytes | None


class Beginning:
    """The beginning of a dataset in this process, which no workers share.

    Some datasets keep a loaded state in an attribute and begin each ``__iter__`` from it, as the streams of
    Hugging Face do: an epoch from the beginning then sets the attribute back.
    """

    def __init__(self) -> None:
        self._held: list[_Held] = []

    def load(self, dataset: Any, state: Any) -> None:
        """Loads a state into the dataset, and records which attributes have it since."""
        self.begin()
        before = [(holder, dict(vars(holder))) for holder in _holders(dataset, set())]
        dataset.load_state_dict(state)
        containers = {id(container) for container in _containers(state)}
        for holder, had in before:
            for name, value in vars(holder).items():
                if id(value) in containers and had.get(name, _NONE) is not value:
                    # An object of a class without weak references is not set back.
                    with contextlib.suppress(TypeError):
                        reference = weakref.ref(holder)
                        old = had.get(name, _NONE)
                        self._held.append(_Held(reference, name, old, value, _pickled(value)))

    def begin(self) -> None:
        """Sets back the attributes that have the loaded state, unless they have changed: an epoch begins."""
        held, self._held = self._held, []
        for reference, name, before, state, pickled in held:
            holder = reference()
            if holder is None or vars(holder).get(name) is not state or _pickled(state) != pickled:
                continue
            if before is _NONE:
                del vars(holder)[name]
            else:
                vars(holder)[name] = before


# Loaders that have the same dataset share its beginning.
_beginnings: WeakRegistry[Beginning] = WeakRegistry()


def beginning_of(dataset: Any) -> Beginning:
    """Returns the beginning of a dataset in this process."""
    found = _beginnings.get(dataset)
    if found is None:
        found = Beginning()
        _beginnings.put(dataset, found)
    return found


def _pickled(state: Any) -> bytes | None:
    try:
        return pickle.dumps(state, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return None


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
