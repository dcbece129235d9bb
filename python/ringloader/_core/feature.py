"""A feature of an iterator, as the core sees it: the places where it takes part.

Features derive from `Feature`, and a list of them stands above the core, which names none.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from ringloader._torch import internals

if TYPE_CHECKING:
    import ringloader._native as _native
    from ringloader._common.protocols import OurIterator, OurWorkersIterator
    from ringloader._torch.protocols import TorchIterator, TorchLoader
    from ringloader._transport.overdue import Late, LostWorker

_T = TypeVar("_T")

# Gives the next batch to the iterator that it is called with.
Take = Callable[[Any], Any]


class StagePosition(enum.IntEnum):
    """The places of stages around the source of an iterator's batches, from the inside out."""

    # Adds and ends workers.
    WORKERS = enum.auto()
    # Begins the next epoch early.
    NEXT_EPOCH = enum.auto()
    # Takes the snapshots of the dataset off batches.
    SNAPSHOTS = enum.auto()
    # Takes bad samples off batches.
    ERRORS = enum.auto()
    # Notes when a batch comes that is still to be placed.
    FETCHED = enum.auto()
    # Moves or transforms batches in the call of `next`.
    PLACE = enum.auto()
    # Measures how long `next` takes.
    TIMES = enum.auto()
    # Measures that for a report at exit.
    CLOCK = enum.auto()


class Stage(Protocol):
    """A stage between the source of an iterator's batches and its caller.

    Attributes:
        position: Its place among the stages of an iterator.
    """

    position: StagePosition

    def around(self, take: Take) -> Take:
        """Returns ``take`` with this stage around it."""


class Setup(NamedTuple):
    """The way in which an iterator makes its batches.

    Attributes:
        path: Its path, as a report names it.
        workers: The most workers that it may have.
        running: The workers with which it begins.
        history: Returns the number of workers, and its changes; None where the number does not change.
        under_way: Returns the most samples of a worker that were under way at once; None: not noted.
    """

    path: str
    workers: int = 0
    running: int = 0
    history: Callable[[], tuple[int, Sequence[Any]]] | None = None
    under_way: Callable[[int], int] | None = None


class MemoryPlan(NamedTuple):
    """The plan of the shared memory of an iterator's workers.

    Attributes:
        most_tasks: The most batches of one worker on their way at once.
        sharers: The workers that share the memory equally.
        parts: The equal parts of a worker's share; its batches have the first.
        use: What the memory is used for. Memory of the last epoch is not taken for another use.
    """

    most_tasks: int
    sharers: int
    parts: int = 1
    use: object = None


class Rest(NamedTuple):
    """The rest of an epoch that resumes from a state, for the places of its samples.

    Attributes:
        number: The number by which the samples' keys are made.
        passed: Ranges of samples that are passed over, each from its first to the one after its last.
        start: The place where the epoch began for the present number of ranks.
    """

    number: int
    passed: Sequence[tuple[int, int]]
    start: int


class TrackedEpoch(Protocol):
    """An epoch whose state can be asked for, as iterators see it."""

    # The seed of the workers, which the iterator then does not draw.
    given_seed: int | None

    @property
    def is_drawn(self) -> bool:
        """True if the epoch resumes, and has drawn before all that ``iter`` draws."""

    @property
    def rest(self) -> Rest | None:
        """The part that is still to be read; None for an epoch that begins."""

    def start_of(self, worker: int) -> Any:
        """Returns where a worker begins; None: at the beginning of the epoch."""

    def start_after(self, worker: int) -> tuple[str | None, Any]:
        """Returns why a lost worker may have no successor, if that is so, and where one begins."""

    def begin(self, iterator: TorchIterator, drawn: bool) -> None:
        """Records the seeds of an iterator, and whether this epoch has drawn them."""

    def index_source(self, iterator: TorchIterator, places: _native.Places | None) -> _native.IndexSource:
        """Returns the source of the tasks of an iterator with workers."""

    def read(self, iterator: TorchIterator) -> None:
        """Makes an iterator without workers read the epoch from where it is."""

    def next_index(self, read: Callable[[], Any]) -> Any:
        """Returns the index that ``read`` gives an iterator without workers."""

    def count_errors(self, collecting: Any) -> None:
        """Makes ``Collecting`` count the bad samples from where the epoch begins."""


