"""The epochs of a loader: their numbers, and the plan of the one that begins.

A plan changes nothing of the loader but its samplers and generators. The loader counts the epoch, and forgets
a loaded state, in the last step of ``iter`` (``LoaderIterator._note_begun``). So an ``iter`` that raises has
nothing to undo, and leaves generators where torch's would.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data.distributed import DistributedSampler

from ringloader._common import attributes
from ringloader._common.attributes import has_method, stored
from ringloader._common.weak_registry import WeakRegistry
from ringloader._core.feature import TrackedEpoch, first
from ringloader._torch import internals, select_path
from ringloader._worker.options import InFront, epoch_listeners

if TYPE_CHECKING:
    import ringloader._native as _native
    from ringloader._common.protocols import OurIterator
    from ringloader._torch.protocols import TorchLoader


class Told(NamedTuple):
    """The epoch of a call of ``set_epoch``. Each call makes another object."""

    epoch: int


# On a loader: the number of the epoch that begins next.
_NEXT = "_ringloader_next_epoch"
# On a loader: what it has told last.
_TOLD = "_ringloader_told_epoch"
# By dataset: what any loader has told it last.
_told_last: WeakRegistry[Told] = WeakRegistry()
# By loader: True once its sampler has shuffled.
_has_shuffled: WeakRegistry[bool] = WeakRegistry()
# Attributes of torch's iterator that its base class draws for an epoch: seeds, and the sampler's iterator.
Drawn = dict[str, Any]


def told_by(loader: TorchLoader) -> Told | None:
    """Returns what ``set_epoch`` of a loader has told last; None: it was not called."""
    found: Told | None = vars(loader).get(_TOLD)
    return found


def told_to_kept(loader: TorchLoader) -> Told | None:
    """Returns what workers are told whose dataset may have been told another epoch; None: nothing.

    The dataset of a loader that has told nothing is as other loaders have told it: frameworks make new ones.
    """
    told = told_by(loader)
    if told is None and _told_last:
        found = (_told_last.get(one) for one in epoch_listeners(loader.dataset))
        told = next((one for one in found if one is not None), None)
    return told


def next_of(loader: TorchLoader) -> int:
    """Returns the number of the epoch that begins next, as ``Seeds`` count."""
    return int(vars(loader).get(_NEXT, 0))


def count_from(loader: TorchLoader, epoch: int) -> None:
    """Sets that number, and calls no ``set_epoch``."""
    setattr(loader, _NEXT, epoch)


def count(loader: TorchLoader, begun: int) -> None:
    """Counts an epoch that has begun. Another number that was set meanwhile stays."""
    if next_of(loader) == begun:
        count_from(loader, begun + 1)


def set_next(loader: TorchLoader, epoch: int) -> None:
    """The next epoch of a loader is this one: samplers and the dataset are told, workers when it begins.

    Raises:
        TypeError: If it is no int.
        ValueError: If it is negative.
    """
    if not isinstance(epoch, int) or isinstance(epoch, bool):
        raise TypeError(f"epoch must be an int, not {epoch!r}")
    if not 0 <= epoch < 1 << 32:
        raise ValueError(f"epoch must be from 0 up to and without {1 << 32}, not {epoch}")
    setattr(loader, _NEXT, epoch)
    batch_sampler = loader.batch_sampler
    samplers = (loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    datasets = epoch_listeners(loader.dataset)
    listeners = [*(one for one in samplers if has_method(one, "set_epoch")), *datasets]
    distinct: dict[int, Any] = {id(one): one for one in listeners}
    for one in distinct.values():
        one.set_epoch(epoch)
    told = Told(epoch)
    # Workers of an iterator that is made from now on get the dataset as it is; others are told with the plan.
    setattr(loader, _TOLD, told)
    for one in datasets:
        _told_last.put(one, told)
    iterator = loader._iterator
    if datasets and iterator is not None and not hasattr(iterator, "_transport"):
        select_path.log_once("set_epoch() does not reach persistent workers on torch's own path")


def forget_shuffled(loader: TorchLoader) -> None:
    """Makes the next epoch of a loader one that may shuffle as the epoch before."""
    _has_shuffled.pop(loader)


def log_if_forgotten(loader: TorchLoader) -> None:
    """Logs once if nobody calls a sampler's ``set_epoch``. Call it when a loader has begun an epoch."""
    own = vars(loader)
    # For a batch sampler of the program's, torch makes a sampler that is never read, and no batch size.
    holder = own.get("batch_sampler") if own.get("batch_size") is None else None
    sampler: Any = own.get("sampler") if holder is None else stored(holder, "sampler")
    if not issubclass(type(sampler), DistributedSampler):
        return
    # A subclass with an order of its own may count epochs in its own way.
    if type(sampler).__iter__ is not DistributedSampler.__iter__ or not sampler.shuffle:
        return
    if sampler.epoch == 0 and _has_shuffled.get(loader):
        select_path.log_once(
            "a DistributedSampler begins another epoch with the number 0, and gives the same order again: "
            "call its set_epoch(epoch) before each epoch"
        )
    _has_shuffled.put(loader, True)


