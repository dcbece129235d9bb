"""The errors for a batch that does not come: it is late, its worker is lost, or it cannot be read here."""

from __future__ import annotations

import dataclasses
import signal
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ringloader._common.attributes import shown
from ringloader._torch import internals

# A worker, its task, and that task's index; None where it is not known.
Late = tuple[int, int, Any]

# Dataset indices, and workers, that a message names at most.
_MOST_INDICES = 16
_MOST_WORKERS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class LostWorker:
    """A worker that has ended and should not have. Its results were taken.

    Attributes:
        worker: Its number.
        handle: Its handle.
        in_hand: What it was in; None if that is not known.
        restart: Starts a successor, and returns its handle.
        refusal: Why it may have no successor, however it was lost; None if it may.
        notes: Why it got no successor, for the error.
    """

    worker: int
    handle: Any
    in_hand: Late | None
    restart: Callable[[], Any]
    refusal: str | None
    notes: list[str] = dataclasses.field(default_factory=list)


def add_notes(error: BaseException, workers: Sequence[Any], late: Iterable[Late]) -> None:
    """Adds a note to an error for each late worker.

    Args:
        error: Its text stays torch's.
        workers: The worker processes.
        late: The number of a worker, of the task that it is in, and the index of that task; None where it is
            not known.
    """
    named = list(late)
    for worker, number, index in named[:_MOST_WORKERS]:
        error.add_note(f"worker {worker} (pid {workers[worker].pid}) is late with {batch(number, index)}")
    if len(named) > _MOST_WORKERS:
        error.add_note(f"and so are {len(named) - _MOST_WORKERS} other workers")


def error_of_lost(process: Any, in_hand: Late | None, *notes: str) -> RuntimeError:
    """Returns the error for a worker whose process has ended: torch's, from what its signal handler says.

    Args:
        process: The worker's.
        in_hand: What the worker was in, where that is known. The error names it.
        notes: What else the error says.
    """
    error = RuntimeError(f"DataLoader worker (pid(s) {process.pid}) exited unexpectedly")
    error.__cause__ = _how_it_ended(process.pid, process.exitcode or 0)
    if in_hand is not None:
        _, number, index = in_hand
        error.add_note(f"it was in {batch(number, index)}")
    for note in notes:
        error.add_note(note)
    return error


def _how_it_ended(pid: int, code: int) -> RuntimeError | None:
    """MIRRORS torch csrc/DataLoader.cpp::THPModule_errorIfAnyWorkerFails."""
    if code == 0:
        return None
    if code > 0:
        return RuntimeError(
            f"DataLoader worker (pid {pid}) exited unexpectedly with exit code {code}. "
            "Details are lost due to multiprocessing. "
            "Rerunning with num_workers=0 may give better error trace."
        )
    hint = ""
    if -code == signal.SIGBUS:
        hint = (
            "It is possible that dataloader's workers are out of shared memory. "
            "Please try to raise your shared memory limit."
        )
    return RuntimeError(
        f"DataLoader worker (pid {pid}) is killed by signal: {signal.strsignal(-code)}. {hint}"
    )


def batch(number: int | None, index: Any) -> str:
    """Returns a batch and its dataset indices in words, without a number if that is not known."""
    which = "a batch" if number is None else f"batch {number} of the epoch"
    if index is None or (isinstance(index, list) and all(one is None for one in index)):
        # A batch of an iterable dataset has no indices, and there are more tasks than batches.
        return "its next batch"
    if isinstance(index, list):
        more = "" if len(index) <= _MOST_INDICES else f" and {len(index) - _MOST_INDICES} more"
        return f"{which}: dataset indices {shown(index[:_MOST_INDICES])}{more}"
    return f"{which}: dataset index {shown(index)}"


# A torch may lack the class: its own loader runs then, but this module is imported before that is known.
class FailedArrival(internals.ExceptionWrapper or Exception):  # type: ignore[misc]
    """Stands for a batch that was made and cannot be read here. torch raises it in the batch's turn.

    The native side makes it.

    Args:
        error: What was raised while it arrived.
        was_raised: True if the caller has had that error already.
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
