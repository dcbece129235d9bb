"""Options as the ways in get them: by their names, and as text. Imports no torch."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from typing import Any

from ringloader._options import checks
from ringloader._options.table import TABLE, Options

# The argument of `install` that is no option of a loader.
STATEFUL = "stateful"


def checked(function: str, given: Mapping[str, Any]) -> Options:
    """Returns the options that were given to ``function``.

    Raises:
        TypeError: For a name that is none, or a value of the wrong type.
        ValueError: For a value that is out of range.
    """
    check_names(function, given)
    return Options(**given)


def check_names(function: str, given: Iterable[str]) -> None:
    """Raises a ``TypeError`` for a name of ``given`` to ``function`` that is no option's."""
    for name in given:
        if name not in TABLE:
            raise TypeError(f"{function} got an unknown option {name!r}; there are: {', '.join(TABLE)}")
        instead = TABLE[name].instead
        if instead is not None:
            raise TypeError(f"{function} cannot take {name}: pass it to DataLoader, or {instead}")


def from_text(text: str) -> tuple[Options, bool]:
    """Returns options as an environment variable or a command line names them.

    Args:
        text: ``1`` for the defaults, or ``name=value`` with commas between.

    Returns:
        The options of loaders, and the argument ``stateful`` of ``install``.

    Raises:
        TypeError: For a name that is none, or a value of the wrong type.
        ValueError: For a value that is out of range, or a text that says nothing.
    """
    given: dict[str, Any] = {}
    for part in [] if text == "1" else text.split(","):
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"expected 1, or name=value with commas between, not {text!r}")
        given[name.strip()] = value_of(value)
    stateful = given.pop(STATEFUL, False)
    checks.boolean(STATEFUL, stateful)
    return checked(repr(text), given), stateful


def to_text(options: Options, stateful: bool = False) -> str:
    """Returns a text of which :func:`from_text` makes the same."""
    parts = [f"{name}={getattr(options, name)}" for name in options.changed()]
    return ",".join([*parts, *([f"{STATEFUL}=True"] if stateful else [])]) or "1"


def value_of(text: str) -> object:
    """Returns a number, None or a truth value if ``text`` spells one, else ``text``."""
    try:
        return ast.literal_eval(text.strip())
    except (SyntaxError, ValueError):
        return text
