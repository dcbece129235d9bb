"""Looks at the program's objects, whose attributes and ``repr`` may raise. torch does not look there.

A sampler may be any object, and may have others inside. No code of its class runs here: an attribute that is
not stored as a plain value counts as not known.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Levels of samplers inside samplers: more than real programs have.
_MOST_LEVELS = 8


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
    # Not `inspect.getattr_static`, which takes ten times as long, for each attribute of each `iter`.
    try:
        own = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        own = {}
    for names in (own, *(cls.__dict__ for cls in type(thing).__mro__)):
        if name in names:
            value = names[name]
            # A property, or a slot, would run code.
            return default if hasattr(type(value), "__get__") else value
    return default


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


def samplers_in(outermost: Any) -> Iterator[Any]:
    """Yields a sampler, and the samplers inside it."""
    at = outermost
    for _ in range(_MOST_LEVELS):
        yield at
        inner = stored(at, "batch_sampler")
        at = stored(at, "sampler") if inner is None else inner
        if at is None:
            return


def with_epoch(outermost: Any) -> Any:
    """Returns the first sampler that has an epoch, which can be set; None if there is none."""
    return next((sampler for sampler in samplers_in(outermost) if has_epoch(sampler)), None)


def has_epoch(sampler: Any) -> bool:
    """True if a sampler has an epoch, which can be set."""
    return is_count(stored(sampler, "epoch")) and class_has_method(sampler, "set_epoch")


def epoch_of(outermost: Any) -> int | None:
    """Returns a sampler's next epoch; None for a sampler without epochs."""
    sampler = with_epoch(outermost)
    return None if sampler is None else int(stored(sampler, "epoch"))


def is_count(value: object) -> bool:
    kind = type(value)
    return issubclass(kind, int) and kind is not bool and value >= 0  # type: ignore[operator]
