"""Between torch's worker loop and the dataset: what options do around the fetching of a batch.

torch's loop makes a fetcher when it begins and, in persistent workers, at the start of each epoch after that.
Where an iterator has steps, each step is asked then. Without steps nothing here runs, and torch's own fetcher
is all there is.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import ringloader._native as _native
from ringloader._torch import internals


class Fetcher(Protocol):
    """What torch's loop asks for batches, by the index of the task."""

    def fetch(self, index: Any, /) -> Any:
        """The batch."""


# Called at the start of each epoch, in the worker, with torch's fetcher or that of the step before. Returns
# the one to ask instead. Made in the main process; pickled for workers that do not fork.
Step = Callable[[Fetcher], Fetcher]


class JoiningStep(ABC):
    """A step that has work to do before torch's loop begins, and where an epoch does not begin."""

    @abstractmethod
    def join(self, worker: int, port: _native.Port) -> None:
        """Called once, in the worker, before torch's loop."""

    @abstractmethod
    def __call__(self, fetcher: Fetcher, /) -> Fetcher:
        """As any step."""

    @abstractmethod
    def leave(self) -> None:
        """Called where the worker has begun an epoch in which it fetches nothing: its start has failed."""


class _Failing:
    """For an epoch whose start failed: each of its batches is that error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def fetch(self, _index: Any, /) -> Any:
        raise self._error


def joining(steps: Sequence[Step], worker: int, port: _native.Port, tasks: Any) -> Any:
    """The worker's task queue, once the steps that join have done so. Without such steps, as it was."""
    found = [step for step in steps if isinstance(step, JoiningStep)]
    for step in found:
        step.join(worker, port)
    return _FirstTask(tasks, found) if found else tasks


class _FirstTask:
    """A task queue whose first question tells that torch's loop has begun, with a fetcher or without."""

    def __init__(self, tasks: Any, steps: Sequence[JoiningStep]) -> None:
        self._tasks = tasks
        self._steps = steps
        self.get = self._get_first

    def _get_first(self, timeout: float | None = None) -> Any:
        self.get = self._tasks.get
        if not _Begun.is_so:
            _leave(self._steps)
        return self._tasks.get(timeout)


class _Begun:
    """Whether a fetcher of this worker was made: not where ``worker_init_fn`` has failed."""

    is_so = False


def _leave(steps: Sequence[Step]) -> None:
    for step in steps:
        if isinstance(step, JoiningStep):
            step.leave()


def through(fetcher: Fetcher, steps: Sequence[Step]) -> Fetcher:
    """What to ask for batches in an epoch: ``fetcher``, or what the steps make of it."""
    try:
        for step in steps:
            fetcher = step(fetcher)
    except Exception as error:
        _leave(steps)
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
            _Begun.is_so = True
            return through(fetcher, steps)

        return create_fetcher

    internals.replace_create_fetcher(make)
