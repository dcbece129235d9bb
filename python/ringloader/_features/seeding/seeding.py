"""``seeding=``: generators are set before each sample, or each batch, from its place in the epoch.

The key of a sample, by which generators are set, is that of its epoch with two more parts joined to it: the
worker, for datasets without indices, else 0; and the sample's place. The main process gives each task the
places of its samples (``_native.Placed``). Where samples are made, :class:`Seeding` takes them off again,
sets the generators, and asks the fetchers of the other options.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from torch.utils.data.distributed import DistributedSampler

import ringloader._native as _native
from ringloader._common import attributes, proc
from ringloader._core.feature import Feature, Rest, Setup, any_may_make
from ringloader._features import arrays
from ringloader._features.rules import THREAD
from ringloader._features.seeding import generators
from ringloader._features.seeding.generators import Both, Global, OfThread
from ringloader._features.table import Options
from ringloader._sources import samplers
from ringloader._torch import collating, internals, select_path
from ringloader._worker import collate
from ringloader._worker.fetch import SampleFetcher, gives_several
from ringloader._worker.fetch import Turn as SampleTurn
from ringloader._worker.options import EpochStart, Fetcher, InFront, Position, WorkerOption

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

_MASK = (1 << 64) - 1
# The options that set generators by the places of samples.
_NAMES = "seeding (also that of worker_task='sample' and num_workers='auto')"


def keyed(key: int, part: int) -> int:
    """Returns ``key`` with ``part`` joined to it. MIRRORS core::plan::fingerprint::sample_hash."""
    z = (key + (part + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return z ^ z >> 31


class Keys(Feature):
    """Makes the places of each epoch of one iterator, in the main process.

    Args:
        loader: The iterator's loader.
        seed: The number that keys come from; None for torch's base seed.
        option: Sets generators where samples are made.
    """

    counts_epochs = True
    follows_sampler = True

    def __init__(self, loader: TorchLoader, seed: int | None, option: Seeding) -> None:
        self._seed = seed
        self._option = option
        self._rank, _ = proc.ranks()
        # True if an index is a batch's.
        self._batches = loader._auto_collation
        self.in_turn = not any_may_make(loader)

    def workers(self) -> Iterable[Seeding]:
        return (self._option,)

    def places(self, index_sampler: Any, base_seed: int, number: int, rest: Rest | None) -> _native.Places:
        """Returns the object that gives tasks their places in the epoch that begins.

        Args:
            index_sampler: The iterator's.
            base_seed: Torch's for the iterator's workers.
            number: The number of the epoch, for keys.
            rest: The rest of an epoch that goes on; None for one that begins.
        """
        number, passed, start = (number, (), 0) if rest is None else rest
        first, step, rank = 0, 1, self._rank
        for sampler in itertools.islice(attributes.samplers_in(index_sampler), 2):
            if issubclass(type(sampler), DistributedSampler):
                first, step, rank = start + sampler.rank, sampler.num_replicas, 0
        parts = base_seed if self._seed is None else self._seed, number, rank
        key = functools.reduce(keyed, parts, 0)
        # Batch `k` of a sampler that gives whole batches has the places from `k * 2**32` on.
        whole = self._batches and samplers.reads_whole(index_sampler)
        if not _native.SUPPORTED:
            # No epoch resumes there, so no batch was passed.
            return cast("_native.Places", Places(key, first, step, self._batches, whole))
        return _native.Places(key, first, step, passed, self._batches, whole)


class Seeding(WorkerOption):
    """Sets generators by the places of samples.

    Args:
        before: The part of an epoch before which they are set.
        is_iterable: True for a dataset without indices, whose samples each worker counts.
        batches: True if a task is a batch.
        puts_back: True if the generators are put back behind each batch.
    """

    position = Position.SEED

    def __init__(
        self, before: Literal["sample", "batch"], is_iterable: bool, batches: bool, puts_back: bool
    ) -> None:
        self._before = before
        self._is_iterable = is_iterable
        self._batches = batches
        self._puts_back = puts_back
        self._worker = 0

    def join(self, worker: int, port: _native.Port | None, start: EpochStart) -> None:  # noqa: ARG002
        # Without indices a worker's samples are its own.
        self._worker = worker if self._is_iterable else 0

    def fill(self, samples: SampleFetcher) -> None:
        """Sets the seed of each sample, and that of a batch before the user's own ``collate_fn`` runs."""
        turn = self._turn = Turn(generators.of_this_worker(), samples.turn)
        dataset, each = samples.torchs.dataset, self._before == "sample"
        self._is_ahead = samples.ahead is not None
        if self._is_iterable:
            samples.use(_NAMES)
            samples.before_batch.append(functools.partial(turn.begin_batch, sets=not each))
            if each:
                samples.get = functools.partial(turn.get_next, samples.get)
        else:
            self._gives_several = self._batches and gives_several(dataset)
            if each and not arrays.draws_nothing(dataset):
                samples.use(_NAMES)
                if samples.ahead is None:
                    samples.get = functools.partial(turn.get, samples.get)
                samples.asks_each = not self._gives_several
                # Arrays are gathered only where no seed is set.
                samples.gather = None
        if each and not _draws_nothing(samples.collate_fn_alone):
            collate_fn = samples.torchs.collate_fn
            samples.torchs.collate_fn = functools.partial(turn.collate, collate_fn)

    def wrap(self, fetcher: Fetcher) -> Fetcher:
        return _InPlace(fetcher, self, self._turn.generators if self._puts_back else None)

    def turn_to(self, placed: _native.Placed) -> None:
        """Begins the batch of an index."""
        turn = self._turn
        turn.stream = keyed(placed.key, self._worker)
        if self._is_iterable:
            return
        turn.places, turn.first = placed.places, placed.first
        if (self._before == "batch" or self._gives_several) and not self._is_ahead:
            turn.set(placed.first)

    def seeds_of(self, placed: _native.Placed) -> list[int]:
        """Returns the seeds of the samples of an index, or of the call for all of them."""
        stream = keyed(placed.key, self._worker)
        places = [placed.first] if self._gives_several else placed.places
        return [keyed(stream, places[number]) for number in range(len(places))]


