"""The order of an epoch: begun again, and read on from a state. That of torch's samplers, read natively."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data.distributed import DistributedSampler

import ringloader._native as _native
from ringloader._common import attributes
from ringloader._features.state.saved import Saved
from ringloader._sources import samplers
from ringloader._sources.rollover import RolloverBatchSampler

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

# One past the last sample of any epoch.
_ALL = (1 << 63) - 1


class Order:
    """The order of a sampler's samples in one epoch: what all orders have.

    Args:
        loader: The loader.
        index_sampler: The object that gives its indices.
        sampler: The sampler, or batch sampler.
        batches: torch's batch sampler over it, if it has one.
        own_generator: The key of a state with the generator of the sampler.
    """

    def __init__(
        self, loader: TorchLoader, index_sampler: Any, sampler: Any, batches: Any, own_generator: str
    ) -> None:
        # Not the loader: an epoch is kept for as long as its loader lives.
        generator = loader.generator
        # None where it draws from the program's.
        self._generator = None if generator is torch.default_generator else generator
        self.index_sampler = index_sampler
        self._sampler = sampler
        self._batches = batches
        self._key = own_generator
        self._rolling = index_sampler if isinstance(index_sampler, RolloverBatchSampler) else None
        # The epoch's beginning.
        self._saved: Saved

    @property
    def kind(self) -> str:
        """The name of the sampler's class."""
        return type(self._sampler).__name__

    def beginning(self) -> Saved:
        """Returns the state before the next epoch. Draws nothing."""
        own = self._own_generator()
        rank, many = rank_of(self._sampler)
        states: dict[str, Any] = {} if own is None else {self._key: own.get_state()}
        return Saved(
            sampler=self.kind,
            batch_size=1 if self._batches is None else int(self._batches.batch_size),
            rest=self._rest(),
            epoch=attributes.epoch_of(self._sampler),
            rank=rank,
            num_replicas=many,
            **states,
        )

    def _rest(self) -> tuple[Any, ...] | None:
        """Returns the indices that open the next epoch; None without ``rollover``."""
        return None if self._rolling is None else tuple(self._rolling.rest())

    def rest_after(self, _is_finished: bool) -> tuple[Any, ...] | None:
        """Returns the indices that ``rollover`` had kept before the epoch, which makes its own again."""
        return self._saved.rest

    def set_epoch(self, epoch: int | None) -> None:
        """Sets the sampler's epoch to the one of a state, if that has one."""
        sampler = attributes.with_epoch(self._sampler)
        if sampler is not None and epoch is not None and sampler.epoch != epoch:
            sampler.set_epoch(epoch)

    def named_epoch(self) -> int | None:
        """Returns the sampler's next epoch; None for a sampler without epochs."""
        return attributes.epoch_of(self._sampler)

    def _begin(self, saved: Saved) -> None:
        """Records the epoch's beginning."""
        self._saved = saved
        # The iterator has this order: it does not keep the loader's generator, as torch's does not.
        del self._generator

    def restore(self, saved: Saved) -> None:
        """Puts the sampler to where the epoch began: its generator, and the indices that ``rollover`` kept.

        The epoch of a sampler is that of a state in its midst.
        """
        if saved.has_begun and not saved.is_finished:
            self.set_epoch(saved.epoch)
        own, state = self._own_generator(), getattr(saved, self._key)
        if own is not None and state is not None:
            own.set_state(state)
        if self._rolling is not None and saved.rest is not None:
            self._rolling.set_rest(list(saved.rest))

    def _own_generator(self) -> torch.Generator | None:
        """Returns the first generator of the sampler that is neither the loader's nor the program's."""
        for sampler in attributes.samplers_in(self._sampler):
            found = attributes.stored(sampler, "generator")
            if issubclass(type(found), torch.Generator) and not (
                found is self._generator or found is torch.default_generator
            ):
                return found  # type: ignore[no-any-return]
        return None