class Feature:
    """One feature that is on, in one iterator. By default it takes part nowhere.

    INVARIANT: it has no reference to the iterator, whose workers end when its last user drops it.

    Attributes:
        position: Its place among the stages, if it is one.
        counts_epochs: True if it needs the numbers of epochs.
        follows_sampler: True if it needs the epochs of the sampler, as one that gives places does.
        in_turn: False if a task may go to any worker, whose turn it need not be.
        has_begun_next: True once the next epoch has begun, before ``iter`` has asked for it.
        counters: Returns what a report counts, if anything. Leads to nothing of the user's.
    """

    position: StagePosition | None = None
    counts_epochs = False
    follows_sampler = False
    in_turn = True
    has_begun_next = False
    counters: Callable[[], Mapping[str, int]] | None = None

    def setup(self, setup: Setup) -> Setup:
        """Returns the way in which the iterator makes its batches, as this feature changes it."""
        return setup

    def workers(self) -> Iterable[Any]:
        """Returns the ``WorkerOption`` objects that take part where batches are made."""
        return ()

    def memory(self, plan: MemoryPlan) -> MemoryPlan:
        """Returns the plan of the memory, as this feature changes it."""
        return plan

    def attach(self, transport: Any) -> None:
        """Gets the transport of an iterator with workers, which have not started yet.

        Raises:
            BaseException: An error. The transport is closed then, and with it what was added to it.
        """

    def work(self, work: Any) -> Any:
        """Returns the ``Work`` of a worker, as this feature changes it."""
        return work

    def stages(self) -> Iterable[Stage]:
        """Returns the stages of an epoch: the feature itself, if it has a position."""
        return () if self.position is None else (self,)  # type: ignore[return-value]

    def placement(self) -> Any:
        """Returns the ``Placement`` of batches, if it brings them elsewhere."""
        return None

    def places(self, *_args: Any, **_kwargs: Any) -> _native.Places | None:
        """Returns what gives the tasks of an epoch the places of their samples."""
        return None

    def schedule(self, scheduler: Any) -> None:
        """Gets the scheduler before its first task."""

    def begin_times(self) -> None:
        """Begins another epoch of the same iterator: the first step of ``iter``."""

    def begun_plan(self, *_args: Any) -> Any:
        """Returns the plan and draws of an epoch that has begun before ``iter``, if it is the next one."""
        return None

    def begin_epoch(self, loader: TorchLoader) -> None:
        """Begins another epoch of the same iterator."""

    def loaded(self, loader: TorchLoader) -> Any:
        """Returns the state from which the next epoch of a loader resumes; None: it begins."""

    def track(
        self, loader: TorchLoader, iterator: OurIterator, number: int, loaded: Any, are_same: bool
    ) -> TrackedEpoch | None:
        """Returns an epoch whose state can be asked for, before anything is drawn for it.

        Args:
            loader: The loader.
            iterator: Its iterator, which the epoch does not keep alive.
            number: The number of the epoch.
            loaded: The state from which it resumes; None: it begins.
            are_same: True if the workers are those of the epoch before.
        """

    def torchs(
        self, loader: TorchLoader, reason: str, get_iterator: Any, iterator: TorchIterator | None = None
    ) -> Any:
        """Makes torch's own iterator, or begins another epoch of it. None: the core does so.

        Args:
            loader: The loader.
            reason: The reason why torch's loader runs.
            get_iterator: What stands in the place of ``DataLoader._get_iterator``, our hook aside.
            iterator: The iterator with the workers of the epoch before; None for the first one.
        """

    def begun(self, loader: TorchLoader, iterator: OurIterator) -> None:
        """Notes that an epoch has begun: the last step of ``iter``."""

    def raised(self, iterator: OurIterator, error: BaseException) -> None:
        """Notes that ``next`` has raised."""

    def lost(self, lost: LostWorker) -> Any:  # noqa: ARG002
        """Starts a successor of a lost worker, and returns its handle; None if there may be none."""
        return None

    def replaced(self, iterator: OurWorkersIterator, worker: int) -> None:
        """Gets the number of a worker that has a successor."""

    def give_up_next(self) -> None:
        """Makes ``iter`` begin the next epoch itself, even if it has begun."""

    def waits(self, seconds: float, workers: Sequence[Any], owing: Sequence[Late]) -> None:
        """Notes that no batch has come for some seconds. ``owing``: the tasks that workers owe."""

    def late(self, error: BaseException, workers: Sequence[Any], late: Sequence[Late]) -> None:
        """Adds notes to the error of a timeout. ``late``: the tasks that are waited for."""

    def end(self) -> None:
        """Ends the iterator, before its workers end."""

    def close(self) -> None:
        """Gives back memory and descriptors, once the workers have ended."""

    def noted(self, note: Any) -> None:
        """Gets the ``Note`` of the iterator, for reports: the last step of its first ``iter``."""


