"""The line of the program that has made a loader. Imports no torch."""

from __future__ import annotations

import functools
import os
import sys
from types import FrameType
from typing import Any

from ringloader._common.weak_registry import WeakRegistry

_places: WeakRegistry[str] = WeakRegistry()


def watch(loader_class: Any) -> None:
    """Notes from now on where loaders are made.

    Args:
        loader_class: torch's class, whose constructor gets a wrapper.
    """
    original = loader_class.__init__
    if getattr(original, "__code__", None) is _CODE:
        return
    loader_class.__init__ = _noting(original)


def place_of(loader: object) -> str | None:
    """Returns file and line where a loader was made, or None where that is not known."""
    return _places.get(loader)


def _noting(original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        found = _line_of_program(sys._getframe(1))
        if found is not None:
            _places.put(self, found)

    return init


# Known by its code, which functools.wraps does not copy.
_CODE = _noting(len).__code__


def _line_of_program(frame: FrameType | None) -> str | None:
    """Returns the innermost line that is the program's, and not a library's."""
    libraries = _libraries()
    while frame is not None:
        file = frame.f_code.co_filename
        is_packaged = "/site-packages/" in file or "/dist-packages/" in file
        if not (is_packaged or file.startswith(libraries)):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return None


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Returns what the names of files begin with that are not the program's: Python's, torch's and ours."""
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    folders = [ours, os.path.dirname(os.__file__)]  # noqa: PTH120
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    if torch is not None:
        folders.append(os.path.dirname(torch))  # noqa: PTH120
    return ("<frozen ", *(os.path.join(folder, "") for folder in folders))  # noqa: PTH118
