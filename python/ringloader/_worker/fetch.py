"""Between torch's worker loop and the dataset: what options do around the fetching of a batch.

torch's loop makes a fetcher when it begins and, in persistent workers, at the start of each epoch after that.
Where an iterator has steps, each step is asked then: for the dataset of the epoch, before torch makes the
fetcher and, with it, the iterator of an iterable dataset; and for the fetcher. Without steps nothing here
runs, and torch's own fetcher is all there is.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import ringloader._native as _native
from ringloader._torch import internals, stand_ins


class Fetcher(Protocol):
    """What torch's loop asks for batches, by the index of the task."""

    def fetch(self, index: Any, /) -> Any:
        """The batch."""


# Called at the start of each epoch, in the worker, with torch's fetcher or that of the step before. Returns
# the one to ask instead. Made in the main process; pickled for workers that do not fork. A method `begin`
# of it is given the dataset before, and returns the one for the epoch.
Step = Callable[[Fetcher], Fetcher]

# Those of this worker, and whether torch's loop asks them. A worker that this one forks has them too.
_in_place: list[Step] = []
_is_put = False


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
        """Called where an epoch cannot start, and this step was asked: nothing is fetched in it."""

    @abstractmethod
    def miss(self) -> None:
        """The same where this step was not asked: the epoch is one that it has not counted."""


class Failing:
    """For an epoch whose start failed: each batch is that error. An iterable dataset ends after one."""

    def __init__(self, error: Exception, once: bool) -> None:
        self._error = error
        self._once = once
        self._raised = False

    def fetch(self, _index: Any, /) -> Any:
        if self._once and self._raised:
            raise StopIteration
        self._raised = True
        raise self._error


def joining(steps: Sequence[Step], worker: int, port: _native.Port, tasks: Any) -> Any:
    """The worker's task queue, once the steps that join have done so. Without such steps, as it was."""
    # A process of a pool has had other iterators, and a worker's child has what that worker had begun.
    _Begun.is_so = False
    found = [step for step in steps if isinstance(step, JoiningStep)]
    # A fork of a process that makes fetchers without workers has what that one noted.
    _Begun.is_so = False
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
            _miss(self._steps)
        return self._tasks.get(timeout)


class _Begun:
    """Whether steps know that this worker began an epoch: not where ``worker_init_fn`` has failed."""

    is_so = False


def _leave(steps: Sequence[Step]) -> None:
    for step in steps:
        if isinstance(step, JoiningStep):
            step.leave()


def _miss(steps: Sequence[Step]) -> None:
    _Begun.is_so = True
    for step in steps:
        if isinstance(step, JoiningStep):
            step.miss()


def through(fetcher: Fetcher, steps: Sequence[Step], is_iterable: bool) -> Fetcher:
    """What to ask for batches in an epoch: ``fetcher``, or what the steps make of it."""
    try:
        for step in steps:
            fetcher = step(fetcher)
    except Exception as error:
        _leave(steps)
        # torch's loop does not expect it in later epochs: the worker would end.
        return Failing(error, once=is_iterable)
    return fetcher


def in_place() -> Sequence[Step]:
    """The steps that fetchers go through in this worker."""
    return _in_place


class State:
    """The steps of this process as they are now, for one that works for several iterators in turn."""

    def __init__(self) -> None:
        self._steps = tuple(_in_place)
        self._was_put = _is_put

    def restore(self) -> None:
        """Has them again. What makes torch's fetchers is put back by the caller."""
        global _is_put
        _in_place[:] = self._steps
        _is_put = self._was_put


def begun(
    begin: Sequence[Callable[[Any], Any]],
    steps: Sequence[Step],
    make: Callable[[Any], Fetcher],
    dataset: Any,
    is_iterable: bool,
) -> Fetcher:
    """The fetcher of an epoch that begins.

    Args:
        begin: What takes the dataset, and returns the one for the epoch.
        steps: What takes the fetcher.
        make: Makes torch's fetcher of a dataset. What it raises is torch's matter.
        dataset: The dataset.
        is_iterable: Whether it is one that ends by itself.
    """
    try:
        for one in begin:
            dataset = one(dataset)
    except Exception as error:
        _miss(steps)
        return Failing(error, once=is_iterable)
    return through(make(dataset), steps, is_iterable)


def put_steps(steps: Sequence[Step]) -> None:
    """Has the fetchers of torch's loop, in this worker, go through ``steps``, in place of those before."""
    global _is_put
    _in_place[:] = steps
    if not _is_put:
        _is_put = True
        stand_ins.replace_create_fetcher(_make_create_fetcher)


def _make_create_fetcher(torchs_own: Callable[..., Any]) -> Callable[..., Any]:
    def create_fetcher(kind: Any, dataset: Any, *args: Any, **options: Any) -> Any:
        # A loader inside the dataset makes fetchers too.
        if not internals.is_code_of_worker_loop(sys._getframe(1).f_code):
            return torchs_own(kind, dataset, *args, **options)

        def torchs_fetcher(dataset: Any) -> Fetcher:
            fetcher: Fetcher = torchs_own(kind, dataset, *args, **options)
            _Begun.is_so = True
            return fetcher

        begin = [step.begin for step in _in_place if hasattr(step, "begin")]
        return begun(begin, _in_place, torchs_fetcher, dataset, kind == internals.ITERABLE)

    return create_fetcher


class PutSteps:
    """Stands in for a ``worker_init_fn`` where torch starts the workers: puts steps, then calls it."""

    def __init__(self, steps: Sequence[Step], init_fn: Callable[[int], object] | None) -> None:
        self._steps = steps
        self._init_fn = init_fn
        self._made_in = os.getpid()

    def __call__(self, worker_id: int) -> None:
        if os.getpid() == self._made_in:
            raise RuntimeError(
                "worker_reset_fn, reseed_workers and on_error cannot take effect: workers are no processes"
            )
        put_steps(self._steps)
        if self._init_fn is not None:
            self._init_fn(worker_id)
