"""The epochs of a loader with states: how each kind begins, and how much of it was returned."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

import ringloader._native as _native
from ringloader._core.feature import Rest, Stage, StagePosition
from ringloader._features.state.dataset_state import DatasetState
from ringloader._features.state.order import NativeOrder
from ringloader._features.state.reading import ReadOrder
from ringloader._features.state.saved import Saved
from ringloader._features.state.snapshots import ResumePoint
from ringloader._sources import samplers
from ringloader._torch import internals
from ringloader._worker.options import InFront

if TYPE_CHECKING:
    from ringloader._common.protocols import OurIterator
    from ringloader._torch.protocols import TorchIterator, TorchLoader

# More batches than any epoch has.
_MOST = (1 << 64) - 1


class Epoch:
    """One epoch of one iterator. Nothing is read of an epoch of this class itself.

    Args:
        begun: The epoch's beginning, or the state from which it goes on.
        iterator: The iterator, which the epoch does not keep alive; None: another one is attached later.
        dataset: The states of the dataset, if it may have any.
        seed: The seed of the workers, which the iterator then does not draw.
        why_not: The reason why the epoch has no state.
    """

    def __init__(
        self,
        begun: Saved,
        iterator: OurIterator | None,
        dataset: DatasetState | None = None,
        seed: int | None = None,
        why_not: str | None = None,
    ) -> None:
        self.begun = begun
        self.dataset = dataset
        self.why_not = why_not
        self.given_seed = seed
        # Records what is read and handed out; None where workers' batches are counted.
        self.ledger: _native.Ledger | None = None
        self._iterator: weakref.ref[Any] | None = None
        # The loader whose epoch this is. A dataset may refer to its loader, and both are freed.
        self.loader: weakref.ref[TorchLoader] | None = None
        if iterator is not None:
            self.attach(iterator)
        self._resumes = begun.has_begun
        self._is_finished = False
        # Counts bad samples; None: there are none.
        self._collecting: Any = None

    def __reduce__(self) -> Any:
        # Copies and pickles of the loader have None in its place.
        return type(None), ()

    @property
    def rest(self) -> Rest | None:
        """The part that is still to be read; None for an epoch from its beginning."""
        if not self._resumes:
            return None
        begun = self.begun
        return Rest(begun.number if begun.epoch is None else begun.epoch, begun.ranges, begun.start)

    @property
    def is_drawn(self) -> bool:
        """True if the epoch resumes, and has drawn all that ``iter`` draws. An order is drawn again."""
        return self._resumes and self.ledger is None

    def attach(self, iterator: OurIterator) -> None:
        """Makes this the epoch of an iterator, whose ``_batches_returned`` says what the caller has."""
        self._iterator = weakref.ref(iterator)

    def returned(self) -> int:
        """Returns the number of batches that ``next`` has returned. A call that still runs does not count."""
        iterator = None if self._iterator is None else self._iterator()
        # No call of an iterator that is gone still runs.
        return _MOST if iterator is None else iterator._batches_returned

    def end(self) -> None:
        """Ends the epoch: another one of the loader begins."""
        if self.dataset is not None:
            self.dataset.end()

    def begin(self, iterator: TorchIterator, drawn: bool) -> None:
        """Records the seeds of an iterator. ``drawn``: True if it drew that of the workers in this epoch."""
        if not self._resumes:
            self.begun = self.begun.but(base_seed=iterator._base_seed, base_seed_drawn=drawn)
        if self.dataset is None:
            return
        if self._resumes and self.dataset.shared_seed is not None:
            iterator._shared_seed = self.dataset.shared_seed
            iterator._dataset = internals.seeded(iterator._dataset, iterator._shared_seed)
        self.dataset.shared_seed = iterator._shared_seed

    def start_of(self, worker: int) -> ResumePoint | None:
        """Returns the point from which a worker resumes; None: it begins with the epoch."""
        return None if self.dataset is None else self.dataset.start_of(worker)

    def start_after(self, worker: int) -> tuple[str | None, ResumePoint | None]:
        """Returns why a lost worker may have no successor, and the point from which one resumes."""
        return (None, None) if self.dataset is None else self.dataset.start_after(worker)

    def stages(self) -> Iterable[Stage]:
        """Returns the stages that batches of the epoch pass: with workers, states are taken off them."""
        return () if self.dataset is None or self.dataset.begun.num_workers == 0 else (self.dataset,)

    def indices(self, made: Any) -> Any:
        """Returns an iterator of the epoch's indices; ``made`` is torch's of the loader's index sampler."""
        return made

    def read(self, iterator: TorchIterator) -> None:
        """Makes an iterator without workers read the epoch from where it is."""
        iterator._sampler_iter = self.indices(iterator._sampler_iter)

    def next_index(self, read: Callable[[], Any]) -> Any:
        """Returns the index that ``read`` gives an iterator without workers, whose batch it gets."""
        ledger = self.ledger
        if ledger is None:
            index = read()
        else:
            ledger.begin_call()
            index = read()
            ledger.take(index)
        if self.dataset is not None and not self._is_finished:
            self.dataset.worker_progress.take()
        return index

    def count_errors(self, collecting: Any) -> None:
        """Counts the bad samples of the whole epoch, and passes over batches that are left out."""
        collecting.number = self.begun.bad_samples
        collecting.has_given = self._resumes and self.begun.num_yielded > 0
        collecting.leave_out = None if self.ledger is None else self.ledger.left_out
        self._collecting = collecting

    def record_error(self, iterator: OurIterator, error: BaseException) -> None:
        """Records that ``next`` has raised."""
        if self._is_finished:
            return
        if self.ledger is not None:
            # The batch of the call is taken back.
            self.ledger.raised(iterator._batches_returned)
        if self.dataset is not None:
            self.dataset.worker_progress.raised(iterator._batches_returned)
        if isinstance(error, StopIteration) and not iterator.is_paused():
            self.end()
            self._is_finished = True

    def saved(self) -> Saved:
        """Returns the state of what ``next`` has returned."""
        return self.begun

    def fingerprint(self) -> int | None:
        """Returns the fingerprint of the samples that were returned; None if it is not known."""
        return self.begun.fingerprint

    def _bad_samples(self) -> int:
        return self.begun.bad_samples if self._collecting is None else int(self._collecting.number)