class NativeOrder(Order):
    """The order of one of torch's samplers, which is read natively.

    Args:
        loader: The loader.
        index_sampler: The object that gives its indices.
        draws: The sampler's draws.
    """

    def __init__(self, loader: TorchLoader, index_sampler: Any, draws: samplers.TorchDraws) -> None:
        batches = None if draws.batch is None else index_sampler
        super().__init__(loader, index_sampler, draws.sampler, batches, "sampler_generator")
        self._draws = draws

    def pass_epoch(self, saved: Saved) -> None:
        """Draws all that an epoch draws which is over, from generators as they were when it began."""
        draws = self._draws
        if self._generator is None and self._own_generator() is None and draws.rolling is None:
            return
        draws.resumed = samplers.Resumed(saved.drawn)
        named = self.named_epoch()
        try:
            self.set_epoch(saved.epoch)
            stream = _opened(draws)
            if draws.rolling is None:
                stream.skip(_native.Passing([(0, _ALL)]))
            while stream.next(draws) is not None:
                pass
        finally:
            self.set_epoch(named)

    def resumed(self, saved: Saved) -> Saved:
        """Returns the state from which this rank resumes, of the state of any rank."""
        if saved.is_edited:
            ranges = saved.ranges
            first = ranges[0][1] if ranges else 0
            # Nothing is known of the indices up to there.
            saved = saved.but(
                batches=saved.num_yielded, samples=first, overtaken=(), passed=None, fingerprint=None
            )
        if not isinstance(self._sampler, DistributedSampler):
            return saved
        rank, many = self._sampler.rank, self._sampler.num_replicas
        if (rank, many) == (saved.rank, saved.num_replicas):
            return saved
        if many == saved.num_replicas:
            # The indices of another rank cannot be compared with those of this one.
            return saved.but(rank=rank, passed=None, fingerprint=None)
        assert saved.num_replicas is not None
        return saved.but(
            rank=rank,
            num_replicas=many,
            start=saved.start + saved.samples * saved.num_replicas,
            samples=0,
            passed=0,
            fingerprint=0,
        )

    def begin(self, saved: Saved) -> _native.Ledger:
        """Begins an epoch, from its beginning or from a state. Returns its ledger."""
        self._begin(saved)
        place, step = _places(saved)
        if saved.has_begun:
            skip = None
            if saved.ranges:
                passing = _native.Passing(saved.ranges, saved.passed, other_indices(saved, self.kind))
                skip = functools.partial(_native.Stream.skip, passing=passing, place=place, step=step)
            self._draws.resumed = samplers.Resumed(saved.drawn, saved.draws, saved.start, skip)
        self._ledger = _native.Ledger(
            saved.ranges, saved.batches, saved.passed, saved.fingerprint, place, step
        )
        return self._ledger

    def source(self, places: _native.Places | None) -> _native.IndexSource | None:
        """Returns the native source of the epoch's tasks; None if Python reads them."""
        if self._draws.works_in_iter() and not self._saved.has_begun:
            return None
        return _native.IndexSource.native(self._draws, self._ledger, places)

    def read(self, made: Iterator[Any]) -> Iterator[Any]:
        """Returns an iterator of the epoch's indices; ``made`` is torch's of the loader's index sampler."""
        if self._saved.has_begun:
            return self._natively(None)
        return self._natively(made) if self._draws_from_program() else made

    def _natively(self, made: Iterator[Any] | None) -> Iterator[Any]:
        """Yields an epoch's indices in place of torch's iterator, which draws unnoticed.

        Args:
            made: torch's iterator, which refuses a sampler in torch's words; None for an epoch that goes on.
        """
        stream = _opened(self._draws) if made is None else self._draws.open()
        if stream is None:
            assert made is not None
            yield from made
            return
        while (index := stream.next(self._draws)) is not None:
            yield index

    def drawn(self) -> tuple[int | torch.Tensor | None, int | None]:
        """Returns the values ``drawn`` and ``draws`` of a state."""
        saved, (drawn, draws) = self._saved, self._draws.drawn()
        if saved.drawn is None:
            return drawn, draws
        return saved.drawn, None if saved.draws is None else saved.draws + (draws or 0)

    def state_after(self, _tasks: int, _is_finished: bool) -> tuple[Any, bool]:
        """Returns the state of the sampler itself: torch's have none."""
        return None, False

    def _draws_from_program(self) -> bool:
        generator = attributes.stored(self._sampler, "generator", self)
        return generator is None or generator is torch.default_generator


def other_indices(saved: Saved, kind: str) -> str:
    """Returns the text of the error for indices that are not those of a state."""
    return (
        f"load_state_dict(): the {saved.batches} batches that the state has passed are not those that the "
        f"{kind} gives now: its dataset, arguments or seed have changed since the state was taken; change "
        "them back, or start the epoch over"
    )


def _places(saved: Saved) -> tuple[int, int]:
    """Returns the place of a rank's first sample in the epoch, and the step to the next one."""
    if saved.rank is None or saved.num_replicas is None:
        return 0, 1
    return saved.start + saved.rank, saved.num_replicas


def _opened(draws: samplers.TorchDraws) -> _native.Stream:
    """Returns a stream that was just begun.

    Raises:
        RuntimeError: If torch would refuse the sampler.
    """
    stream = draws.open()
    if stream is None:
        raise RuntimeError(f"the order of {draws.sampler!r:.120} cannot be read again: torch refuses it now")
    return stream


def rank_of(outermost: Any) -> tuple[int | None, int | None]:
    """Returns the rank that the first sampler with one reads for, and the number of ranks."""
    for sampler in attributes.samplers_in(outermost):
        # torch's names, and accelerate's.
        for one, other in (("rank", "num_replicas"), ("process_index", "num_processes")):
            rank = attributes.stored(sampler, one)
            if attributes.is_count(rank) and attributes.is_count(ranks := attributes.stored(sampler, other)):
                return rank, ranks
    return None, None
