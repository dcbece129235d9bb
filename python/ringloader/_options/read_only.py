"""Attributes of a loader that show its options, and cannot be set: that would change nothing."""

from __future__ import annotations

import itertools
import sys
from typing import Any

from ringloader._options.kept import attribute
from ringloader._options.table import TABLE

_MISSING = object()


class _Shown:
    """The attribute of one option. Its value lies in the loader's ``__dict__``, where frameworks read it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, loader: Any, owner: object) -> Any:
        if loader is None or self._name not in vars(loader):
            # As without this: the class has no such attribute, nor has a loader that is not made yet.
            kind = owner if loader is None else type(loader)
            raise AttributeError(f"{kind!r} has no attribute {self._name!r}", name=self._name, obj=loader)
        return vars(loader)[self._name]

    def __set__(self, loader: Any, value: Any) -> None:
        own = vars(loader)
        if own.get(self._name, _MISSING) is value:
            return
        self._check(loader)
        own[self._name] = value

    def __delete__(self, loader: Any) -> None:
        self.__get__(loader, type(loader))
        self._check(loader)
        del vars(loader)[self._name]

    def _check(self, loader: Any) -> None:
        """Raises where the attribute shows the option, and is not set by a subclass, whose own it becomes."""
        own = vars(loader)
        option = own.get(attribute(self._name), _MISSING)
        if option is _MISSING or own.get(self._name, _MISSING) is not option or _is_in_method(loader):
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


def _is_in_method(loader: Any) -> bool:
    """True if a method of the loader's that its subclass has, such as the constructor, sets the attribute."""
    of_subclasses = itertools.takewhile(lambda cls: _PROTECTED not in vars(cls), type(loader).__mro__)
    # Of this function, the check and the descriptor's method.
    frame = sys._getframe(3)
    while frame.f_code.co_name in ("__setattr__", "__delattr__") and frame.f_back is not None:
        frame = frame.f_back
    code = frame.f_code
    if not code.co_argcount or frame.f_locals.get(code.co_varnames[0]) is not loader:
        return False
    return any(code.co_name in vars(cls) for cls in of_subclasses)


_PROTECTED = "_ringloader_shows_options"


def protect(cls: type) -> None:
    """Makes the attributes of options read-only in loaders of ``cls``, but for what subclasses set."""
    for name in TABLE:
        # One that each iterator reads again.
        if attribute(name) != name:
            setattr(cls, name, _Shown(name))
    setattr(cls, _PROTECTED, True)
