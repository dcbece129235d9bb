"""Samplers of torch that are read natively, and torch's draws for them.

The native stream never draws. The generators here give it the indices of a draw at a time, where the bodies
of torch's generators would: so every draw is torch's own, at torch's moment.
"""

from __future__ import annotations

import itertools
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import sampler as torch_sampler
from torch.utils.data.distributed import DistributedSampler

import ringloader._native as _native
from ringloader._sources import randperm
from ringloader._sources.rollover import OWN_ITER, RolloverBatchSampler
from ringloader._torch import internals


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


class TorchDraws:
    """Reads and draws of torch for one epoch of a sampler."""

    # True if the sampler's indices may be other objects than ints.
    has_any_indices = False
    # The sampler's attribute whose length torch reads first.
    source = "data_source"

    def __init__(self, sampler: Any, batch: _native.BatchRule | None) -> None:
        self.sampler = sampler
        self.batch = batch
        # The batch sampler that takes what is left over.
        self.rolling: RolloverBatchSampler | None = None
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
        chunks = self._chunks(len(getattr(self.sampler, self.source)))
        return _native.Stream(chunks, self.batch, self.sampler if self.has_any_indices else None)

    def _chunks(self, n: int) -> Iterator[torch.Tensor | bytes | range]:
        """Yields the sampler's indices, or their positions. Draws where torch's generator would."""
        yield from self._permuted(n)(range(n))

    def odd_size(self, size: Any) -> int:
        """Returns what torch makes of a batch size that was set meanwhile and is no plain number."""
        itertools.islice((), size)
        return sys.maxsize if size is None else operator.index(size)

    def _permuted(self, n: int) -> Callable[[range], Iterator[torch.Tensor | bytes]]:
        """Draws ``torch.randperm(n)``. Returns a function that yields its elements at some positions."""
        generator, is_private = self._drawing()
        if not randperm.can(n):
            drawn = torch.randperm(n, generator=generator)
            return lambda at: iter((drawn[at.start : at.stop : at.step].contiguous(),))
        return randperm.word_by_word(n, generator if is_private else randperm.take_ahead(generator, n))

    def drawn(self) -> tuple[int | torch.Tensor | None, int | None]:
        """Returns the values ``drawn`` and ``draws`` of this epoch, for a later resume."""
        return (self._before, self._made) if self._made else (None, None)

    def _drawing(self) -> tuple[torch.Generator, bool]:
        """Returns the generator of the next draw, and True if no other code ever sees it. Counts the draw."""
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
        self._made += 1
        return torch.default_generator, False


def _is_cpu(generator: Any) -> bool:
    return generator is None or (type(generator) is torch.Generator and generator.device.type == "cpu")


class _Sequential(TorchDraws):
    """MIRRORS torch sampler.py::SequentialSampler."""

    def works_in_iter(self) -> bool:
        # Without batches torch reads the length inside iter(), and its iterator then is a range's.
        return self.batch is None

    def _chunks(self, n: int) -> Iterator[range]:
        yield range(n)


class _Random(TorchDraws):
    """MIRRORS torch sampler.py::RandomSampler."""

    # The generator that this makes where the sampler has none, and its seed once it is drawn.
    _private: torch.Generator | None = None
    _seed: int | None = None

    def is_plain(self) -> bool:
        return _is_cpu(self.sampler.generator)

    def _chunks(self, n: int) -> Iterator[torch.Tensor | bytes]:
        sampler, is_private = self.sampler, self.sampler.generator is None
        if is_private:
            self._make_private()
        if sampler.replacement:
            for _ in range(sampler.num_samples // 32):
                yield self._integers(n, 32)
            yield self._integers(n, sampler.num_samples % 32)
            return
        for _ in range(sampler.num_samples // n):
            yield from self._permuted(n)(range(n))
        rest = sampler.num_samples % n
        # torch permutes for no index too, which only others that draw from the generator see.
        if rest or not is_private:
            yield from self._permuted(n)(range(rest))

    def _make_private(self) -> None:
        seed = self.resumed.drawn
        if seed is None:
            seed = self._seed = int(torch.empty((), dtype=torch.int64).random_().item())
        assert isinstance(seed, int)
        self._private = torch.Generator().manual_seed(seed)

    def drawn(self) -> tuple[int | torch.Tensor | None, int | None]:
        return super().drawn() if self._seed is None else (self._seed, None)

    def _drawing(self) -> tuple[torch.Generator, bool]:
        return super()._drawing() if self._private is None else (self._private, True)

    def _integers(self, high: int, count: int) -> torch.Tensor:
        generator, _ = self._drawing()
        return torch.randint(high=high, size=(count,), dtype=torch.int64, generator=generator)


class _Subset(TorchDraws):
    """MIRRORS torch sampler.py::SubsetRandomSampler."""

    has_any_indices = True
    source = "indices"

    def is_plain(self) -> bool:
        return _is_cpu(self.sampler.generator) and type(self.sampler.indices) in (list, range)


class _Weighted(TorchDraws):
    """MIRRORS torch sampler.py::WeightedRandomSampler."""

    source = "weights"

    def is_plain(self) -> bool:
        weights = self.sampler.weights
        plain = type(weights) is torch.Tensor and weights.device.type == "cpu" and weights.dim() == 1
        return plain and _is_cpu(self.sampler.generator)

    def _chunks(self, _n: int) -> Iterator[torch.Tensor]:
        sampler = self.sampler
        generator, _ = self._drawing()
        given = (sampler.weights, sampler.num_samples, sampler.replacement)
        yield torch.multinomial(*given, generator=generator)


class _Distributed(TorchDraws):
    """MIRRORS torch distributed.py::DistributedSampler."""

    source = "dataset"

    def works_in_iter(self) -> bool:
        # Without batches torch draws inside iter(), and its constructor calls iter() in any case.
        return self.batch is None

    def _chunks(self, n: int) -> Iterator[torch.Tensor | bytes | range]:
        sampler, start, many = self.sampler, min(self.resumed.start, n), self.sampler.num_samples
        ranks, total = sampler.num_replicas, many * sampler.num_replicas
        fits = total <= n if sampler.drop_last else n <= total <= n * total
        if many < 0 or not (0 <= sampler.rank < ranks and fits):
            raise ValueError("a dataset of another length")
        if start:
            many = (n - start) // ranks if sampler.drop_last else -((start - n) // ranks)
        return self._parts(n, range(start + sampler.rank, start + sampler.rank + many * ranks, ranks))

    def _parts(self, n: int, positions: range) -> Iterator[torch.Tensor | bytes | range]:
        read = self._permuted(n) if self.sampler.shuffle else None
        while positions:
            # Past the last index, the first comes again.
            here = range(positions.start % n, n, positions.step)[: len(positions)]
            yield from read(here) if read else (here,)
            positions = positions[len(here) :]

    def _drawing(self) -> tuple[torch.Generator, bool]:
        return torch.Generator().manual_seed(self.sampler.seed + self.sampler.epoch), True


class _Nones(TorchDraws):
    """MIRRORS torch dataloader.py::_InfiniteConstantSampler."""

    def _make(self) -> _native.Stream:
        return _native.Stream(None, self.batch)


_OPENERS: dict[type, type[TorchDraws]] = {
    torch_sampler.SequentialSampler: _Sequential,
    torch_sampler.RandomSampler: _Random,
    torch_sampler.SubsetRandomSampler: _Subset,
    torch_sampler.WeightedRandomSampler: _Weighted,
    DistributedSampler: _Distributed,
    internals.InfiniteConstantSampler: _Nones,
}
