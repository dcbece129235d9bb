"""What stands for a batch that a worker made and that cannot be had here. The native side makes it."""

from __future__ import annotations

from ringloader._torch import internals


class FailedArrival(internals.ExceptionWrapper):  # type: ignore[misc]
    """Stands for a batch that was made and cannot be had here. torch raises it in the batch's turn.

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
        """Raises the error as it was, and keeps nothing of it: in a cycle with it would hang the iterator."""
        error, self._error = self._error, None
        try:
            assert error is not None
            raise error
        finally:
            del error
