"""``prefetch_epochs=``: the next epoch of persistent workers begins while batches of this one still come.

It begins as ``iter`` would begin it. Until ``iter`` is called, the loader shows the epoch before.
"""

from __future__ import annotations

import functools
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from ringloader._common import errors, states
from ringloader._common.looking import stored
from ringloader._iterator.plan import EpochPlan
from ringloader._options import epochs
from ringloader._sources import inside
from ringloader._torch import internals, select_path
from ringloader._worker.telling import epoch_listeners
from ringloader.rollover import RolloverBatchSampler

if TYPE_CHECKING:
    from ringloader._common.protocols import OurWorkersIterator
    from ringloader._torch.protocols import TorchLoader

# Samplers whose order follows from what is compared and put back here. One of the program's may count its
# epochs, or draw from anything.
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
_OF_EPOCH = ("_plan", "_epoch_to_tell", "_num_yielded", "_sampler_iter")


class NextEpoch:
    """Begins the next epoch of an iterator once the last index of the one under way has been sent.

    Args:
        loader: The loader, which this does not keep alive.
    """

    def __init__(self, loader: TorchLoader) -> None:
        self._loader = weakref.ref(loader)
        # Threads may share an iterator.
        self._lock = threading.Lock()
        self._numbers = _Numbers(loader)
        self._begun: _Begun | None = None

    @property
    def has_begun(self) -> bool:
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
        self._begun = begun = _Begun(iterator, loader, self._numbers)
        outer = sys.exception()
        iterator._returned_meanwhile = iterator._num_yielded
        try:
            begun.name(iterator, loader)
            iterator._draw(loader)
            begun.is_told = True
            iterator._scheduler.follow(iterator._send_start())
            for _ in range(iterator._most_tasks_of(iterator._workers_to_begin_with)):
                iterator._scheduler.put_following(iterator)
            begun.is_whole = True
        except Exception as error:
            # `iter` raises it. Its frames would keep the iterator, and so the workers.
            errors.cut(error, outer)
            errors.add_notes(error, f"Original {traceback.format_exc()}")
            errors.drop_frames(error)
            begun.error = error
        finally:
            try:
                begun.put_aside(iterator, loader)
            finally:
                iterator._returned_meanwhile = None

    def commit(self, iterator: OurWorkersIterator, loader: TorchLoader) -> bool:
        """Moves ``iterator`` to the epoch that was begun. False: ``iter`` must begin one.

        Raises:
            Exception: An error where the epoch was begun, such as the sampler's.
        """
        begun, self._begun = self._begun, None
        fits = begun is not None and begun.fits(iterator, loader)
        self._numbers.begin(iterator, loader)
        if begun is None:
            return False
        if begun.is_told:
            iterator._transport.begin_epoch()
        if fits and begun.error is not None:
            try:
                raise begun.error
            finally:
                begun.error = None
        if fits and begun.is_whole and iterator._scheduler.take_over():
            begun.put_in_place(iterator, loader)
            return True
        begun.drop(iterator, loader)
        return False

    def tell(self, iterator: OurWorkersIterator, worker: int) -> None:
        """Tells a worker that was just started of the epoch that was begun, if there is one."""
        if self._begun is not None:
            self._begun.tell(iterator, worker)

    def end(self) -> None:
        """Gives an epoch up that was begun, as the workers end."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.put_draws_back()

    def give_up(self) -> None:
        """Makes ``iter`` begin the next epoch itself, even if it was begun."""
        if self._begun is not None:
            self._begun.is_whole = False


class _Shown:
    """The epoch that a loader and its iterator show.

    Args:
        iterator: The iterator.
        loader: The loader.
    """

    def __init__(self, iterator: OurWorkersIterator, loader: TorchLoader) -> None:
        self.number = epochs.next_of(loader)
        self.rest = _rest_of(loader)
        self._of_iterator = {name: getattr(iterator, name) for name in _OF_EPOCH}

    @property
    def plan(self) -> EpochPlan:
        """The iterator's plan."""
        plan: EpochPlan = self._of_iterator["_plan"]
        return plan

    def put(self, iterator: OurWorkersIterator, loader: TorchLoader) -> None:
        """Makes both show this epoch."""
        epochs.count_from(loader, self.number)
        if self.rest is not None:
            loader._index_sampler.set_rest(self.rest)
        for name, value in self._of_iterator.items():
            setattr(iterator, name, value)


