"""The hook at ``DataLoader._get_iterator``: its place, what it replaces, and loaders that it does not reach.

Imports no torch.

INVARIANT: a hook calls what :func:`put` was given last, or else what it replaced. So one that other
code wrapped, or kept and put back later, is as good as one that was never moved.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from types import FunctionType
from typing import Any

_NAME = "_get_iterator"

# Makes a loader's iterator; its second argument is what the hook stands in front of.
Make = Callable[[Any, Callable[[Any], Any]], Any]

# The function that all hooks of the process call. While it is None they let every call through.
_make: Make | None = None
# When they were last told to, in nanoseconds of the monotonic clock.
_ended = 0


def current() -> Make | None:
    """Returns the function that makes the iterators, or None while nothing is installed."""
    return _make


def ended() -> int:
    """Returns when hooks began to let every call through, for the last time."""
    return _ended


def put(loader_class: Any, make: Make | None) -> None:
    """Sets the function that makes the iterators of ``loader_class`` and its subclasses; None removes it.

    A hook that lies beneath another wrapper stays there, and lets through.
    """
    global _make, _ended
    _make = make
    if make is None:
        _ended = time.monotonic_ns()
    found = loader_class._get_iterator
    if make is not None and not _is_hook(found):
        loader_class._get_iterator = _hook(found)
    elif make is None and _is_hook(found):
        loader_class._get_iterator = found.__wrapped__


def beneath(function: Any) -> Any:
    """Returns what ``function`` stands in front of if it is our hook, else ``function`` itself."""
    return function.__wrapped__ if _is_hook(function) else function


def _hook(previous: Any) -> Any:
    def _get_iterator(self: Any) -> Any:
        make = _make
        return previous(self) if make is None else make(self, previous)

    functools.update_wrapper(_get_iterator, previous)
    return _get_iterator


def _is_hook(function: Any) -> bool:
    # Known by its code, which functools.wraps does not copy.
    return getattr(function, "__code__", None) is _CODE


_CODE = _hook(len).__code__


def reason_not_reached(loader: object, loader_class: Any) -> str | None:
    """Returns why a loader makes its iterator without torch's method, or None if it calls that.

    Args:
        loader: A loader.
        loader_class: torch's class.
    """
    reason = "{} has a _get_iterator that does not call torch's"
    if _NAME in getattr(loader, "__dict__", ()):
        return reason.format("the object")
    for cls in type(loader).__mro__:
        if cls is loader_class:
            return None
        if _NAME in vars(cls) and not _goes_on(vars(cls)[_NAME]):
            return reason.format(f"{cls.__module__}.{cls.__qualname__}")
    return None


def _goes_on(function: Any) -> bool:
    """True if a method calls that of the next class, and so names it. Looks into decorators."""
    while isinstance(function, FunctionType):
        if _NAME in function.__code__.co_names:
            return True
        function = getattr(function, "__wrapped__", None)
    return False
