"""The stand-in for a batch that a worker made and the main process cannot read. The native side makes it."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch

from ringloader._torch import internals


class FailedArrival(internals.ExceptionWrapper):  # type: ignore[misc]
    """Stands for a batch that was made and cannot be read here. torch raises it in the batch's turn.

    Args:
        error: What was raised while it arrived.
        was_raised: Whether the caller has had that error already.
    """

    def __init__(self, error: BaseException, was_raised: bool) -> None:
        super().__init__((type(error), error, error.__traceback__), "while a batch arrived")
        self._error: BaseException | None = error
        if was_raised:
            name = type(error).__name__
            self._error = RuntimeError(f"a batch was lost when {name} interrupted its arrival")

    def reraise(self) -> None:
        """Raises the error as it was. Keeps nothing of it, and so nothing of its frames and the iterator."""
        error, self._error = self._error, None
        try:
            assert error is not None
            raise error
        finally:
            del error


class _Lost(FailedArrival):
    """Stands for any batch, any number of times: it is made before the memory for another may be missing."""

    _WHY = "a batch was lost: while its error was kept, no memory was left, or an interrupt came"

    def __init__(self) -> None:
        super().__init__(MemoryError(self._WHY), False)

    def reraise(self) -> None:
        """Raises an error of its own each time."""
        raise MemoryError(self._WHY)


LOST = _Lost()


def reraise(wrapper: Any) -> None:
    """Raises what a wrapper of torch's holds.

    Clears the frames of torch's ``ExceptionWrapper.reraise`` in its traceback. Such a frame has the error in
    a local variable, and the error has the frame in its traceback. In this cycle the caller's frames, and so
    the iterator with its workers, would wait for the collector.
    """
    try:
        wrapper.reraise()
    except BaseException as error:
        code = getattr(internals.ExceptionWrapper.reraise, "__code__", None)
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code is code:
                frame.clear()
        raise


def once(function: Callable[..., Any], *arguments: Any, lasting: type[Exception] = Exception) -> Any:
    """Returns what code of the user's returns, or the error that is raised in the batch's turn, and once.

    Args:
        function: That code.
        arguments: What it is called with.
        lasting: Errors that it would raise again.

    Raises:
        Exception: Any other. In the batch's turn it may not be raised.
        torch.OutOfMemoryError: In the batch's turn there may be room.
    """
    try:
        return function(*arguments)
    except torch.OutOfMemoryError:
        raise
    except StopIteration as error:
        # To the caller that would be the end of the epoch.
        raised = RuntimeError("StopIteration was raised where a batch was moved to a device")
        raised.__cause__ = error
        return FailedArrival(raised, False)
    except lasting as error:
        return FailedArrival(error, False)


def is_failed(data: Any) -> bool:
    """True if ``data`` stands for a batch that cannot be read."""
    # Not `isinstance`, which would ask every batch for `__class__` too.
    return issubclass(type(data), FailedArrival)
