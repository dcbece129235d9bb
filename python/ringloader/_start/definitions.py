"""Classes and functions of the main module, which a pickle has by name only.

A process that is forked has them as they were then. A notebook defines some later, and others anew.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

# INVARIANT: two references are one object exactly if they are to one object. They keep none alive.
Definitions = Mapping[str, "weakref.ref[Any]"]

_KINDS = (type, FunctionType, type(functools.cache(len)))


def of_now() -> Definitions:
    """Returns all of them, by name."""
    main = vars(sys.modules["__main__"])
    return {name: weakref.ref(thing) for name, thing in list(main.items()) if _is_definition(thing)}


def are_in(named: Definitions, others: Definitions) -> bool:
    """True if the names mean the same objects in ``others``."""
    return all(others.get(name) is reference for name, reference in named.items())


def is_found_by_name(thing: object) -> bool:
    """True for a class or function that a process finds by its name, where it has this main module too."""
    if not _is_definition(thing) or getattr(thing, "__module__", None) != "__main__":
        return False
    found: Any = sys.modules["__main__"]
    if getattr(found, "__file__", None) is None and getattr(found, "__spec__", None) is None:
        # No process can run a notebook again.
        return False
    for name in getattr(thing, "__qualname__", "").split("."):
        found = getattr(found, name, None)
    return found is thing


def recorder(
    found: dict[str, weakref.ref[Any]], override: Callable[[Any], Any] | None = None
) -> Callable[[Any], Any]:
    """Returns a ``reducer_override`` of a pickler, which records in ``found`` what the pickle names.

    Args:
        found: Takes the definitions, by name.
        override: The pickler's own, if it has one.
    """

    def record(thing: Any) -> Any:
        reduced = NotImplemented if override is None else override(thing)
        # Else it goes by value.
        is_named = reduced is NotImplemented and _is_definition(thing)
        if is_named and getattr(thing, "__module__", None) == "__main__":
            # A name as `Outer.Inner` is looked up in `Outer`.
            name = thing.__qualname__.partition(".")[0]
            outer = getattr(sys.modules["__main__"], name, None)
            if _is_definition(outer):
                found[name] = weakref.ref(outer)
        return reduced

    return record


def _is_definition(thing: object) -> bool:
    return issubclass(type(thing), _KINDS)