class SampledEpoch(Epoch):
    """An epoch of a map-style dataset.

    The ledger records which indices are read and which batches are handed out. The rest is recorded when
    the epoch begins, when it ends, and when ``next`` raises.

    Args:
        begun: The epoch's beginning, or the state from which it goes on.
        iterator: The iterator, which the epoch does not keep alive; None: another one is attached later.
        order: The order of its samples.
        dataset: The states of the dataset, if it may have any.
        seed: The seed of the workers, if the iterator does not draw it.
    """

    ledger: _native.Ledger

    def __init__(
        self,
        begun: Saved,
        iterator: OurIterator | None,
        order: NativeOrder | ReadOrder,
        dataset: DatasetState | None,
        seed: int | None,
    ) -> None:
        super().__init__(begun, iterator, dataset, seed)
        self._order = order
        self.ledger = order.begin(begun)

    def indices(self, made: Any) -> Any:
        """Returns an iterator of the epoch's indices. See :meth:`Epoch.indices`."""
        return self._order.read(made)

    def index_source(self, iterator: TorchIterator, places: _native.Places | None) -> _native.IndexSource:
        """Returns the source of the tasks of an iterator with workers."""
        source = self._order.source(places)
        if source is None:
            iterator._sampler_iter = self.indices(iterator._sampler_iter)
            source = _native.IndexSource.python(self.ledger, places)
        if self.dataset is not None:
            source.count(self.dataset.worker_progress)
        return source

    def saved(self) -> Saved:
        """Returns the state of what ``next`` has returned."""
        position = self._position()
        return position if self.dataset is None else position.but(workers=self.dataset.saved(self.returned()))

    def _position(self) -> Saved:
        """Returns the state without that of the dataset."""
        while True:
            settled, is_finished = self.ledger.tasks, self._is_finished
            found = self.ledger.position(self.returned())
            try:
                state, ended = self._order.state_after(found.tasks, is_finished)
                break
            except KeyError:
                # Another thread has gone on meanwhile.
                if self.ledger.tasks == settled:
                    raise
        ranges = found.ranges
        drawn, draws = self._order.drawn()
        samples = ranges.pop(0)[1] if ranges and ranges[0][0] == 0 else 0
        return self.begun.but(
            drawn=drawn,
            draws=draws,
            rest=self._order.rest_after(is_finished),
            num_yielded=found.batches,
            is_finished=is_finished,
            batches=found.batches,
            samples=samples,
            overtaken=tuple(itertools.chain.from_iterable(ranges)),
            passed=found.passed,
            fingerprint=found.fingerprint,
            bad_samples=self._bad_samples(),
            sampler_state=state,
            sampler_ended=ended,
        )

    def fingerprint(self) -> int | None:
        """Returns the fingerprint of the samples that were returned; None if it is not known."""
        return self.ledger.position(self.returned()).fingerprint


