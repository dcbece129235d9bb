"""The beginning of a report at exit. Imports no torch."""

from __future__ import annotations

from typing import Any

from ringloader._report import asked, at_exit, made_at


def watch(loader_class: Any) -> None:
    """Begins to note what a report at exit needs, if one is asked for.

    Args:
        loader_class: torch's class, whose loaders are meant.
    """
    if _begin():
        made_at.watch(loader_class)


def expect_loaders() -> None:
    """Makes a report at exit say, too, that this process has iterated no loader."""
    if _begin():
        at_exit.expect_loaders()


def _begin() -> bool:
    """Returns True if a report is asked for, and sees to it at the first call."""
    if not asked.is_read():
        asked.read()
        if asked.mode():
            at_exit.register()
    return bool(asked.mode())