class EpochPlan(NamedTuple):
    """All that tells one epoch from another. Iterators, workers, seeds and states only read it.

    Attributes:
        number: The number of the epoch, as ``Seeds`` count.
        counts: True if an option counts epochs: the next one has the next number.
        sampler_epoch: The epoch of the sampler; None if it has none, or no feature needs it.
        has_moved: True if that is another one than in the epoch before.
        told: The epoch that ``set_epoch`` of the loader has named last; None: it was never called.
        is_named: True if it has named this epoch.
        tracked: The epoch as a state knows it; None for a loader without states.
        places: Gives tasks the places of their samples; None if no feature needs them.
        of_tasks: The epoch in the numbers of its tasks; None for the first one, and until workers are told.
    """

    number: int = 0
    counts: bool = False
    sampler_epoch: int | None = None
    has_moved: bool = True
    told: Told | None = None
    is_named: bool = False
    tracked: TrackedEpoch | None = None
    places: _native.Places | None = None
    of_tasks: int | None = None

    def begin_again(self, iterator: OurIterator, loader: TorchLoader) -> None:
        """Iterates the sampler again, as torch's class for workers does once its first workers run."""
        internals.BaseIterator._reset(iterator, _given(loader, self.tracked, is_first=False), True)


def plan_epoch(
    loader: TorchLoader,
    iterator: OurIterator,
    previous: EpochPlan | None,
    loaded: Any,
    named: tuple[int, Told | None] | None = None,
) -> tuple[EpochPlan, Drawn]:
    """Plans an epoch, and makes its draws in torch's order.

    Args:
        loader: The loader.
        iterator: Its iterator, which takes the draws when it begins the epoch.
        previous: The epoch before it of the same workers; None for the first one.
        loaded: The state from which it resumes; None: it begins.
        named: The number and the told epoch that ``iter`` is expected to find; None: those of the loader.
    """
    number, told = named or (next_of(loader), told_by(loader))
    features = iterator._features
    is_first, counts, follows = previous is None, False, False
    tracked: TrackedEpoch | None = None
    for feature in features:
        counts = counts or feature.counts_epochs
        follows = follows or feature.follows_sampler
        if tracked is None:
            tracked = feature.track(loader, iterator, number, loaded, not is_first)
    sampler_epoch = None
    if follows:
        # After a loaded state has set it, and before the sampler is iterated, which may count epochs itself.
        sampler_epoch = attributes.epoch_of(loader._index_sampler)
    taken: Any = InFront(iterator)
    given = _given(loader, tracked, is_first)
    if is_first:
        internals.BaseIterator.__init__(taken, given)
    else:
        internals.BaseIterator._reset(taken, given)
    if tracked is not None:
        draws = is_first and tracked.given_seed is None
        if is_first and not draws:
            taken._base_seed = tracked.given_seed
        tracked.begin(taken, draws)
    places = None
    if follows:
        rest = None if tracked is None else tracked.rest
        key_number = number if sampler_epoch is None else sampler_epoch
        arguments = taken._index_sampler, taken._base_seed, key_number, rest
        places = first(feature.places(*arguments) for feature in features)
    del taken._behind
    has_moved, told_before = True, None
    if previous is not None:
        has_moved, told_before = previous.sampler_epoch != sampler_epoch, previous.told
    is_named = told is not told_before
    plan = EpochPlan(number, counts, sampler_epoch, has_moved, told, is_named, tracked, places)
    return plan, vars(taken)


def _given(loader: TorchLoader, tracked: TrackedEpoch | None, is_first: bool) -> Any:
    """Returns the loader for torch's base class. ``is_first``: True for its constructor."""
    if tracked is None or not (tracked.given_seed is not None if is_first else tracked.is_drawn):
        return loader
    # The epoch has drawn before: torch's draws come from a generator of their own.
    given: Any = InFront(loader)
    given.generator = torch.Generator()
    return given
