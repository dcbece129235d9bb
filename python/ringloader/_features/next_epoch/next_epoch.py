"""``prefetch_epochs=``: the next epoch of persistent workers begins while batches of this one still come.

It is planned with the numbers that the program is expected to give it. Until ``iter`` is called, loader and
samplers show the epoch before. ``iter`` takes the plan if the numbers are these; else it undoes that one.
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
from ringloader._core import epochs, states
from ringloader._core.epochs import EpochPlan, plan_epoch
from ringloader._core.feature import Feature, Setup, StagePosition
from ringloader._features.table import Options
from ringloader._sources import inside
from ringloader._torch import internals, select_path
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


class NextEpoch(Feature):
    """Begins the next epoch of an iterator once the last index of the one under way has been sent.

    Args:
        loader: The loader, which this does not keep alive.
    """

    position = StagePosition.NEXT_EPOCH
    follows_sampler = True

    def __init__(self, loader: TorchLoader) -> None:
        self._loader = weakref.ref(loader)
        # Threads may share an iterator.
        self._lock = threading.Lock()
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
        if loader is None or self._begun is not None or states.loaded_of(loader) is not None:
            return
        unknown = _unknown(inside.samplers_in(loader._index_sampler))
        if unknown is not None:
            select_path.log_once(
                f"prefetch_epochs has no effect with a {unknown.__name__}: only the order of samplers of "
                "torch's own classes is known before iter()"
            )
            return
        self._begun = begun = _Begun(loader, _expected(loader, iterator._plan))
        outer = sys.exception()
        try:
            begun.begin(loader, iterator)
        except Exception as error:
            # `iter` raises it. Its frames would keep the iterator, and so the workers.
            errors.cut(error, outer)
            errors.add_notes(error, f"Original {traceback.format_exc()}")
            errors.drop_frames(error)
            begun.error = error

    def begun_plan(self, iterator: OurWorkersIterator, loader: TorchLoader, loaded: Any) -> EpochPlan | None:
        """Returns the plan of the epoch that was begun. None: ``iter`` must begin one.

        Raises:
            Exception: An error where the epoch was begun, such as the sampler's.
        """
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        plan = begun.plan
        if plan is not None:
            iterator._transport.begin_epoch()
        if loaded is None and begun.expected == _numbers_of(loader, iterator._plan):
            if begun.error is not None:
                try:
                    raise begun.error
                finally:
                    begun.error = None
            if plan is not None and begun.is_whole and iterator._scheduler.take_over():
                if begun.rest is not None:
                    loader._index_sampler.set_rest(begun.rest)
                return plan._replace(told=epochs.told_by(loader))
        begun.undo()
        if plan is not None:
            # If the workers' dataset was told an epoch that did not come, it is told the one that does.
            iterator._plan = iterator._plan._replace(told=plan.told)
        return None

    def replaced(self, iterator: OurWorkersIterator, worker: int) -> None:
        """Tells a successor that shares all tasks of the epoch that was begun, if there is one."""
        plan = None if self._begun is None else self._begun.plan
        if plan is not None and iterator._transport.joint_tasks is not None:
            iterator._transport.send(worker, iterator._start_of(worker, plan.is_named, plan))

    def end(self) -> None:
        """Undoes an epoch that was begun, as the workers end."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.undo()

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
        told: The epoch that ``set_epoch`` of the loader has named for it, if it has.
    """

    number: int
    of_sampler: int | None
    told: int | None


def _numbers_of(loader: TorchLoader, plan: EpochPlan) -> _Numbers:
    """Returns the numbers with which an epoch would begin now after the one of a plan."""
    told = epochs.told_by(loader)
    named = None if told is None or told is plan.told else told.epoch
    return _Numbers(epochs.next_of(loader), inside.epoch_of(loader._index_sampler), named)


def _expected(loader: TorchLoader, plan: EpochPlan) -> _Numbers:
    """Returns the numbers with which the program is expected to begin the epoch after the one of a plan.

    Each is one more, unless the program has set it since, or has not set it for the epoch of the plan.
    """
    now = _numbers_of(loader, plan)
    of_sampler = now.of_sampler
    if of_sampler is not None and plan.has_moved:
        of_sampler += of_sampler == plan.sampler_epoch
    if now.told is None and plan.is_named:
        return _Numbers(plan.number + 1, of_sampler, plan.number + 1)
    return now._replace(of_sampler=of_sampler)


class _Begun:
    """An epoch that was begun before ``iter``.

    Args:
        loader: The loader, which this does not keep alive.
        expected: The numbers for which the epoch is begun.

    Attributes:
        plan: Its plan; None until workers are told of it.
        is_whole: True once all its first tasks have been sent.
        rest: The indices that its first tasks have left for the epoch after it; None without ``rollover``.
        error: The error where it was begun.
    """

    plan: EpochPlan | None = None
    is_whole = False
    rest: list[Any] | None = None
    error: Exception | None = None

    def __init__(self, loader: TorchLoader, expected: _Numbers) -> None:
        self.expected = expected
        samplers = inside.samplers_in(loader._index_sampler)
        found = [torch.default_generator, *(stored(one, "generator") for one in (loader, *samplers))]
        distinct = {id(one): one for one in found if isinstance(one, torch.Generator)}
        # Generators, with their states before and after the draws of the epoch.
        self._drawn = [(one, state := one.get_state(), state) for one in distinct.values()]

    def begin(self, loader: TorchLoader, iterator: OurWorkersIterator) -> None:
        """Plans the epoch, and sends its first tasks. The loader's samplers then are as before."""
        index_sampler = loader._index_sampler
        sampler, epoch = inside.with_epoch(index_sampler), inside.epoch_of(index_sampler)
        rest = index_sampler.rest() if isinstance(index_sampler, RolloverBatchSampler) else None
        number, of_sampler, told = self.expected
        try:
            if of_sampler != epoch:
                sampler.set_epoch(of_sampler)
            named = number, iterator._plan.told if told is None else epochs.Told(told)
            self._send(iterator, plan_epoch(loader, iterator, iterator._plan, None, named))
        finally:
            self._drawn = [(one, before, one.get_state()) for one, before, _ in self._drawn]
            if rest is not None:
                self.rest = index_sampler.rest()
                index_sampler.set_rest(rest)
            if sampler is not None and sampler.epoch != epoch:
                sampler.set_epoch(epoch)

    def _send(self, iterator: OurWorkersIterator, plan: EpochPlan) -> None:
        """Tells the workers of the epoch, and sends its first tasks. The iterator then is as before."""
        before = iterator._plan, iterator._sampler_iter
        try:
            iterator._plan, iterator._sampler_iter = plan, plan.drawn["_sampler_iter"]
            iterator._scheduler.follow(iterator._send_start())
            for _ in range(iterator._most_tasks_of(iterator._running)):
                iterator._scheduler.put_following(iterator)
            self.is_whole = True
        finally:
            drawn = {**plan.drawn, "_sampler_iter": iterator._sampler_iter}
            self.plan = iterator._plan._replace(drawn=drawn)
            iterator._plan, iterator._sampler_iter = before

    def undo(self) -> None:
        """Puts generators back. Leaves out generators that the program has since set, or drawn from."""
        for generator, before, after in self._drawn:
            if torch.equal(generator.get_state(), after):
                generator.set_state(before)


def _unknown(samplers: Iterable[Any]) -> type | None:
    """Returns the first class of a sampler whose order is not known before ``iter``."""
    return next((type(one) for one in samplers if type(one) not in _KNOWN), None)
