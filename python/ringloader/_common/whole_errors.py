"""Errors of workers that torch would lose on their way, or where it makes them again: their text arrives."""

from __future__ import annotations

import contextlib
from multiprocessing.reduction import ForkingPickler
from typing import Any

from ringloader._torch import internals


class WholeError(internals.ExceptionWrapper):  # type: ignore[misc]
    """A ``RuntimeError`` with name, message, notes, causes and traceback of another error."""

    def __init__(self, wrapper: Any) -> None:
        self.exc_type = RuntimeError
        self.exc_msg = wrapper.exc_msg
        self.where = wrapper.where
        self.name = wrapper.exc_type.__name__

    def reraise(self) -> None:
        """Raises it in torch's words."""
        raise RuntimeError(_text(self, self.name))


def _text(wrapper: Any, name: str) -> str:
    """MIRRORS torch _utils.py::ExceptionWrapper.reraise."""
    return f"Caught {name} {wrapper.where}.\nOriginal {wrapper.exc_msg}"


def whole(wrapper: Any, is_sent: bool = True) -> Any:
    """Returns torch's wrapper, or a stand-in if its class cannot be sent, or not be made of a text.

    Args:
        wrapper: Made by torch, in the worker.
        is_sent: True if it goes to another process.
    """
    kind = wrapper.exc_type
    try:
        if is_sent:
            ForkingPickler.dumps(kind)
        # torch makes the error again by these calls. It expects no error of the first, such as
        # ExceptionGroup's. Older versions expect only a TypeError of the second.
        text = _text(wrapper, kind.__name__)
        if getattr(kind, "message", None):
            kind(message=text)
        elif kind.__module__ != "builtins":
            with contextlib.suppress(TypeError):
                kind(text)
    except Exception:
        return WholeError(wrapper)
    return wrapper