class StreamedEpoch(Epoch):
    """An epoch of an iterable dataset, whose state has the positions of the workers."""

    dataset: DatasetState

    def index_source(self, iterator: TorchIterator, places: _native.Places | None) -> _native.IndexSource:
        """Returns the source of the tasks of an iterator with workers."""
        source = samplers.index_source(iterator._index_sampler, places)
        source.count(self.dataset.worker_progress)
        return source

    def saved(self) -> Saved:
        """Returns the state of what ``next`` has returned."""
        workers, before = self.dataset.saved(self.returned()), self.begun.workers
        assert before is not None
        batches = workers.batches()
        if self._resumes:
            batches += self.begun.num_yielded - before.batches()
        return self.begun.but(
            num_yielded=batches,
            batches=batches,
            is_finished=self._is_finished,
            bad_samples=self._bad_samples(),
            workers=workers,
        )


class TorchsEpoch(SampledEpoch):
    """An epoch of an iterator of torch's, whose sampler is read through it."""

    position = StagePosition.SNAPSHOTS
    # Indices that were read, and those whose batches the caller got.
    _read = _got = 0

    def make(self, loader: TorchLoader, get_iterator: Callable[[Any], Any]) -> Any:
        """Returns torch's iterator, which reads the sampler through this epoch."""
        given: Any = InFront(loader)
        given._index_sampler = _Sampler(loader._index_sampler, self)
        if self.given_seed is not None:
            # The epoch has drawn before: the seeds of its workers come from its own, and from no draw.
            given.generator = torch.Generator().manual_seed(self.given_seed)
        iterator = get_iterator(given)
        self.begin(iterator, self.given_seed is None)
        return iterator

    def reset(self, loader: TorchLoader, iterator: TorchIterator) -> None:
        """Begins this epoch with the workers of an iterator of torch's that has had one."""
        iterator._index_sampler = _Sampler(loader._index_sampler, self)
        iterator._reset(loader)
        self.begin(iterator, False)

    def stages(self) -> Iterable[Stage]:
        """Returns the stage that records what the caller gets."""
        return (self,)

    def around(self, take: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns ``take`` for an iterator of torch's, whose batches are recorded."""
        return functools.partial(self._next, take)

    def _next(self, take: Callable[[Any], Any], iterator: TorchIterator) -> Any:
        self.ledger.begin_call()
        before = self._consumed(iterator)
        try:
            found = take(iterator)
        except StopIteration:
            raise
        except BaseException:
            # Without a batch, the wait for one has raised.
            if self._consumed(iterator) > before:
                self._record()
            raise
        self._record()
        return found

    def _consumed(self, iterator: TorchIterator) -> int:
        """Returns a number that grows with each batch that torch's iterator takes."""
        return int(getattr(iterator, "_rcvd_idx", self._read))

    def _record(self) -> None:
        if self._got < self._read:
            self.ledger.got(self._got)
            self._got += 1

    def indices(self, made: Iterator[Any]) -> Iterator[Any]:
        """Returns the indices of the epoch. torch asks twice with workers, and reads what it gets then."""
        return map(self._record_read, super().indices(made))

    def _record_read(self, index: Any) -> Any:
        self.ledger.read(index)
        self._read += 1
        return index


class _Sampler(InFront):
    """A loader's index sampler, which is read through an epoch."""

    def __init__(self, behind: Any, epoch: TorchsEpoch) -> None:
        super().__init__(behind)
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return self._epoch.indices(iter(self._behind))

    def __len__(self) -> int:
        return len(self._behind)
