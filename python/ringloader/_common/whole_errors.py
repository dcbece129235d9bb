"""Errors of workers that torch would lose on their way, or where it makes them again: their text arrives."""

from __future__ import annotations

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
        raise RuntimeError(f"Caught {self.name} {self.where}.\nOriginal {self.exc_msg}")


def whole(wrapper: Any, is_sent: bool = True) -> Any:
    """A wrapper of torch's, or what stands for it where its class cannot be sent, or not be made of a text.

    Args:
        wrapper: Made by torch, in the worker.
        is_sent: Whether it goes to another process.
    """
    kind = wrapper.exc_type
    try:
        if is_sent:
            ForkingPickler.dumps(kind)
        if getattr(kind, "message", None):
            # What torch calls there, and where it does not expect an error: that of ExceptionGroup, say.
            kind(message="")
    except Exception:
        return WholeError(wrapper)
    return wrapper
