"""The order of an epoch over a sampler that Python iterates: its own state, or its indices read again."""

from __future__ import annotations

import collections
import copy
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler

import ringloader._native as _native
from ringloader._features.state.order import Order, other_indices, rank_of
from ringloader._features.state.saved import Saved, has_state
from ringloader._sources import samplers
from ringloader._sources.rollover import RolloverBatchSampler

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

# Indices that are passed over at once.
_BLOCK = 4096


class ReadOrder(Order):
    """The order of a sampler or batch sampler that is not read natively.

    Below a ``BatchSampler`` of torch's or a ``RolloverBatchSampler``, a sampler is read index by index.
    Any other batch sampler is read batch by batch. The iterator of indices, :class:`_Indices`, passes over
    what was read before, and records the states after batches here. It goes with the loader's iterator.

    Args:
        loader: The loader.
        index_sampler: The object that gives its indices.
    """

    def __init__(self, loader: TorchLoader, index_sampler: Any) -> None:
        found = index_sampler
        has_batches = type(found) in (BatchSampler, RolloverBatchSampler) and not samplers.reads_whole(found)
        self.batches = found if has_batches else None
        sampler = found.sampler if has_batches else found
        super().__init__(loader, found, sampler, self.batches, "inner_generator")
        self.has_state = has_state(self._sampler)
        # True once the iterator of indices was asked, and if it records states.
        self._is_asked = False
        self._records_states = False
        # States after batches, by the number of batches of this iterator.
        self._states: dict[int, Any] = {}
        self._read = 0
        # The state once the sampler has ended; the number of batches, if the last one was read up to the end.
        self._last: Any = None
        self._has_ended = False
        self._ended_with: int | None = None

    def beginning(self) -> Saved:
        """Returns the state before the next epoch."""
        state = copy.deepcopy(self._sampler.state_dict()) if self.has_state else None
        return super().beginning().but(sampler_begun=state, sampler_state=state)

    def restore(self, saved: Saved) -> None:
        """Puts the sampler to where the epoch began, and gives it its state."""
        super().restore(saved)
        if self.has_state:
            state = saved.sampler_begun if saved.is_edited else saved.sampler_state
            if state is not None:
                self._sampler.load_state_dict(copy.deepcopy(state))

    def rest_after(self, is_finished: bool) -> tuple[Any, ...] | None:
        """Returns the indices that ``rollover`` had kept before the epoch, or has kept after it.

        A sampler with a state is not read again: then what a finished epoch leaves is in its state.
        """
        return self._rest() if is_finished and self.has_state else super().rest_after(is_finished)

    def pass_epoch(self, saved: Saved) -> None:
        """Draws all that an epoch draws which is over, from generators as they were when it began.

        It leaves its remainder for the next epoch with ``rollover``.

        The state of a sampler that has one was taken after the epoch, when it had drawn already.
        """
        named = self.named_epoch()
        draws = (saved.inner_generator, saved.loader_generator) != (None, None)
        # A sampler may count epochs itself, unless the program has named the next one.
        counts = named is not None and named == saved.epoch
        if self.has_state or not (draws or counts or self._rolling is not None):
            return
        try:
            self.set_epoch(saved.epoch)
            collections.deque(self.index_sampler, maxlen=0)
        finally:
            if not counts:
                self.set_epoch(named)

    def resumed(self, saved: Saved) -> Saved:
        """Returns the state from which this rank resumes, of the state of any rank.

        Raises:
            ValueError: If there are other ranks now, which divide the epoch in another way.
        """
        rank, many = rank_of(self._sampler)
        if (rank, many) == (saved.rank, saved.num_replicas):
            return saved
        if many != saved.num_replicas and not self.has_state:
            raise ValueError(
                f"load_state_dict(): the state was taken with {saved.num_replicas} ranks, and there are "
                f"{many} now: over a {self.kind} an epoch resumes with as many ranks only"
            )
        # The indices of another rank cannot be compared with those of this one.
        return saved.but(rank=rank, num_replicas=many, passed=None, fingerprint=None)

    def begin(self, saved: Saved) -> _native.Ledger:
        """Begins an epoch, from its beginning or from a state. Returns its ledger."""
        self._begin(saved)
        passed, fingerprint = (None, None) if saved.is_edited else (saved.passed, saved.fingerprint)
        self._ledger = _native.Ledger(
            saved.ranges, saved.num_yielded, passed, fingerprint, whole=self.batches is None
        )
        return self._ledger

    def source(self, _places: _native.Places | None) -> None:
        """Returns None: Python reads the indices."""

    def read(self, made: Iterator[Any]) -> Iterator[Any]:
        """Returns the iterator of the epoch's indices, over torch's of the loader's index sampler."""
        return _Indices(self, made)

    def drawn(self) -> tuple[None, None]:
        """Returns the values ``drawn`` and ``draws`` of a state: not known of such a sampler."""
        return None, None

    def state_after(self, tasks: int, is_finished: bool) -> tuple[Any, bool]:
        """Returns the state of the sampler, or of its iterator, after some batches; None without one.

        Args:
            tasks: The number of batches.
            is_finished: True if the epoch is over.

        Returns:
            The state, and True if the sampler has ended by then: its state is one of the next epoch.

        Raises:
            KeyError: If another thread has gone on since ``tasks`` was read.
        """
        if not self._is_asked or (tasks == 0 and not is_finished):
            state, has_ended = self._saved.sampler_state, self._saved.sampler_ended
        elif not self._records_states:
            state, has_ended = None, False
        elif is_finished:
            state, has_ended = self._last, True
        else:
            state, has_ended = self._states[tasks], self._ended_with == tasks
        return state, has_ended

    def ask(self, made: Iterator[Any]) -> tuple[Iterator[Any], Any]:
        """Begins to read. Returns the loader's indices, and the object to take states of, or None."""
        iterator = made if self.batches is None else iter(self._sampler)
        keeps = has_state(iterator)
        stateful = self._sampler if self.has_state else iterator if keeps else None
        self._is_asked, self._records_states = True, stateful is not None
        rest = self._rest_of(iterator, keeps)
        return rest if self.batches is None else _grouped(rest, self.batches), stateful

    def record(self, item: Any, stateful: Any) -> None:
        """Records that an index or a batch was read, with the state after it."""
        read = self._read + 1
        # INVARIANT: each step is atomic under the interpreter lock, and a state exists before its batch goes
        # out: another thread, or a signal handler, may ask for a state at any time.
        state = self._states[read] = copy.deepcopy(stateful.state_dict())
        self._read = read
        for number in [number for number in self._states if number < self._ledger.tasks]:
            self._states.pop(number, None)
        if self.batches is not None and len(item) < self.batches.batch_size:
            self._last, self._has_ended, self._ended_with = state, True, read

    def record_end(self, stateful: Any) -> None:
        """Records that the sampler has ended."""
        if not self._has_ended:
            self._last = copy.deepcopy(stateful.state_dict())
        self._has_ended = True

    def _rest_of(self, indices: Iterator[Any], keeps: bool) -> Iterator[Any]:
        """Returns the indices that are left: kept by rollover, then of the sampler.

        Args:
            indices: The iterator of the sampler.
            keeps: True if it has a state of its own.
        """
        saved = self._saved
        if saved.sampler_ended and not saved.is_edited:
            return iter(())
        has_moved = saved.sampler_state is not None and not saved.is_edited
        if has_moved and not self.has_state and keeps:
            indices.load_state_dict(copy.deepcopy(saved.sampler_state))  # type: ignore[attr-defined]
        goes_on = has_moved and self._records_states
        ranges = saved.ranges
        first = saved.samples if goes_on and ranges else 0
        if self._rolling is not None:
            # The sampler's state is one after its samples; the kept indices came before them.
            indices = itertools.chain(self._rolling.rest()[first:], indices)
            self._rolling.set_rest([])
        if not ranges:
            return indices
        compares = not (goes_on or saved.is_edited)
        expected = saved.passed if compares else None
        passing = _native.Passing(ranges, expected, other_indices(saved, self.kind))
        return self._past(indices, ranges, passing, first)

    def _past(
        self, indices: Iterator[Any], ranges: list[tuple[int, int]], passing: _native.Passing, at: int
    ) -> Iterator[Any]:
        """Yields the indices from number ``at`` on that are in none of the ranges."""
        most = 1 if self.batches is None else _BLOCK
        for start, stop in ranges:
            before = max(0, start - at)
            yield from itertools.islice(indices, max(0, before - 1))
            # The one before a range is given after it: the sampler's state then is one after both, which
            # are passed together.
            held = list(itertools.islice(indices, min(before, 1)))
            at = max(at, start)
            while at < stop:
                block = list(itertools.islice(indices, min(most, stop - at)))
                if not block:
                    passing.finish()
                    yield from held
                    return
                # The ledger records one index at each place, or one batch.
                index: Any = block if self.batches is not None else block[0]
                is_whole = self.batches is None and isinstance(index, list)
                passing.note(index, at << 32 if is_whole else at, len(block))
                at += len(block)
            yield from held
        yield from indices


