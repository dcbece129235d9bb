"""``on_error=``: the handling of samples that raise."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

RAISE: Final = "raise"
SKIP: Final = "skip"
RETRY: Final = "retry"
WORDS = (RAISE, SKIP, RETRY)

# Called in the worker with the index and the error; returns the sample to have instead.
Replace = Callable[[Any, Exception], Any]


@dataclasses.dataclass(frozen=True)
class Retry:
    """A value of ``on_error``: if a sample raises, the worker pauses and tries it again.

    Args:
        times: The largest number of further tries.
        backoff: Seconds before the first further try. Each pause is twice the one before, and 30 seconds at
            most.
        then: For a sample that still raises: ``"raise"``, ``"skip"``, or a function, as for ``on_error``.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range.
    """

    times: int = 3
    backoff: float = 0.1
    then: Literal["raise", "skip"] | Replace = RAISE

    def __post_init__(self) -> None:
        if not isinstance(self.times, int) or isinstance(self.times, bool):
            raise TypeError(f"Retry: times must be an int, not {self.times!r}")
        if self.times <= 0:
            raise ValueError(f"Retry: times must be positive, not {self.times}")
        if not isinstance(self.backoff, (int, float)) or isinstance(self.backoff, bool):
            raise TypeError(f"Retry: backoff must be a number of seconds, not {self.backoff!r}")
        if not 0 <= self.backoff < math.inf:
            raise ValueError(f"Retry: backoff must be 0 or more seconds, not {self.backoff}")
        if callable(self.then):
            check_replaces("Retry: then", self.then)
        elif self.then not in (RAISE, SKIP):
            raise ValueError(f"Retry: then must be 'raise', 'skip' or a callable, not {self.then!r}")


OnError = Literal["raise", "skip", "retry"] | Retry | Replace


@dataclasses.dataclass(frozen=True)
class BadSample:
    """A sample that raised, and what was done: an entry of ``DataLoader.errors``.

    Attributes:
        index: The index of the dataset. For an ``IterableDataset``, the number of samples before it in this
            worker. If ``collate_fn`` raised, the batch's indices.
        worker_id: The worker's number; None without workers.
        error: The exception, without its traceback. If it cannot be pickled or unpickled, a ``RuntimeError``
            with its text.
        traceback: The text of the traceback.
        handling: ``"skipped"``, ``"replaced"``, ``"retried"`` (a later try was good), or ``"raised"``
            (``max_errors`` was exceeded).
    """

    index: Any
    worker_id: int | None
    error: BaseException
    traceback: str
    handling: str


def forget_limit(before: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Drops a ``max_errors`` from the options ``before`` if it means nothing with the given ones."""
    if given.get("on_error") == RAISE:
        before.pop("max_errors", None)


def check_replaces(name: str, function: Callable[..., Any]) -> None:
    """Raises for a function that cannot be called with an index and an error."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # One of C that does not say.
        return
    try:
        signature.bind(0, OSError())
    except TypeError as error:
        raise TypeError(
            f"{name} is called with an index and an error, which {function!r} does not take: {error}"
        ) from None
