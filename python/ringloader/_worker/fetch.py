"""Between torch's worker loop and the dataset: what options do around the fetching of a batch.

torch's loop makes a fetcher when it begins and, in persistent workers, at the start of each epoch after that.
Where an iterator has steps, each step is asked then. Without steps nothing here runs, and torch's own fetcher
is all there is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ringloader._torch import internals


class Fetcher(Protocol):
    """What torch's loop asks for batches, by the index of the task."""

    def fetch(self, index: Any, /) -> Any:
        """The batch."""


# Called at the start of each epoch, in the worker, with torch's fetcher or that of the step before. Returns
# the one to ask instead. Made in the main process; pickled for workers that do not fork.
Step = Callable[[Fetcher], Fetcher]


class _Failing:
    """For an epoch whose start failed: each of its batches is that error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def fetch(self, _index: Any, /) -> Any:
        raise self._error


def through(fetcher: Fetcher, steps: Sequence[Step]) -> Fetcher:
    """What to ask for batches in an epoch: ``fetcher``, or what the steps make of it."""
    try:
        for step in steps:
            fetcher = step(fetcher)
    except Exception as error:
        # torch's loop does not expect it in later epochs: the worker would end.
        return _Failing(error)
    return fetcher


def put_steps(steps: Sequence[Step]) -> None:
    """Has the fetchers of torch's loop, in this worker, go through ``steps``."""

    def make(torchs_own: Callable[..., Any]) -> Callable[..., Any]:
        def create_fetcher(*args: Any, **options: Any) -> Any:
            fetcher = torchs_own(*args, **options)
            # A loader inside the dataset makes fetchers too.
            if not internals.is_code_of_worker_loop(sys._getframe(1).f_code):
                return fetcher
            return through(fetcher, steps)

        return create_fetcher

    internals.replace_create_fetcher(make)