class _Begun:
    """An epoch that was begun before ``iter``, and what it was begun for.

    Args:
        iterator: The iterator, as it is before.
        loader: Its loader.
        numbers: Tell the epoch's number.
    """

    def __init__(self, iterator: OurWorkersIterator, loader: TorchLoader, numbers: _Numbers) -> None:
        self._numbers = numbers
        self._before = _Shown(iterator, loader)
        self._drawn = _Drawn(loader)
        self._after: _Shown | None = None
        # The numbers with which the epoch begins, once they are known, and all else that decides its order.
        self._number: int | None = None
        self._named: int | None = None
        self._seen: list[object] = []
        # True once workers are told of the epoch.
        self.is_told = False
        # True once all its first tasks have been sent.
        self.is_whole = False
        self.error: Exception | None = None

    def name(self, iterator: OurWorkersIterator, loader: TorchLoader) -> None:
        """Gives the epoch the numbers that the program is expected to give it."""
        self._numbers.tell_next(iterator, loader)
        self._number, self._named = epochs.next_of(loader), iterator._epoch_to_tell

    def tell(self, iterator: OurWorkersIterator, worker: int) -> None:
        """Tells a worker that was started after the others were told."""
        plan = None if self._after is None else self._after.plan
        if plan is not None and plan.of_tasks is not None:
            iterator._transport.send(worker, iterator._start_of(worker, plan))

    def put_aside(self, iterator: OurWorkersIterator, loader: TorchLoader) -> None:
        """Makes the loader and its iterator show the epoch that is under way."""
        self._after = _Shown(iterator, loader)
        self._before.put(iterator, loader)
        self._drawn.record()
        self._seen = _seen(loader)
        self._numbers.put_back()

    def fits(self, iterator: OurWorkersIterator, loader: TorchLoader) -> bool:
        """True if ``iter`` would begin the same epoch now."""
        is_named = iterator._epoch_to_tell == self._named or not epoch_listeners(loader.dataset)
        return (
            is_named
            and epochs.next_of(loader) == self._number
            and not _is_loaded(loader)
            and not self._drawn.is_set_meanwhile()
            and _are_same(_seen(loader), self._seen)
        )

    def put_in_place(self, iterator: OurWorkersIterator, loader: TorchLoader) -> None:
        """Makes the loader and its iterator show the epoch that was begun."""
        assert self._after is not None
        self._after.put(iterator, loader)

    def drop(self, iterator: OurWorkersIterator, loader: TorchLoader) -> None:
        """Gives the epoch up."""
        self.put_draws_back()
        if self.is_told and self._named is not None and iterator._epoch_to_tell is None:
            # The workers' dataset was told an epoch that did not come.
            iterator._epoch_to_tell = epochs.last_told(loader)

    def put_draws_back(self) -> None:
        """Puts generators that nobody has used since to where they were before."""
        self._drawn.put_back()


class _Drawn:
    """The generators that an epoch may draw from, and their states before and after its beginning."""

    def __init__(self, loader: TorchLoader) -> None:
        samplers = inside.samplers_in(loader._index_sampler)
        found = [stored(one, "generator") for one in (loader, *samplers)]
        distinct = {id(one): one for one in (torch.default_generator, *found) if one is not None}
        self._generators = [one for one in distinct.values() if isinstance(one, torch.Generator)]
        self._before = self._states()
        self._after = self._before

    def _states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def record(self) -> None:
        """Records the states after the beginning."""
        self._after = self._states()

    def is_set_meanwhile(self) -> bool:
        """True if other code has set, or drawn from, a generator that is not the program's."""
        states = zip(self._generators, self._states(), self._after, strict=True)
        return any(
            generator is not torch.default_generator and not torch.equal(now, after)
            for generator, now, after in states
        )

    def put_back(self) -> None:
        """Puts back the generators that are still where the beginning has left them."""
        for generator, before, after in zip(self._generators, self._before, self._after, strict=True):
            if torch.equal(generator.get_state(), after):
                generator.set_state(before)


