"""Checks of options that need no torch. Each is called with the option's name and its value.

Raises:
    TypeError: If a value has the wrong type.
    ValueError: If a value is out of range.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

# The value of `worker_method` for threads, in torch's word.
THREAD = "thread"
# The value of `num_workers` for a loader that finds its number.
AUTO: Literal["auto"] = "auto"

Check = Callable[[str, Any], None]

# Native code counts in 64 bits, and Python's lengths have a sign.
_END = 1 << 63


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def integer(lowest: int, or_none: bool = False) -> Check:
    """Returns the check of an int that is at least ``lowest``: 0 or 1."""
    kind = "an int or None" if or_none else "an int"
    least = "positive" if lowest else "0 or more"

    def check(name: str, value: Any) -> None:
        if value is None and or_none:
            return
        if not is_int(value):
            raise TypeError(f"{name} must be {kind}, not {value!r}")
        if value < lowest:
            raise ValueError(f"{name} must be {least}, not {value}")
        if value >= _END:
            raise ValueError(f"{name} must be less than {_END}, not {value}")

    return check


def one_of(*words: str, or_none: bool = False) -> Check:
    """Returns the check of a word."""

    def check(name: str, value: Any) -> None:
        if value is None and or_none:
            return
        if not isinstance(value, str) or value not in words:
            error = ValueError if isinstance(value, str) else TypeError
            raise error(f"{name} must be one of {words}, not {value!r}")

    return check


def callable_or_none(name: str, value: Any) -> None:
    if isinstance(value, str):
        raise TypeError(f"{name} must be a callable or None, not {value!r}: pass the function itself")
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be a callable or None, not {value!r}")


def boolean(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, not {value!r}")


def seconds_or_none(name: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, float) and not is_int(value):
        raise TypeError(f"{name} must be a number of seconds or None, not {value!r}")
    if not value > 0:
        raise ValueError(f"{name} must be positive, not {value}: leave it out to have none")
