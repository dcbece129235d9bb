"""Samplers of torch that are read natively, and torch's draws for them.

The native stream never draws. Where the body of torch's generator would, it asks the objects here, so that
every draw is torch's own, at torch's moment.
"""

from __future__ import annotations

import functools
import itertools
import operator
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import sampler as torch_sampler
from torch.utils.data.distributed import DistributedSampler

import ringloader._native as _native
from ringloader._sources import randperm
from ringloader._sources.rollover import OWN_ITER, RolloverBatchSampler
from ringloader._torch import internals

_T = TypeVar("_T")


def index_source(index_sampler: Any, places: _native.Places | None = None) -> _native.IndexSource:
    """Returns the source of an epoch's indices: a native stream if there is one, else Python's ``next``.

    Args:
        index_sampler: The loader's.
        places: Gives tasks the places of their samples.
    """
    found = draws_of(index_sampler)
    if found is None:
        return _native.IndexSource.python(None, places)
    return _native.IndexSource.native(found, None, places)


def draws_of(index_sampler: Any, for_state: bool = False) -> TorchDraws | None:
    """Returns the answers to a native stream for a loader's index sampler; None if Python must iterate it.

    Args:
        index_sampler: The loader's.
        for_state: True for an epoch with a state, which has the draws: also for samplers that do in ``iter``
            what a stream does at its first request.
    """
    batch: _native.BatchRule | None = None
    rolling: RolloverBatchSampler | None = None
    sampler = index_sampler
    if type(sampler) is torch_sampler.BatchSampler:
        if not _is_torchs_own(sampler):
            return None
        size, drop_last = sampler.batch_size, sampler.drop_last
        if not _is_size(size) or type(drop_last) is not bool:
            return None
        batch = _native.BatchRule(size, drop_last, None if drop_last else index_sampler)
        sampler = sampler.sampler
    elif type(sampler) is RolloverBatchSampler:
        if type(sampler).__iter__ is not OWN_ITER or not _is_size(sampler.batch_size):
            return None
        batch, rolling = _native.BatchRule(sampler.batch_size, True), sampler
        sampler = sampler.sampler
    opener = _OPENERS.get(type(sampler))
    if opener is None or not _is_torchs_own(sampler):
        return None
    made = opener(sampler, batch)
    made.rolling = rolling
    made.is_recording = for_state
    return made if made.is_plain() and (for_state or not made.works_in_iter()) else None


def reads_whole(index_sampler: Any) -> bool:
    """True for a batch sampler that gives its batches whole: its samples cannot be read index by index."""
    if type(index_sampler) is torch_sampler.BatchSampler:
        return not _is_torchs_own(index_sampler)
    if type(index_sampler) is RolloverBatchSampler:
        return RolloverBatchSampler.__iter__ is not OWN_ITER
    return type(index_sampler) not in _OPENERS


def _is_size(size: Any) -> bool:
    return type(size) is int and 1 <= size <= sys.maxsize


def _is_torchs_own(sampler: Any) -> bool:
    return internals.is_torchs_own(type(sampler).__iter__, f"{type(sampler).__name__}.__iter__")


class Resumed(NamedTuple):
    """An epoch that was begun before, and resumes.

    Attributes:
        drawn: What it has drawn from the program's generator: a seed, or the state before the first draw.
        draws: The number of draws since that state; None for all draws of the epoch.
        start: Samples that all ranks have passed before, when there were more or fewer of them.
        begin: Called with the stream, once it is made.
    """

    drawn: int | torch.Tensor | None = None
    draws: int | None = None
    start: int = 0
    begin: Callable[[_native.Stream], None] | None = None


