"""Text of the program's objects, for messages."""

from __future__ import annotations


def shown(value: object, most: int = 500) -> str:
    """Returns the first characters of the ``repr`` of ``value``, or words where that raises."""
    try:
        return f"{value!r:.{most}}"
    except Exception as error:
        return f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"
