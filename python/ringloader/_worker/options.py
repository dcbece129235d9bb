"""Options with work to do in a worker, and the fetcher of an epoch.

The worker loop asks the options of its iterator in the order of their positions. Without options, torch's own
fetcher is all there is.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from torch.utils.data import ChainDataset, ConcatDataset, StackDataset, Subset

import ringloader._native as _native
from ringloader._common.attributes import has_method
from ringloader._worker.fetch import SampleFetcher


class Fetcher(Protocol):
    """The object that the worker loop asks for batches, by the index of the task."""

    def fetch(self, index: Any, /) -> Any:
        """Returns the batch."""


class InFront:
    """Stands in front of another object, and has its attributes."""

    def __init__(self, behind: Any) -> None:
        self._behind = behind

    def __getattr__(self, name: str) -> Any:
        if name == "_behind":
            # A copy that has nothing yet.
            raise AttributeError(name)
        return getattr(self._behind, name)


@dataclasses.dataclass(frozen=True, slots=True)
class EpochStart:
    """The beginning of an epoch in one worker, and the message that makes a persistent worker begin it.

    Attributes:
        number: The number of the epoch, as ``Seeds`` count; None if no option counts epochs.
        told: The epoch that datasets with a ``set_epoch`` are told; None: they are not.
        shared_seed: The seed of DataPipes that all workers share; None for other datasets.
        base_seed: torch's base seed, where there are no workers and torch tells none of it.
        position: Where the worker goes on, as the option that takes states has it; None: at the beginning.
        of_tasks: The epoch in the numbers of its tasks, where all workers share them.
    """

    number: int | None = None
    told: int | None = None
    shared_seed: int | None = None
    base_seed: int | None = None
    position: Any = None
    of_tasks: int = 0


class Position(enum.IntEnum):
    """The places of options around torch's fetcher, from the inside out.

    An option's :meth:`WorkerOption.begin` gets the dataset that the options before it have made, its
    :meth:`WorkerOption.fill` their slots, and its :meth:`WorkerOption.wrap` their fetcher.
    """

    # Reads the items of another process. The options after it find it there when they raise.
    DISPATCH = enum.auto()
    # In the place of torch's fetcher.
    GATHER = enum.auto()
    # Begins samples before their batch is fetched.
    AHEAD = enum.auto()
    # Asks again for what raised in it.
    ERRORS = enum.auto()
    # Sets the dataset's epoch.
    EPOCH = enum.auto()
    # Takes the states of the epoch's dataset, and sends them along with what the options before have made.
    SNAPSHOT = enum.auto()
    # Measures all that the options before do.
    CLOCK = enum.auto()
    # Takes the places of samples off the index, which the others do not see.
    SEED = enum.auto()
    # Times each sample, in front of the dataset of all options before.
    TIME = enum.auto()
    # Makes parts of batches that all workers make.
    JOINT = enum.auto()
    # Tells the option that times samples where a batch begins and ends.
    BATCH = enum.auto()
    # Notes which batch is being made: the time in the other options is time in the batch.
    WATCH = enum.auto()
    # Begins tasks before their turn, with all that the options before do.
    TURN = enum.auto()


class WorkerOption:
    """One option, in each worker. Made in the main process; pickled for workers that do not fork.

    A process of a ``WorkerPool`` outlives the loader, and works for others next. What an option changes in
    the process, beyond what ``ProcessState`` of ``_features/pools/main.py`` restores, it undoes in
    :meth:`leave_process`.

    Attributes:
        position: Its place among the options of an iterator.
        ends_within: Seconds that the process has to end after the main process was killed.
    """

    position: ClassVar[Position]
    ends_within: ClassVar[float] = 0.5

    def join(self, worker: int, port: _native.Port | None, start: EpochStart) -> Callable[..., Any] | None:
        """Prepares the worker, before ``worker_init_fn``.

        Args:
            worker: The worker's number.
            port: The process's end of the transport; None in a thread.
            start: The beginning of its first epoch.

        Returns:
            A function of what makes the worker's channel, which returns what makes it in its place; None: as
            it is.
        """

    def begin(self, dataset: Any, start: EpochStart) -> Any:  # noqa: ARG002
        """Begins an epoch, before torch makes its fetcher. Returns the dataset of the epoch."""
        return dataset

    def fill(self, samples: SampleFetcher) -> None:
        """Fills slots of the epoch's fetcher, after the options before."""

    def wrap(self, fetcher: Fetcher, /) -> Fetcher:
        """Returns the fetcher to ask in place of ``fetcher`` in this epoch, once all slots are filled."""
        return fetcher

    def miss(self, has_begun: bool) -> None:
        """Passes over an epoch in which nothing is fetched.

        Args:
            has_begun: True if :meth:`wrap` may have been called in it.
        """

    def leave_process(self) -> None:
        """Undoes in a process of a pool what it has changed there. An error ends the process."""


def in_order(*options: WorkerOption | None) -> tuple[WorkerOption, ...]:
    """Returns the options that are not None, in the order of their positions."""
    return tuple(sorted(filter(None, options), key=lambda option: option.position))


class Failing:
    """The fetcher of an epoch that could not begin: each batch is the error.

    Args:
        error: The error.
        once: True for an iterable dataset, which ends after one batch.
    """

    def __init__(self, error: Exception, once: bool) -> None:
        self._error = error
        self._once = once
        self._raised = False

    def fetch(self, _index: Any, /) -> Any:
        if self._once and self._raised:
            raise StopIteration
        self._raised = True
        raise self._error


def begin_epoch(
    options: Sequence[WorkerOption],
    make: Callable[[Any], Fetcher],
    dataset: Any,
    start: EpochStart,
    is_iterable: bool,
) -> Fetcher:
    """Begins an epoch and returns its fetcher.

    Args:
        options: The options of the iterator.
        make: Makes torch's fetcher of a dataset. The caller gets its errors.
        dataset: The dataset.
        start: The beginning of the epoch.
        is_iterable: True for a dataset that ends by itself.
    """
    try:
        if start.told is not None:
            for listener in epoch_listeners(dataset):
                listener.set_epoch(start.told)
        for option in options:
            dataset = option.begin(dataset, start)
    except Exception as error:
        for option in options:
            option.miss(False)
        return Failing(error, once=is_iterable)
    torchs = make(dataset)
    if not options:
        return torchs
    has_begun = False
    try:
        samples = SampleFetcher(torchs)
        for option in options:
            option.fill(samples)
        fetcher: Fetcher = samples.fetcher()
        has_begun = True
        for option in options:
            fetcher = option.wrap(fetcher)
    except Exception as error:
        for option in options:
            option.miss(has_begun)
        # In a later epoch an error here would end the worker.
        return Failing(error, once=is_iterable)
    return fetcher


def epoch_listeners(dataset: Any) -> list[Any]:
    """Returns the datasets with a ``set_epoch`` in ``dataset``, each once.

    A dataset with a ``set_epoch`` of its own is told alone. Below one without, torch's wrapping datasets are
    searched: ``Subset``, ``ConcatDataset``, ``ChainDataset`` and ``StackDataset``.
    """
    found: list[Any] = []
    seen: set[int] = set()
    pending = [dataset]
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if has_method(one, "set_epoch"):
            found.append(one)
        elif isinstance(one, Subset):
            pending.append(one.dataset)
        elif isinstance(one, (ConcatDataset, ChainDataset, StackDataset)):
            inner: Any = one.datasets
            parts = list(inner.values() if isinstance(inner, Mapping) else inner)
            pending.extend(reversed(parts))
    return found