class TorchDraws(randperm.Draws):
    """Reads and draws of torch for one epoch of a sampler. The stream asks for each when torch would."""

    # True if the sampler's indices may be other objects than ints.
    has_any_indices = False

    def __init__(self, sampler: Any, batch: _native.BatchRule | None) -> None:
        self.sampler = sampler
        self.batch = batch
        # The batch sampler that takes what is left over.
        self.rolling: RolloverBatchSampler | None = None
        self._words_from: torch.Generator | None = None
        # True if draws from the program's generator are recorded, for the state of the epoch.
        self.is_recording = False
        # The state of the program's generator before the first draw.
        self._before: torch.Tensor | None = None
        # Draws from the program's generator.
        self._made = 0
        # The epoch in which this continues.
        self.resumed = Resumed()
        # Makes its draws again, and the number that it has made.
        self._twin: torch.Generator | None = None
        self._made_again = 0
        # Threads that share an iterator open one stream. A dataset's length may ask the same iterator.
        self._opening = threading.RLock()
        # Weakly: an order is kept longer than its iterator, whose permutation may be large.
        self._opened: weakref.ref[_native.Stream] | None = None

    def is_plain(self) -> bool:
        """True if this very sampler can be read natively. Reads nothing that torch reads later."""
        return True

    def works_in_iter(self) -> bool:
        """True if torch reads or draws in ``iter``, before the first request."""
        return False

    def open(self) -> _native.Stream | None:
        """Reads what torch's generator reads before it yields, and makes the epoch's native stream, once.

        Returns None for a sampler that torch is about to refuse, in words of its own, and for numbers that
        are too big. Python then iterates it.
        """
        with self._opening:
            made = None if self._opened is None else self._opened()
            if made is None:
                made = self._open()
                self._opened = None if made is None else weakref.ref(made)
            return made

    def _open(self) -> _native.Stream | None:
        try:
            made = self._make()
            if self.rolling is not None:
                self._roll_over(made, self.rolling)
        except (ValueError, OverflowError):
            return None
        if self.resumed.begin is not None:
            self.resumed.begin(made)
        return made

    def _roll_over(self, made: _native.Stream, rolling: RolloverBatchSampler) -> None:
        rest = rolling.rest()
        # More than a batch, for which `__iter__` has a rule, and what other samplers left.
        has_others = not self.has_any_indices and any(type(index) is not int for index in rest)
        if has_others or len(rest) >= rolling.batch_size:
            raise ValueError("Python must begin the epoch")
        made.roll_over(rest)
        rolling.set_rest([])

    def leave(self, rest: list[Any]) -> None:
        """Keeps the incomplete last batch, with which the next epoch begins."""
        assert self.rolling is not None
        self.rolling.set_rest(rest)

    def _make(self) -> _native.Stream:
        raise NotImplementedError

    def odd_size(self, size: Any) -> int:
        """Returns what torch makes of a batch size that was set meanwhile and is no plain number."""
        itertools.islice((), size)
        return sys.maxsize if size is None else operator.index(size)

    def permutation(self, n: int) -> torch.Tensor | None:
        """Returns ``torch.randperm(n)``, or None if the stream must make it of :meth:`words`."""
        generator, is_private = self._drawing()
        if not randperm.can(n):
            return self._draw(generator, functools.partial(torch.randperm, n, generator=generator))
        if is_private:
            self._words_from = generator
        else:
            draw = functools.partial(randperm.take_ahead, generator, n)
            self._words_from = self._draw(generator, draw)
        return None

    def words(self, count: int) -> torch.Tensor:
        """The next words of the last permutation."""
        assert self._words_from is not None
        return randperm.words(self._words_from, count)

    def drawn(self) -> tuple[int | torch.Tensor | None, int | None]:
        """Returns the values ``drawn`` and ``draws`` of this epoch, for a later resume."""
        return (self._before, self._made) if self._made else (None, None)

    def _drawing(self) -> tuple[torch.Generator, bool]:
        """Returns the generator of the next draw, and True if no other code ever sees it."""
        generator = self.sampler.generator
        if generator is not None and generator is not torch.default_generator:
            return generator, False
        if isinstance(self.resumed.drawn, torch.Tensor) and self._made_again != self.resumed.draws:
            self._made_again += 1
            if self._twin is None:
                self._twin = torch.Generator()
                self._twin.set_state(self.resumed.drawn)
            return self._twin, True
        if self.is_recording and not self._made:
            self._before = torch.default_generator.get_state()
        return torch.default_generator, False

    def _draw(self, generator: torch.Generator, draw: Callable[[], _T]) -> _T:
        """Returns the result of a function that draws once. Counts draws from the program's generator."""
        found = draw()
        self._made += generator is torch.default_generator
        return found


def _is_cpu(generator: Any) -> bool:
    return generator is None or (type(generator) is torch.Generator and generator.device.type == "cpu")


