"""Keys and places of an epoch's samples in the main process, for ``seeding=``.

The key of a sample, by which generators are set, is that of its epoch with two more parts joined to it: the
worker, for datasets without indices, else 0; and the sample's place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any

from torch.utils.data.distributed import DistributedSampler

import ringloader._native as _native
from ringloader._options import epochs
from ringloader._options.table import Options
from ringloader._torch import internals
from ringloader._worker.options import Fetcher, InFront
from ringloader._worker.placed import Placed

_MASK = (1 << 64) - 1


def keyed(key: int, part: int) -> int:
    """Returns ``key`` with ``part`` joined to it. MIRRORS core::plan::fingerprint::sample_hash."""
    z = (key + (part + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return z ^ z >> 31


@dataclasses.dataclass(frozen=True, slots=True)
class Places:
    """The key and the places of an epoch's samples.

    Attributes:
        key: The key.
        first: The place of the sampler's first sample.
        step: The distance to the place of the next one.
        passed: Samples that the epoch passes over: ranges of their numbers, each from its first to behind its
            last.
        batches: True if an index is a batch's.
        whole: True if the numbers are those of batches: batch ``k`` has the places from ``k * 2**32`` on.
    """

    key: int
    first: int
    step: int
    passed: Sequence[tuple[int, int]]
    batches: bool
    whole: bool = False

    def native(self) -> _native.Places:
        """Returns what gives tasks their places as they are read."""
        return _native.Places(self.key, self.first, self.step, self.passed, self.batches, self.whole)


class Keys:
    """Makes the places of each epoch of one iterator.

    Args:
        seed: What keys come from; None for torch's base seed.
        rank: This process's.
        epoch: The first epoch, as ``Seeds`` count.
        batches: True if an index is a batch's.
        balances: True if any worker may make any batch.
    """

    def __init__(self, seed: int | None, rank: int, epoch: int, batches: bool, balances: bool) -> None:
        self._seed = seed
        self._rank = rank
        self._batches = batches
        self.epoch = epoch
        self.balances = balances

    def begin(
        self,
        index_sampler: Any,
        base_seed: int,
        passed: Sequence[tuple[int, int]] = (),
        epoch: int | None = None,
        start: int = 0,
        whole: bool = False,
    ) -> Places:
        """Returns the places of the epoch that begins.

        Args:
            index_sampler: The iterator's.
            base_seed: Torch's for the iterator's workers.
            passed: Samples that a resumed epoch passes over.
            epoch: The number of a resumed epoch.
            whole: True if batches are read whole.
            start: The place where a resumed epoch began for so many ranks.
        """
        samplers = index_sampler, getattr(index_sampler, "sampler", None)
        if epoch is None:
            epoch = next((epoch for epoch in map(_epoch_of, samplers) if epoch is not None), self.epoch)
        first, step, rank = 0, 1, self._rank
        for sampler in samplers:
            if isinstance(sampler, DistributedSampler):
                first, step, rank = start + sampler.rank, sampler.num_replicas, 0
        parts = base_seed if self._seed is None else self._seed, epoch, rank
        whole = whole and self._batches
        return Places(functools.reduce(keyed, parts, 0), first, step, passed, self._batches, whole)


def _epoch_of(sampler: Any) -> int | None:
    epoch = getattr(sampler, "epoch", None)
    return int(epoch) if hasattr(sampler, "set_epoch") and isinstance(epoch, Integral) else None


def keys_for(loader: Any, options: Options, epoch: int | None) -> Keys | None:
    """Returns what makes the places of an iterator's epochs, the first of which has this number."""
    if options.seeding == "torch":
        return None
    assert epoch is not None
    is_iterable = loader._dataset_kind == internals.ITERABLE
    balances = not is_iterable and not hasattr(loader.dataset, "state_dict")
    rank, _ = epochs.ranks()
    return Keys(options.seed, rank, epoch, loader._auto_collation, balances)


class Placing(InFront):
    """In front of the fetcher of a loader without workers: places indices.

    MIRRORS core::plan::places::Places.

    Args:
        fetcher: The fetcher, which takes the places off again.
        places: The epoch's.
    """

    def __init__(self, fetcher: Fetcher, places: Places) -> None:
        super().__init__(fetcher)
        self._places = places
        self._numbers = _numbers(places.passed)
        self._next = next(self._numbers)

    def fetch(self, index: Any, /) -> Any:
        return self._behind.fetch(self._placed(index))

    def _placed(self, index: Any) -> Placed:
        of = self._places
        index, samples = _counted(index) if of.batches else (index, 1)
        if of.whole:
            first, self._next = self._next << 32, next(self._numbers)
            return Placed(index, of.key, first, range(first, first + samples))
        first = of.first + self._next * of.step
        found = []
        for _ in range(samples):
            found.append(of.first + self._next * of.step)
            self._next = next(self._numbers)
        return Placed(index, of.key, first, found)


def _counted(index: Any) -> tuple[Any, int]:
    """Returns a batch's index, which becomes a list if it has no length, and the number of its samples."""
    try:
        return index, len(index)
    except Exception:
        # An index that is nonsense has its error from torch's fetcher.
        pass
    try:
        items = iter(index)
    except Exception:
        return index, 1
    listed = list(items)
    return listed, len(listed)


def _numbers(passed: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Yields the numbers of an epoch's samples, without those that are passed over."""
    number = 0
    for start, stop in passed:
        yield from range(number, start)
        number = stop
    while True:
        yield number
        number += 1