class _Numbers:
    """Tells the next epoch's number: this one's plus 1, to each that was told this one's.

    A number that the program has left as it was for an epoch is expected to stay.

    Args:
        loader: The loader, whose first epoch begins.
    """

    def __init__(self, loader: TorchLoader) -> None:
        self._samplers = _with_epochs(loader)
        self._at, self._number = self._now(), epochs.next_of(loader)
        # Samplers whose number stands still, by `id`; True if the loader's does.
        self._still: set[int] = set()
        self._is_still = not epochs.was_named(loader)
        self._is_told = epochs.last_told(loader) is not None
        # Samplers that were told the next epoch, with the one that they had before.
        self._before: list[tuple[Any, int]] = []

    def _now(self) -> list[int]:
        return [int(sampler.epoch) for sampler in self._samplers]

    def begin(self, iterator: OurWorkersIterator, loader: TorchLoader) -> None:
        """Notes the numbers with which ``iter`` begins an epoch."""
        last = {id(sampler): at for sampler, at in zip(self._samplers, self._at, strict=True)}
        self._samplers = _with_epochs(loader)
        self._at = self._now()
        now = {id(sampler): at for sampler, at in zip(self._samplers, self._at, strict=True)}
        self._still = {one for one, at in now.items() if last.get(one) == at}
        number = epochs.next_of(loader)
        self._is_still, self._number = number == self._number, number
        self._is_told = iterator._epoch_to_tell is not None

    def tell_next(self, iterator: OurWorkersIterator, loader: TorchLoader) -> None:
        """Tells the loader and its samplers the next epoch."""
        number = epochs.next_of(loader)
        if not iterator._counts_epochs and number == self._number and not self._is_still:
            number += 1
            epochs.count_from(loader, number)
        if iterator._epoch_to_tell is None and self._is_told:
            iterator._epoch_to_tell = number
        for sampler, at in zip(self._samplers, self._at, strict=True):
            # One that has another number by now was told before, or counts itself.
            if sampler.epoch == at and id(sampler) not in self._still:
                self._before.append((sampler, at))
                sampler.set_epoch(at + 1)

    def put_back(self) -> None:
        """Gives samplers the epochs that they had."""
        before, self._before = self._before, []
        for sampler, epoch in before:
            sampler.set_epoch(epoch)


def _with_epochs(loader: TorchLoader) -> list[Any]:
    return [one for one in inside.samplers_in(loader._index_sampler) if inside.has_epoch(one)]


def _is_loaded(loader: TorchLoader) -> bool:
    """True if a loaded state says where the next epoch begins."""
    kept = states.of(loader)
    return kept is not None and kept.is_loaded(loader)


def _unknown(samplers: Iterable[Any]) -> type | None:
    """Returns the first class of a sampler whose order is not known before ``iter``."""
    return next((type(one) for one in samplers if type(one) not in _KNOWN), None)


def _length(sized: Any) -> int | None:
    """Returns the length of a dataset or sampler; None if it has none, or no valid one."""
    try:
        return len(sized)
    except Exception:
        return None


def _rest_of(loader: TorchLoader) -> list[Any] | None:
    """Returns the indices that the loader keeps for its next epoch; None: it keeps none."""
    batch_sampler = loader._index_sampler
    return batch_sampler.rest() if isinstance(batch_sampler, RolloverBatchSampler) else None


def _seen(loader: TorchLoader) -> list[object]:
    """Returns all that decides the order of a loader's next epoch, except its number and generators."""
    found: list[object] = [_length(loader.dataset), *(_rest_of(loader) or ())]
    for sampler in inside.samplers_in(loader._index_sampler):
        found += (sampler, _length(sampler))
        for name, value in getattr(sampler, "__dict__", {}).items():
            # A rollover copies its remainder each time.
            if name != "_rest":
                found += (name, value, _version(value))
    return found


def _version(value: Any) -> int | None:
    is_counted = isinstance(value, torch.Tensor) and not value.is_inference()
    return value._version if is_counted else None


def _are_same(some: list[object], others: list[object]) -> bool:
    """True if both have the same objects, and numbers. Other objects may not be comparable."""
    pairs = zip(some, others, strict=False)
    return len(some) == len(others) and all(
        one is other or (type(one) is type(other) is int and one == other) for one, other in pairs
    )
