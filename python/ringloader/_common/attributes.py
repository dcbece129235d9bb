"""Looks at the program's objects, whose attributes and ``repr`` may raise. torch does not look there."""

from __future__ import annotations

import inspect
from typing import Any


def attribute(thing: object, name: str, default: Any = None) -> Any:
    """Returns an attribute of ``thing``, or ``default`` if it has none, or its own code raises.

    A ``__getattr__`` that is ``self.fields[name]`` raises a ``KeyError``, and a property what it likes.
    """
    try:
        return getattr(thing, name, default)
    except Exception:
        return default


def stored(thing: object, name: str, default: Any = None) -> Any:
    """Returns an attribute that an instance or its class stores as a plain value; runs no code of theirs."""
    value = inspect.getattr_static(thing, name, default)
    # A property, or a slot, would run code.
    return default if hasattr(type(value), "__get__") else value


def has_method(thing: object, name: str) -> bool:
    """True if ``thing`` has a callable attribute of that name."""
    return callable(attribute(thing, name))


def class_has_method(thing: object, name: str) -> bool:
    """True if the class of ``thing`` has a method of that name; runs no code of the class."""
    return any(callable(cls.__dict__.get(name)) for cls in type(thing).__mro__)


def shown(value: object, most: int = 500) -> str:
    """Returns the first characters of the ``repr`` of ``value``, or words where that raises."""
    try:
        return f"{value!r:.{most}}"
    except Exception as error:
        return f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"


def is_awaitable(thing: object) -> bool:
    """True for a coroutine, and for what else can be awaited."""
    return hasattr(type(thing), "__await__")