class _Indices:
    """The iterator of an epoch's indices.

    Args:
        order: The order, which knows the states.
        made: torch's iterator of the loader's index sampler.
    """

    def __init__(self, order: ReadOrder, made: Iterator[Any]) -> None:
        self._order = order
        self._made = made
        self._iterator: Iterator[Any] | None = None
        self._stateful: Any = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            # No local variable has the sampler's iterator: it goes with its end, also in this call.
            self._iterator, self._stateful = self._order.ask(self._made)
        try:
            item = next(self._iterator)
        except StopIteration:
            if self._stateful is not None:
                self._order.record_end(self._stateful)
            raise
        if self._stateful is not None:
            self._order.record(item, self._stateful)
        return item


def _grouped(indices: Iterator[Any], batches: Any) -> Iterator[list[Any]]:
    """Yields batches. MIRRORS torch sampler.py::BatchSampler.__iter__, rollover.py::RolloverBatchSampler."""
    if batches.drop_last:
        # The size of all batches is the one that is read now.
        yield from map(list, zip(*[indices] * batches.batch_size, strict=False))
        return
    rolls = isinstance(batches, RolloverBatchSampler)
    while batch := [*itertools.islice(indices, batches.batch_size)]:
        if rolls and len(batch) < batches.batch_size:
            batches.set_rest(batch)
            return
        yield batch
