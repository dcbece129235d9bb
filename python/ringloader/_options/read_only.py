"""Attributes of a loader that show its options, and cannot be set: that would change nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from types import FunctionType
from typing import Any

from ringloader._options.kept import attribute
from ringloader._options.table import TABLE

_MISSING = object()


class _Shown:
    """The attribute of one option. Its value lies in the loader's ``__dict__``, where frameworks read it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, loader: object, owner: object) -> Any:
        if loader is None or self._name not in vars(loader):
            # The error of a missing attribute: of the class, or of a loader that is not made yet.
            kind = owner if loader is None else type(loader)
            raise AttributeError(f"{kind!r} has no attribute {self._name!r}", name=self._name, obj=loader)
        return vars(loader)[self._name]

    def __set__(self, loader: object, value: Any) -> None:
        own = vars(loader)
        if own.get(self._name, _MISSING) is value:
            return
        self._check(loader)
        own[self._name] = value

    def __delete__(self, loader: object) -> None:
        self.__get__(loader, type(loader))
        self._check(loader)
        del vars(loader)[self._name]

    def _check(self, loader: object) -> None:
        """Raises where the attribute shows the option, and no subclass has one of its own by that name."""
        own = vars(loader)
        option = own.get(attribute(self._name), _MISSING)
        if option is _MISSING or own.get(self._name, _MISSING) is not option:
            return
        if _names(type(loader), self._name):
            return
        instead = TABLE[self._name].instead
        change = (
            f"use ringloader.convert(loader, {self._name}=...)" if instead is None else "make a new loader"
        )
        raise AttributeError(
            f"{self._name} of a loader cannot be set: a loader reads its options when it is made; {change}",
            name=self._name,
            obj=loader,
        )


def _names(cls: type, name: str) -> bool:
    """True if a method of a subclass names the attribute: it may set one of its own."""
    subclasses = itertools.takewhile(lambda one: _PROTECTED not in vars(one), cls.__mro__)
    methods = (method for one in subclasses for method in vars(one).values())
    return any(isinstance(method, FunctionType) and name in method.__code__.co_names for method in methods)


_PROTECTED = "_ringloader_shows_options"


def protect(cls: type, names: Iterable[str]) -> None:
    """Makes attributes of options read-only in loaders of ``cls``, but where a subclass has its own.

    Args:
        cls: The class.
        names: The options. One that each iterator reads again is left out.
    """
    for name in names:
        if not TABLE[name].is_read_again:
            setattr(cls, name, _Shown(name))
    setattr(cls, _PROTECTED, True)