def _draws_nothing(collate_fn: Any) -> bool:
    """True for torch's own collation, if others taught it nothing."""
    is_torchs = (
        collating.is_default_collate(collate_fn)
        or type(collate_fn) in (collate.Collation, _native.Convert)
        or bool(collating.parts_of_convert(collate_fn))
    )
    return is_torchs and not collating.others_in_collate()


def feature_for(loader: TorchLoader, options: Options, setup: Setup) -> Keys | None:
    """Returns the feature of seeds by place, if an option asks for it; torch's own loader has none."""
    before = options.seeds_by_place
    if before is None or setup.path == "torch":
        return None
    if setup.workers and options.seeding is not None and options.worker_method == THREAD:
        select_path.log_once(
            f"seeding={before!r} with worker_method={THREAD!r} makes only numbers from get_worker_info().rng "
            "repeatable: threads share the generators of random, numpy.random and torch, which are not set"
        )
    is_iterable = loader._dataset_kind == internals.ITERABLE
    puts_back = setup.workers == 0
    return Keys(loader, options.seed, Seeding(before, is_iterable, loader._auto_collation, puts_back))


class Turn:
    """The seeds of a batch, or of a worker's part of an iterable dataset.

    Attributes:
        generators: The generators to set.
        stream: The key to which the place of a sample is joined.
        places: The places of a batch's samples.
        first: The place of the batch's first sample.
    """

    def __init__(self, generators: Global | OfThread | Both, sample: SampleTurn) -> None:
        self.generators = generators
        self._sample = sample
        self.stream = 0
        self.places: Sequence[int] = ()
        self.first = 0

    def set(self, place: int) -> None:
        """Sets the generators for the sample at a place."""
        self.generators.set(keyed(self.stream, place))

    def get(self, get: Callable[[Any], Any], index: Any) -> Any:
        """Returns the sample of an index, the first time and again."""
        number, places = self._sample.number, self.places
        if number < len(places):
            self.generators.set(keyed(self.stream, places[number]))
        return get(index)

    def get_next(self, get: Callable[[Any], Any], number: int) -> Any:
        """Returns the next sample of an iterable dataset."""
        self.generators.set(keyed(self.stream, number))
        return get(number)

    def begin_batch(self, sets: bool) -> None:
        """Begins a batch of an iterable dataset.

        Args:
            sets: True if the generators are set before batches.
        """
        self.first = self._sample.number
        if sets:
            self.set(self.first)

    def collate(self, collate_fn: Callable[[Any], Any], samples: Any) -> Any:
        """Collates a batch with a seed of its own."""
        # Not that of its first sample, whose numbers would be used twice.
        self.generators.set(keyed(keyed(self.stream, self.first), 0))
        return collate_fn(samples)


class _InPlace(InFront):
    """In front of a fetcher: takes the places off an index.

    Args:
        fetcher: The fetcher.
        seeding: Sets generators by the places.
        programs: Generators that are put back behind each batch, because they are the program's; None: none.
    """

    def __init__(self, fetcher: Fetcher, seeding: Seeding, programs: Global | OfThread | Both | None) -> None:
        super().__init__(fetcher)
        self._seeding = seeding
        self._programs = programs

    def begin(self, placed: _native.Placed) -> Any:
        """Begins the samples of an index, each with its seed."""
        return self._behind.begin(placed.index, self._seeding.seeds_of(placed))

    def fetch(self, placed: _native.Placed, /) -> Any:
        states = None if self._programs is None else self._programs.states()
        try:
            self._seeding.turn_to(placed)
            return self._behind.fetch(placed.index)
        finally:
            if self._programs is not None:
                self._programs.put_back(states)


_MASK = (1 << 64) - 1


class Placed(NamedTuple):
    """An index, and where its samples stand in the epoch. Has the attributes of ``_native.Placed``."""

    # In the place of a method of tuples, which is not called here.
    index: Any
    key: int
    first: int
    places: Sequence[int]


class Places:
    """Gives each index the places of its samples. MIRRORS core::plan::places of an epoch from its beginning.

    Args:
        key: The key of the epoch.
        first: The place of the sampler's first sample.
        step: The distance to the place of the next one.
        batches: True if an index is a batch's.
        whole: True if batch ``k`` has the places from ``k * 2**32`` on.
    """

    def __init__(self, key: int, first: int, step: int, batches: bool, whole: bool) -> None:
        self._key = key
        self._next = first
        self._step = step
        self._batches = batches
        self._whole = whole

    def placed(self, index: Any) -> Placed:
        """Returns an index that was read from the sampler, with the places of its samples."""
        index, count = self._counted(index)
        place = self._next
        self._next = (place + (1 if self._whole else count) * self._step) & _MASK
        if self._whole:
            place = place << 32 & _MASK
        places = range(place, place + count * self._step, self._step)
        return Placed(index, self._key, place, places)

    def _counted(self, index: Any) -> tuple[Any, int]:
        """Returns an index and the number of its samples. One without a length becomes a list."""
        if not self._batches:
            return index, 1
        try:
            return index, len(index)
        except Exception:
            pass
        try:
            index = list(index)
        except Exception:
            # The fetcher refuses it, as torch's does.
            return index, 1
        return index, len(index)
