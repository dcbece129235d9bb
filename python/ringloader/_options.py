"""What ringloader's loader takes beside torch's arguments, and what is wrong with a value."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Options:
    """The keyword-only arguments of ``ringloader.DataLoader``, checked.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range.
    """

    max_shared_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.max_shared_bytes is not None:
            if not isinstance(self.max_shared_bytes, int) or isinstance(self.max_shared_bytes, bool):
                raise TypeError(f"max_shared_bytes must be an int or None, not {self.max_shared_bytes!r}")
            if self.max_shared_bytes <= 0:
                raise ValueError(f"max_shared_bytes must be positive, not {self.max_shared_bytes}")

    @classmethod
    def of(cls, loader: object) -> Options:
        """As they stand on ``loader`` now."""
        return cls(**{name: getattr(loader, name) for name in NAMES if hasattr(loader, name)})


# Of all options.
NAMES = tuple(field.name for field in dataclasses.fields(Options))


def checked(function: str, given: Mapping[str, Any]) -> Options:
    """``given`` to ``function`` as options.

    Raises:
        TypeError: For a name that is none, or a value of the wrong type.
        ValueError: For a value that is out of range.
    """
    for name in given:
        if name not in NAMES:
            raise TypeError(f"{function} got an unknown option {name!r}; there are: {', '.join(NAMES)}")
    return Options(**given)


def from_text(text: str) -> Options:
    """Options as an environment variable or a command line names them.

    Args:
        text: ``1`` for the defaults, or ``name=value`` with commas between.

    Raises:
        TypeError: For a name that is none, or a value of the wrong type.
        ValueError: For a value that is out of range, or a text that says nothing.
    """
    given = {}
    for part in [] if text == "1" else text.split(","):
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"expected 1, or name=value with commas between, not {text!r}")
        given[name.strip()] = value_of(value)
    return checked(repr(text), given)


def to_text(options: Options) -> str:
    """What :func:`from_text` makes ``options`` of."""
    set_ones = [
        f"{name}={getattr(options, name)}"
        for name in NAMES
        if getattr(options, name) != getattr(Options, name)
    ]
    return ",".join(set_ones) or "1"


def value_of(text: str) -> object:
    """A number, None or a truth value where ``text`` spells one, else ``text``."""
    try:
        return ast.literal_eval(text.strip())
    except (SyntaxError, ValueError):
        return text
