"""``prefetch_epochs=``: the next epoch of persistent workers begins while batches of this one still come.

It is planned with the numbers that the program is expected to give it. Until ``iter`` is called, loader and
samplers show the epoch before. ``iter`` takes the plan if the numbers are these; else it undoes that one.
"""

from __future__ import annotations

import contextlib
import functools
import threading
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

from ringloader._common import attributes
from ringloader._core import epochs
from ringloader._core.epochs import Drawn, EpochPlan, plan_epoch
from ringloader._core.feature import Feature, Setup, StagePosition, loaded_of
from ringloader._features.table import Options
from ringloader._sources.rollover import RolloverBatchSampler
from ringloader._torch import internals, select_path

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
        if loader is None or self._begun is not None or loaded_of(iterator._features, loader) is not None:
            return
        unknown = _unknown(attributes.samplers_in(loader._index_sampler))
        if unknown is not None:
            select_path.log_once(
                f"prefetch_epochs has no effect with a {unknown.__name__}: only the order of samplers of "
                "torch's own classes is known before iter()"
            )
            return
        self._begun = begun = _Begun(loader)
        # `iter` then begins the epoch itself, and raises the error if it comes again.
        with contextlib.suppress(Exception):
            begun.begin(loader, iterator)

    def begun_plan(
        self, iterator: OurWorkersIterator, loader: TorchLoader, loaded: Any
    ) -> tuple[EpochPlan, Drawn] | None:
        """Returns the plan of the epoch that was begun, and its draws. None: ``iter`` must begin one."""
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        plan = begun.plan
        if plan is not None:
            iterator._transport.begin_epoch()
            is_next = loaded is None and begun.is_whole and _is_next(loader, plan, iterator._plan)
            if is_next and iterator._scheduler.take_over():
                if begun.rest is not None:
                    loader._index_sampler.set_rest(begun.rest)
                return plan._replace(told=epochs.told_by(loader)), begun.drawn
            # If the workers' dataset was told an epoch that did not come, it is told the one that does.
            iterator._plan = iterator._plan._replace(told=plan.told)
        begun.undo()
        return None

    def replaced(self, iterator: OurWorkersIterator, worker: int) -> None:
        """Tells a successor that shares all tasks of the epoch that was begun, if there is one."""
        plan = None if self._begun is None else self._begun.plan
        if plan is not None and iterator._all_workers.shares_tasks:
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


def _is_next(loader: TorchLoader, plan: EpochPlan, previous: EpochPlan) -> bool:
    """True if the program has given the epoch after the previous one the numbers of a plan."""
    told = epochs.told_by(loader)
    named = told is not previous.told, told, epochs.next_of(loader)
    of_sampler = attributes.epoch_of(loader._index_sampler)
    return (*named, of_sampler) == (plan.is_named, plan.told, plan.number, plan.sampler_epoch)


class _Begun:
    """An epoch that was begun before ``iter``.

    Args:
        loader: The loader, which this does not keep alive.

    Attributes:
        plan: Its plan; None until workers are told of it.
        drawn: Its draws, once it has a plan.
        is_whole: True once all its first tasks have been sent.
        rest: The indices that its first tasks have left for the epoch after it; None without ``rollover``.
    """

    plan: EpochPlan | None = None
    drawn: Drawn
    is_whole = False
    rest: list[Any] | None = None

    def __init__(self, loader: TorchLoader) -> None:
        samplers = attributes.samplers_in(loader._index_sampler)
        found = [
            torch.default_generator,
            *(attributes.stored(one, "generator") for one in (loader, *samplers)),
        ]
        distinct = {id(one): one for one in found if isinstance(one, torch.Generator)}
        # Generators, with their states before and after the draws of the epoch.
        self._generators = [(one, state := one.get_state(), state) for one in distinct.values()]

    def begin(self, loader: TorchLoader, iterator: OurWorkersIterator) -> None:
        """Plans the epoch, and sends its first tasks. Samplers and iterator then are as before.

        Its numbers are one more than those of the epoch before, unless the program has set them since, or has
        not set them for that epoch.
        """
        previous, indices, index_sampler = iterator._plan, iterator._sampler_iter, loader._index_sampler
        sampler, epoch = attributes.with_epoch(index_sampler), attributes.epoch_of(index_sampler)
        rest = index_sampler.rest() if isinstance(index_sampler, RolloverBatchSampler) else None
        number, told = epochs.next_of(loader), epochs.told_by(loader)
        if told is previous.told and previous.is_named:
            number = previous.number + 1
            told = epochs.Told(number)
        try:
            if sampler is not None and previous.has_moved and epoch == previous.sampler_epoch:
                sampler.set_epoch(sampler.epoch + 1)
            plan, drawn = plan_epoch(loader, iterator, previous, None, (number, told))
            iterator._plan, iterator._sampler_iter = plan, drawn["_sampler_iter"]
            iterator._scheduler.follow(iterator._send_start())
            for _ in range(iterator._all_workers.most_tasks()):
                iterator._scheduler.put_following(iterator)
            self.is_whole = True
        finally:
            if iterator._plan is not previous:
                self.plan, self.drawn = iterator._plan, {**drawn, "_sampler_iter": iterator._sampler_iter}
                iterator._plan, iterator._sampler_iter = previous, indices
            self._generators = [(one, before, one.get_state()) for one, before, _ in self._generators]
            if rest is not None:
                self.rest = index_sampler.rest()
                index_sampler.set_rest(rest)
            if sampler is not None and sampler.epoch != epoch:
                sampler.set_epoch(epoch)

    def undo(self) -> None:
        """Puts generators back. Leaves out generators that the program has since set, or drawn from."""
        for generator, before, after in self._generators:
            if torch.equal(generator.get_state(), after):
                generator.set_state(before)


def _unknown(samplers: Iterable[Any]) -> type | None:
    """Returns the first class of a sampler whose order is not known before ``iter``."""
    return next((type(one) for one in samplers if type(one) not in _KNOWN), None)
