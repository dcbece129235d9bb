"""State that the next iterator in a pool's process must find as it was: of objects, and of the process."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.utils.data

from ringloader._common import worker_port
from ringloader._torch import stand_ins
from ringloader._worker import watched

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


class ProcessState:
    """The state of this process as it is now, without seeds and threads: each worker sets them itself."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._directory = _directory()
        self._path = list(sys.path)
        self._handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._dtype = torch.get_default_dtype()
        self._grad = torch.is_grad_enabled()
        self._parts = stand_ins.WorkerParts()

    def restore(self) -> None:
        """Restores that state. Leaves out what C code changes by itself."""
        if dict(os.environ) != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)
        if self._directory is not None and _directory() != self._directory:
            os.chdir(self._directory)
        if sys.path != self._path:
            sys.path[:] = self._path
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._handlers.items():
            # A handler that C code has set cannot be set from here.
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        torch.set_default_dtype(self._dtype)
        torch.set_grad_enabled(self._grad)
        self._parts.restore()
        worker_port.port = None
        watched.forget()


def _directory() -> Path | None:
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None
