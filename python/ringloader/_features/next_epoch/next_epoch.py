"""``prefetch_epochs=``: the next epoch of persistent workers begins while batches of this one still come.

It begins with the numbers that the program is expected to give it. Until ``iter`` is called, the loader shows
the epoch before. ``iter`` commits it if the numbers are these, else undoes it.
"""

from __future__ import annotations

import functools
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from ringloader._common import errors
from ringloader._common.attributes import stored
from ringloader._core import states
from ringloader._core.feature import Feature, Setup, StagePosition
from ringloader._features.seeding import epochs
from ringloader._features.table import Options
from ringloader._sources import inside
from ringloader._torch import internals, select_path
from ringloader._worker.telling import epoch_listeners
from ringloader.rollover import RolloverBatchSampler

if TYPE_CHECKING:
    from ringloader._common.protocols import OurWorkersIterator
    from ringloader._torch.protocols import TorchLoader

# Samplers whose order follows from numbers and generators, which can be undone. One of the program's may
# count its epochs, or draw from anything.
_KNOWN = {
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    RolloverBatchSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    *(internals.InfiniteConstantSampler, list, range, tuple),
}
# Attributes of an iterator that are of its epoch.
_OF_EPOCH = ("_plan", "_epoch_to_tell", "_sampler_iter")