class _Sequential(TorchDraws):
    """MIRRORS torch sampler.py::SequentialSampler."""

    def works_in_iter(self) -> bool:
        # Without batches torch reads the length inside iter(), and its iterator then is a range's.
        return self.batch is None

    def _make(self) -> _native.Stream:
        return _native.Stream.sequential(len(self.sampler.data_source), self.batch)


class _Random(TorchDraws):
    """MIRRORS torch sampler.py::RandomSampler."""

    # The generator that this makes where the sampler has none, and its seed once it is drawn.
    _private: torch.Generator | None = None
    _seed: int | None = None

    def is_plain(self) -> bool:
        return _is_cpu(self.sampler.generator)

    def _make(self) -> _native.Stream:
        n = len(self.sampler.data_source)
        return _native.Stream.random(n, self.sampler.replacement, self.sampler.generator is None, self.batch)

    def seed(self) -> None:
        seed = self.resumed.drawn
        if seed is None:
            seed = self._seed = int(torch.empty((), dtype=torch.int64).random_().item())
        assert isinstance(seed, int)
        self._private = torch.Generator()
        self._private.manual_seed(seed)

    def drawn(self) -> tuple[int | torch.Tensor | None, int | None]:
        return super().drawn() if self._seed is None else (self._seed, None)

    def num_samples(self) -> int:
        return int(self.sampler.num_samples)

    def _drawing(self) -> tuple[torch.Generator, bool]:
        return super()._drawing() if self._private is None else (self._private, True)

    def integers(self, high: int, count: int) -> torch.Tensor:
        generator, _ = self._drawing()
        draw = functools.partial(torch.randint, dtype=torch.int64, generator=generator)
        return self._draw(generator, functools.partial(draw, high=high, size=(count,)))


class _Subset(TorchDraws):
    """MIRRORS torch sampler.py::SubsetRandomSampler."""

    has_any_indices = True

    def is_plain(self) -> bool:
        return _is_cpu(self.sampler.generator) and type(self.sampler.indices) in (list, range)

    def _make(self) -> _native.Stream:
        return _native.Stream.subset(self.sampler, len(self.sampler.indices), self.batch)


class _Weighted(TorchDraws):
    """MIRRORS torch sampler.py::WeightedRandomSampler."""

    def is_plain(self) -> bool:
        weights = self.sampler.weights
        plain = type(weights) is torch.Tensor and weights.device.type == "cpu" and weights.dim() == 1
        return plain and _is_cpu(self.sampler.generator)

    def _make(self) -> _native.Stream:
        return _native.Stream.weighted(len(self.sampler.weights), self.sampler.num_samples, self.batch)

    def multinomial(self) -> torch.Tensor:
        sampler = self.sampler
        generator, _ = self._drawing()
        given = (sampler.weights, sampler.num_samples, sampler.replacement)
        return self._draw(generator, functools.partial(torch.multinomial, *given, generator=generator))


class _Distributed(TorchDraws):
    """MIRRORS torch distributed.py::DistributedSampler."""

    def works_in_iter(self) -> bool:
        # Without batches torch draws inside iter(), and its constructor calls iter() in any case.
        return self.batch is None

    def _make(self) -> _native.Stream:
        sampler = self.sampler
        length, many = len(sampler.dataset), sampler.num_samples
        rank, ranks = sampler.rank, sampler.num_replicas
        start, shuffles, drops = self.resumed.start, bool(sampler.shuffle), bool(sampler.drop_last)
        return _native.Stream.distributed(length, many, ranks, rank, shuffles, drops, self.batch, start)

    def _drawing(self) -> tuple[torch.Generator, bool]:
        generator = torch.Generator()
        generator.manual_seed(self.sampler.seed + self.sampler.epoch)
        return generator, True


class _Nones(TorchDraws):
    """MIRRORS torch dataloader.py::_InfiniteConstantSampler."""

    def _make(self) -> _native.Stream:
        return _native.Stream.nones(self.batch)


_OPENERS: dict[type, type[TorchDraws]] = {
    torch_sampler.SequentialSampler: _Sequential,
    torch_sampler.RandomSampler: _Random,
    torch_sampler.SubsetRandomSampler: _Subset,
    torch_sampler.WeightedRandomSampler: _Weighted,
    DistributedSampler: _Distributed,
    internals.InfiniteConstantSampler: _Nones,
}
