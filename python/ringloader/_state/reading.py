"""The order of an epoch over a sampler that Python iterates: its own state, or its indices read again."""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler

import ringloader._native as _native
from ringloader._state.order import Order, other_indices, rank_of
from ringloader._state.parts import has_state
from ringloader._state.saved import Saved
from ringloader._torch import internals

# Indices that are passed over at once.
_BLOCK = 4096


class ReadOrder(Order):
    """The order of a sampler or batch sampler that is not read natively, and the iterator of its indices.

    Below a ``BatchSampler`` of torch's, a sampler is read index by index. Any other batch sampler is read
    batch by batch. The iterator passes over indices, and keeps the states behind batches under way.

    Args:
        loader: The loader.
    """

    def __init__(self, loader: Any) -> None:
        found = loader._index_sampler
        is_torchs = type(found) is BatchSampler and internals.is_torchs_own(
            BatchSampler.__iter__, "BatchSampler.__iter__"
        )
        batches = found if is_torchs else None
        super().__init__(loader, found.sampler if is_torchs else found, batches, "inner_generator")
        self._has_state = has_state(self._sampler)
        # torch's iterator; ours, once it was asked; and batches that it has given.
        self._made: Iterator[Any] = iter(())
        self._iterator: Iterator[Any] | None = None
        self._read = 0
        # The object whose state is kept, and states after batches from number `_first` on.
        self._stateful: Any = None
        self._states: collections.deque[Any] = collections.deque()
        self._first = 1
        # The state once the sampler has ended; the number of batches, if the last one was read up to the end.
        self._last: Any = None
        self._has_ended = False
        self._ended_with: int | None = None

    @property
    def is_whole(self) -> bool:
        """True if batches are read whole."""
        return self._batches is None

    def beginning(self) -> Saved:
        """Returns the state before the next epoch."""
        state = copy.deepcopy(self._sampler.state_dict()) if self._has_state else None
        return dataclasses.replace(super().beginning(), sampler_begun=state, sampler_state=state)

    def restore(self, saved: Saved) -> None:
        """Gives the sampler its state, and puts its generator to where the epoch began."""
        if saved.epoch is not None and not saved.is_finished:
            self.set_epoch(saved.epoch)
        super().restore(saved)
        if self._has_state:
            state = saved.sampler_begun if saved.is_edited else saved.sampler_state
            if state is not None:
                self._sampler.load_state_dict(copy.deepcopy(state))

    def pass_epoch(self, saved: Saved) -> None:
        """Draws all that an epoch draws which is over, from generators as they were when it began.

        It leaves its remainder for the next epoch with ``rollover``.

        The state of a sampler that has one is that behind the epoch, where it has drawn already.
        """
        named = self.named_epoch()
        draws = (saved.inner_generator, saved.loader_generator) != (None, None)
        # A sampler may count epochs itself, unless the program has named the next one.
        counts = named is not None and named == saved.epoch
        if self._has_state or not (draws or counts or self._rolling is not None):
            return
        if saved.epoch is not None:
            self.set_epoch(saved.epoch)
        collections.deque(self._index_sampler, maxlen=0)
        if named is not None and not counts:
            self.set_epoch(named)

    def resumed(self, saved: Saved) -> Saved:
        """Returns the state with which this rank goes on, of the state of any rank.

        Raises:
            ValueError: If there are other ranks now, which divide the epoch in another way.
        """
        rank, many = rank_of(self._sampler)
        if (rank, many) == (saved.rank, saved.num_replicas):
            return saved
        if many != saved.num_replicas and not self._has_state:
            raise ValueError(
                f"load_state_dict(): the state was taken with {saved.num_replicas} ranks, and there are "
                f"{many} now: over a {self.kind} an epoch goes on with as many ranks only"
            )
        # The indices of another rank cannot be compared with those of this one.
        return dataclasses.replace(saved, rank=rank, num_replicas=many, passed=None, fingerprint=None)

    def begin(self, saved: Saved) -> _native.Ledger:
        """Begins an epoch, from its beginning or from a state. Returns its ledger."""
        self._saved = saved
        passed, fingerprint = (None, None) if saved.is_edited else (saved.passed, saved.fingerprint)
        self._ledger = _native.Ledger(
            saved.ranges, saved.num_yielded, passed, fingerprint, whole=self.is_whole
        )
        return self._ledger

    def source(self, _places: _native.Places | None) -> None:
        """Returns None: Python reads the indices."""

    def read(self, made: Iterator[Any], _at_once: bool) -> Iterator[Any]:
        """Returns the iterator of the epoch's indices, over torch's of the loader's index sampler."""
        self._made = made
        return self

    def drawn(self) -> None:
        """Returns None: the draws of such a sampler are not known."""

    def state_after(self, tasks: int, is_finished: bool) -> tuple[Any, bool]:
        """Returns the state of the sampler, or of its iterator, after so many batches; None without one.

        Args:
            tasks: The number of batches.
            is_finished: True if the epoch is over.

        Returns:
            The state, and True if the sampler has ended by then: its state is one of the next epoch.
        """
        if self._iterator is None or (tasks == 0 and not is_finished):
            return self._saved.sampler_state, self._saved.sampler_ended
        if self._stateful is None:
            return None, False
        if is_finished:
            return self._last, True
        return self._states[tasks - self._first], self._ended_with == tasks

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = (
                self._rest_of(self._made) if self._batches is None else self._grouped(self._batches)
            )
        try:
            item = next(self._iterator)
        except StopIteration:
            if self._stateful is not None and not self._has_ended:
                self._last = copy.deepcopy(self._stateful.state_dict())
            self._has_ended = True
            raise
        self._read += 1
        if self._stateful is not None:
            self._states.append(copy.deepcopy(self._stateful.state_dict()))
            while self._first < self._ledger.tasks:
                self._first += 1
                self._states.popleft()
            if self._batches is not None and len(item) < self._batches.batch_size:
                self._last, self._has_ended, self._ended_with = self._states[-1], True, self._read
        return item

    def _grouped(self, batches: Any) -> Iterator[list[Any]]:
        """Yields batches. MIRRORS torch sampler.py::BatchSampler.__iter__."""
        indices = self._rest_of(iter(self._sampler))
        while batch := [*itertools.islice(indices, batches.batch_size)]:
            if batches.drop_last and len(batch) < batches.batch_size:
                return
            yield batch

    def _rest_of(self, indices: Iterator[Any]) -> Iterator[Any]:
        """Returns the rest of the indices, and notes whose state is kept."""
        saved, keeps = self._saved, has_state(indices)
        self._stateful = self._sampler if self._has_state else indices if keeps else None
        if saved.sampler_ended and not saved.is_edited:
            return iter(())
        has_moved = saved.sampler_state is not None and not saved.is_edited
        if has_moved and not self._has_state and keeps:
            indices.load_state_dict(copy.deepcopy(saved.sampler_state))  # type: ignore[attr-defined]
        ranges = saved.ranges
        if not ranges:
            return indices
        begins_behind = has_moved and self._stateful is not None
        compares = not (begins_behind or saved.is_edited)
        passing = _native.Passing(ranges, saved.passed if compares else None, other_indices(saved, self.kind))
        return self._past(indices, ranges, passing, saved.samples if begins_behind else 0)

    def _past(
        self, indices: Iterator[Any], ranges: list[tuple[int, int]], passing: _native.Passing, at: int
    ) -> Iterator[Any]:
        """Yields the indices from number ``at`` on that are in none of the ranges."""
        most = 1 if self._batches is None else _BLOCK
        for start, stop in ranges:
            before = max(0, start - at)
            yield from itertools.islice(indices, max(0, before - 1))
            # The one before a range is given behind it: the sampler's state then is one behind both, which
            # are passed together.
            held = list(itertools.islice(indices, min(before, 1)))
            at = max(at, start)
            while at < stop:
                block = list(itertools.islice(indices, min(most, stop - at)))
                if not block:
                    passing.finish()
                    yield from held
                    return
                # As the ledger notes them: one index at each place, or one batch.
                index: Any = block if self._batches is not None else block[0]
                is_whole = self._batches is None and isinstance(index, list)
                passing.note(index, at << 32 if is_whole else at, len(block))
                at += len(block)
            yield from held
        yield from indices
