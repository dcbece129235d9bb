"""Attributes of the user's objects, looked up so that none of their errors stops a program."""

from __future__ import annotations

from typing import Any


def stored(thing: object, name: str, otherwise: Any = None) -> Any:
    """Returns an attribute that an instance or its class stores as a plain value; runs no code of theirs."""
    try:
        found: dict[str, Any] = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        found = {}
    if type(found) is dict and name in found:
        return found[name]
    for cls in type(thing).__mro__:
        if name in cls.__dict__:
            value = cls.__dict__[name]
            # A property, or a slot, would run code.
            return otherwise if hasattr(type(value), "__get__") else value
    return otherwise


def has_method(thing: object, name: str) -> bool:
    """True if the class of an instance, or the instance itself, has a method of that name."""
    try:
        return callable(getattr(thing, name, None))
    except Exception:
        # A property, or `__getattr__`, of the user's: not known to be a method.
        return False


def class_has_method(thing: object, name: str) -> bool:
    """True if the class of an instance has a method of that name; runs no code of the class."""
    return any(callable(cls.__dict__.get(name)) for cls in type(thing).__mro__)
