"""The objects that a pool's process holds between its iterators, in the state that each iterator finds."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch.utils.data

# A dataset of more parts is not searched for datasets.
_MOST_PARTS = 1000


class Held:
    """Datasets and functions of loaders, by the numbers that the main process has given them.

    Attributes that an iterator sets on them (``worker_init_fn`` that splits a dataset, files opened when they
    are first read) are those of that iterator: the next one finds what was sent.
    """

    def __init__(self) -> None:
        self._things: dict[int, Any] = {}
        self._states: dict[int, list[tuple[dict[str, Any], dict[str, Any]]]] = {}

    def put(self, things: Iterable[tuple[int, Any]]) -> None:
        """Takes what the main process has sent."""
        for number, thing in things:
            self._things[number] = thing
            self._states[number] = [(state, dict(state)) for state in _states(thing)]

    def drop(self, numbers: Iterable[int]) -> None:
        """Forgets what no loader has any more."""
        for number in numbers:
            self._things.pop(number, None)
            self._states.pop(number, None)

    def get(self, number: int) -> Any:
        """Returns the object with this number."""
        return self._things[number]

    def restore(self) -> None:
        """Gives all objects the attributes that they had when they came."""
        for states in self._states.values():
            for state, before in states:
                if state.keys() != before.keys() or any(state[name] is not before[name] for name in before):
                    state.clear()
                    state.update(before)


def _states(thing: Any) -> list[dict[str, Any]]:
    """The attributes of an object, and of the datasets that it is made of."""
    found: dict[int, dict[str, Any]] = {}
    pending = [thing]
    while pending:
        one = pending.pop()
        if isinstance(one, MethodType):
            pending.append(one.__self__)
        elif isinstance(one, functools.partial):
            pending += [one.func, *_parts((*one.args, *one.keywords.values()))]
        else:
            state = _attributes(one)
            if state is not None and id(state) not in found:
                found[id(state)] = state
                pending += _parts(state.values())
    return list(found.values())


def _attributes(thing: Any) -> dict[str, Any] | None:
    if isinstance(thing, (type, FunctionType, ModuleType)):
        return None
    try:
        state = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return None
    return state if type(state) is dict else None


def _parts(values: Iterable[Any]) -> list[Any]:
    """The datasets among them, also one level deeper."""
    found = []
    for value in values:
        if isinstance(value, Mapping):
            inner: Iterable[Any] = value.values() if len(value) <= _MOST_PARTS else ()
        elif isinstance(value, (list, tuple)):
            inner = value if len(value) <= _MOST_PARTS else ()
        else:
            inner = (value,)
        found += [one for one in inner if isinstance(one, torch.utils.data.Dataset)]
    return found