class InWorkers(Feature):
    """A feature that takes part where batches are made, and nowhere else.

    Args:
        option: Its ``WorkerOption``.
        counts_epochs: True if that needs the numbers of epochs.
    """

    def __init__(self, option: Any, counts_epochs: bool = False) -> None:
        self._option = option
        self.counts_epochs = counts_epochs

    def workers(self) -> Iterable[Any]:
        return (self._option,)


class Options(Protocol):
    """The options of a loader, as the core sees them."""

    @property
    def changed(self) -> tuple[str, ...]:
        """The names of the options that have another value than their default."""

    @property
    def max_shared_bytes(self) -> int | None: ...


class FeatureList(Protocol):
    """The list of features, which stands above the core.

    Attributes:
        at_exit: Has a ``mode``, which is not empty if a report at exit is asked for. Its clock is a feature.
        fetchers: By class of dataset, the function that wraps torch's fetcher of a loader without workers.
    """

    at_exit: Any

    @property
    def fetchers(self) -> Mapping[type, Callable[[Any], Any]]: ...

    def begun(self, loader: TorchLoader, options: Any, /) -> tuple[int, Any]:
        """Returns the number of workers of an iterator, and its options. Raises if these do not fit."""

    def without_effect(self, loader: TorchLoader, options: Any, reason: str, /) -> Sequence[str]:
        """Returns the options that torch's own iterator leaves out. Raises for options that it must have."""

    def features_of(self, loader: TorchLoader, options: Any, setup: Setup, /) -> tuple[Feature, ...]:
        """Returns the features that are on, in their order."""

    def kind_of(self, loader: TorchLoader, options: Any, /) -> Any:
        """Returns the ``WorkerKind`` of a loader with workers, if it is another one than the core's."""


class Hook(NamedTuple):
    """The place where a loader is asked for an iterator.

    Attributes:
        get_iterator: ``DataLoader._get_iterator`` without our hook: torch's own, or a replacement.
        fall_back: Makes torch's iterator. It may come to a hook further down, beneath a wrapper, which takes
            another path and notes that one.
        features: The features that there are.
        always: Make features that are on in each iterator of the loader's class.
    """

    get_iterator: Any
    fall_back: Callable[[], Any]
    features: FeatureList
    always: tuple[Callable[[TorchLoader, Any, Setup], Feature], ...] = ()


def first(found: Iterable[_T | None]) -> _T | None:
    """Returns the first of some values that is not None."""
    return next((one for one in found if one is not None), None)


def placement_of(features: Iterable[Feature]) -> Any:
    """Returns the placement of the first feature that has one, or None."""
    return first(feature.placement() for feature in features)


def loaded_of(features: Iterable[Feature], loader: TorchLoader) -> Any:
    """Returns the state from which the next epoch of a loader resumes; None: it begins."""
    return first(feature.loaded(loader) for feature in features)


def asks_dataset(loader: object) -> bool:
    """True if the dataset of a loader has, or may have, a part in the loader's state."""
    ask = getattr(type(loader), "_ringloader_asks_dataset", None)
    return ask is not None and bool(ask(loader))


def any_may_make(loader: TorchLoader) -> bool:
    """True if any worker may make any batch of a loader that seeds by places."""
    return loader._dataset_kind != internals.ITERABLE and not asks_dataset(loader)


def chain(take: Take, features: Iterable[Feature], gate: Any, *more: Stage) -> Take:
    """Returns ``take`` with the stages of features, and ``more``, around it, and a gate around all."""
    stages = [*more, *(stage for feature in features for stage in feature.stages())]
    for stage in sorted(stages, key=lambda stage: stage.position):
        take = stage.around(take)
    return take if gate is None else gate.around(take)