class NextEpoch(Feature):
    """Begins the next epoch of an iterator once the last index of the one under way has been sent.

    Args:
        loader: The loader, which this does not keep alive. Its first epoch begins.
    """

    position = StagePosition.NEXT_EPOCH

    def __init__(self, loader: TorchLoader) -> None:
        self._loader = weakref.ref(loader)
        # Threads may share an iterator.
        self._lock = threading.Lock()
        # The numbers with which the epoch under way began, and the one before it.
        self._last = _numbers_of(loader, epochs.last_told(loader))
        self._before = _Numbers(None if epochs.was_named(loader) else self._last.number)
        self._begun: _Begun | None = None

    @property
    def has_begun_next(self) -> bool:  # type: ignore[override]
        """True once the epoch was begun that ``iter`` has not asked for yet."""
        return self._begun is not None

    def around(self, take: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns ``take``, before which the next epoch may begin."""
        return functools.partial(self._next, take)

    def _next(self, take: Callable[[Any], Any], iterator: OurWorkersIterator) -> Any:
        if self._begun is None and iterator._scheduler.is_at_end() and self._lock.acquire(blocking=False):
            try:
                self._begin(iterator)
            finally:
                self._lock.release()
        return take(iterator)

    def _begin(self, iterator: OurWorkersIterator) -> None:
        loader = self._loader()
        # Another thread may have begun it; a loaded state says where the next epoch begins.
        if loader is None or self._begun is not None or _is_loaded(loader):
            return
        unknown = _unknown(inside.samplers_in(loader._index_sampler))
        if unknown is not None:
            select_path.log_once(
                f"prefetch_epochs has no effect with a {unknown.__name__}: only the order of samplers of "
                "torch's own classes is known before iter()"
            )
            return
        shown = _Shown(iterator, loader)
        expected = self._expected(iterator, loader)
        self._begun = begun = _Begun(expected, _Draws(loader))
        outer = sys.exception()
        try:
            _put_numbers(loader, expected.number, expected.of_sampler)
            iterator._epoch_to_tell = expected.told
            iterator._draw(loader, is_early=True)
            begun.is_told = True
            iterator._scheduler.follow(iterator._send_start())
            for _ in range(iterator._most_tasks_of(iterator._running)):
                iterator._scheduler.put_following(iterator)
            begun.is_whole = True
        except Exception as error:
            # `iter` raises it. Its frames would keep the iterator, and so the workers.
            errors.cut(error, outer)
            errors.add_notes(error, f"Original {traceback.format_exc()}")
            errors.drop_frames(error)
            begun.error = error
        finally:
            begun.made = _Shown(iterator, loader)
            begun.draws.record()
            shown.put(iterator, loader)

    def _expected(self, iterator: OurWorkersIterator, loader: TorchLoader) -> _Numbers:
        """Returns the numbers with which the program is expected to begin the next epoch."""
        now, last, before = _numbers_of(loader, iterator._epoch_to_tell), self._last, self._before
        # The iterator has counted it.
        number = now.number if iterator._counts_epochs else _next_of(now.number, last.number, before.number)
        told = number if now.told is None and last.told is not None else now.told
        return _Numbers(number, _next_of(now.of_sampler, last.of_sampler, before.of_sampler), told)

    def commit(self, iterator: OurWorkersIterator, loader: TorchLoader) -> bool:
        """Moves ``iterator`` to the epoch that was begun. False: ``iter`` must begin one.

        Raises:
            Exception: An error where the epoch was begun, such as the sampler's.
        """
        begun, self._begun = self._begun, None
        self._before, self._last = self._last, _numbers_of(loader, iterator._epoch_to_tell)
        if begun is None:
            return False
        if begun.is_told:
            iterator._transport.begin_epoch()
        if begun.expected == self._last and not _is_loaded(loader):
            if begun.error is not None:
                try:
                    raise begun.error
                finally:
                    begun.error = None
            if begun.is_whole and iterator._scheduler.take_over():
                assert begun.made is not None
                begun.made.put(iterator, loader)
                iterator._num_yielded = 0
                return True
        begun.draws.undo()
        if begun.is_told and begun.expected.told is not None and iterator._epoch_to_tell is None:
            # The workers' dataset was told an epoch that did not come.
            iterator._epoch_to_tell = epochs.last_told(loader)
        return False

    def replaced(self, iterator: OurWorkersIterator, worker: int) -> None:
        """Tells a successor that shares all tasks of the epoch that was begun, if there is one."""
        if iterator._transport.joint_tasks is None:
            return
        made = None if self._begun is None else self._begun.made
        plan = None if made is None else made.of_iterator["_plan"]
        if plan is not None and plan.of_tasks is not None:
            iterator._transport.send(worker, iterator._start_of(worker, plan))

    def end(self) -> None:
        """Undoes an epoch that was begun, as the workers end."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.draws.undo()

    def give_up_next(self) -> None:
        """Makes ``iter`` begin the next epoch itself, even if it was begun."""
        if self._begun is not None:
            self._begun.is_whole = False


def feature_for(loader: TorchLoader, _options: Options, setup: Setup) -> NextEpoch | None:
    """Returns the feature that begins epochs before ``iter``; None without workers."""
    return NextEpoch(loader) if setup.workers else None


class _Numbers(NamedTuple):
    """The numbers with which an epoch begins, as the program gives them.

    Attributes:
        number: The loader's.
        of_sampler: The epoch of the sampler that has one.
        told: The epoch that the dataset is told, if it can be.
    """

    number: int | None = None
    of_sampler: int | None = None
    told: int | None = None


def _numbers_of(loader: TorchLoader, told: int | None) -> _Numbers:
    """Returns the numbers with which an epoch would begin now."""
    told = told if epoch_listeners(loader.dataset) else None
    return _Numbers(epochs.next_of(loader), inside.epoch_of(loader._index_sampler), told)


def _next_of(now: int | None, last: int | None, before: int | None) -> int | None:
    """Returns the number that is expected next: one more than the last one.

    One that was set since stays, and so does one that stood still from the epoch before to the last one.
    """
    return now if now is None or now != last or last == before else now + 1


def _put_numbers(loader: TorchLoader, number: int | None, of_sampler: int | None) -> None:
    assert number is not None
    epochs.count_from(loader, number)
    sampler = inside.with_epoch(loader._index_sampler)
    if sampler is not None and sampler.epoch != of_sampler:
        sampler.set_epoch(of_sampler)


class _Shown:
    """The epoch that a loader and its iterator show.

    Args:
        iterator: The iterator.
        loader: The loader.
    """

    def __init__(self, iterator: OurWorkersIterator, loader: TorchLoader) -> None:
        self.of_iterator = {name: getattr(iterator, name) for name in _OF_EPOCH}
        self._number = epochs.count_of(loader)
        self._of_sampler = inside.epoch_of(loader._index_sampler)
        self._rest = _rest_of(loader)

    def put(self, iterator: OurWorkersIterator, loader: TorchLoader) -> None:
        """Makes both show this epoch."""
        vars(iterator).update(self.of_iterator)
        _put_numbers(loader, self._number or 0, self._of_sampler)
        if self._rest is not None:
            loader._index_sampler.set_rest(self._rest)


class _Begun:
    """An epoch that was begun before ``iter``.

    Args:
        expected: The numbers for which it was begun.
        draws: The generators, before it draws.
    """

    def __init__(self, expected: _Numbers, draws: _Draws) -> None:
        self.expected = expected
        self.draws = draws
        # The epoch as loader and iterator show it once it is committed.
        self.made: _Shown | None = None
        # True once workers are told of the epoch.
        self.is_told = False
        # True once all its first tasks have been sent.
        self.is_whole = False
        self.error: Exception | None = None


class _Draws:
    """The draws of an epoch that was begun early, which can be undone."""

    def __init__(self, loader: TorchLoader) -> None:
        samplers = inside.samplers_in(loader._index_sampler)
        found = [torch.default_generator, *(stored(one, "generator") for one in (loader, *samplers))]
        distinct = {id(one): one for one in found if isinstance(one, torch.Generator)}
        self._before = [(generator, generator.get_state()) for generator in distinct.values()]
        self._after = [state for _, state in self._before]

    def record(self) -> None:
        """Records the states after the draws."""
        self._after = [generator.get_state() for generator, _ in self._before]

    def undo(self) -> None:
        """Puts generators back. Leaves out generators that the program has since set, or drawn from."""
        for (generator, before), after in zip(self._before, self._after, strict=True):
            if torch.equal(generator.get_state(), after):
                generator.set_state(before)


def _is_loaded(loader: TorchLoader) -> bool:
    """True if a loaded state says where the next epoch begins."""
    kept = states.of(loader)
    return kept is not None and kept.is_loaded(loader)


def _unknown(samplers: Iterable[Any]) -> type | None:
    """Returns the first class of a sampler whose order is not known before ``iter``."""
    return next((type(one) for one in samplers if type(one) not in _KNOWN), None)


def _rest_of(loader: TorchLoader) -> list[Any] | None:
    """Returns the indices that the loader keeps for its next epoch; None: it keeps none."""
    batch_sampler = loader._index_sampler
    return batch_sampler.rest() if isinstance(batch_sampler, RolloverBatchSampler) else None
