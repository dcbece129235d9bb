"""Looks at the program's objects, whose attributes may raise anything. torch does not look there."""

from __future__ import annotations

from typing import Any


def attribute(thing: object, name: str, default: Any = None) -> Any:
    """Returns an attribute of ``thing``, or ``default`` if it has none, or its own code raises.

    A ``__getattr__`` that is ``self.fields[name]`` raises a ``KeyError``, and a property what it likes.
    """
    try:
        return getattr(thing, name, default)
    except Exception:
        return default


def has(thing: object, name: str) -> bool:
    """True if ``thing`` has an attribute of that name. A property of its class is not called."""
    missing = object()
    return any(attribute(one, name, missing) is not missing for one in (type(thing), thing))


def has_method(thing: object, name: str) -> bool:
    """True if ``thing`` has a callable attribute of that name."""
    return callable(attribute(thing, name))
