"""The plan of an epoch: all that is decided and drawn for it before its first task.

A plan changes nothing but generators. The loader counts the epoch, and forgets a loaded state, in the last
step of ``iter`` (``LoaderIterator._note_begun``). So an ``iter`` that raises leaves the loader as it was, and
generators where torch's would be.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ringloader._core import states
from ringloader._features.seeding import epochs
from ringloader._features.seeding.epochs import Told
from ringloader._sources import inside
from ringloader._torch import internals
from ringloader._worker.options import InFront

if TYPE_CHECKING:
    import ringloader._native as _native
    from ringloader._common.protocols import OurIterator
    from ringloader._torch.protocols import TorchLoader

_NOTHING: Mapping[str, Any] = MappingProxyType({})


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
        drawn: The attributes that torch's base class has set: the seeds, and the sampler's iterator.
        of_tasks: The epoch in the numbers of its tasks; None for the first one, and until workers are told.
    """

    number: int = 0
    counts: bool = False
    sampler_epoch: int | None = None
    has_moved: bool = True
    told: Told | None = None
    is_named: bool = False
    tracked: states.Epoch | None = None
    places: _native.Places | None = None
    drawn: Mapping[str, Any] = _NOTHING
    of_tasks: int | None = None

    def without_draws(self) -> EpochPlan:
        """Returns the plan for an iterator that has taken the draws, and lets go of them with its epoch."""
        return self._replace(drawn=_NOTHING)

    def begin_again(self, iterator: OurIterator, loader: TorchLoader) -> None:
        """Iterates the sampler again, as torch's class for workers does once its first workers run."""
        internals.BaseIterator._reset(iterator, _given(loader, self.tracked, is_first=False), True)


def plan_epoch(
    loader: TorchLoader,
    iterator: OurIterator,
    previous: EpochPlan | None,
    loaded: Any,
    named: tuple[int, Told | None] | None = None,
) -> EpochPlan:
    """Plans an epoch, and makes its draws in torch's order.

    Args:
        loader: The loader.
        iterator: Its iterator, which takes the draws when it begins the epoch.
        previous: The epoch before it of the same workers; None for the first one.
        loaded: The state from which it resumes; None: it begins.
        named: The number and the told epoch that ``iter`` is expected to find; None: those of the loader.
    """
    number, told = named or (epochs.next_of(loader), epochs.told_by(loader))
    features = iterator._features
    counts = any(feature.counts_epochs for feature in features)
    kept = states.of(loader)
    tracked = None
    if kept is not None:
        tracked = kept.begin(loader, iterator, number, loaded, previous is not None)
    sampler_epoch = None
    if counts or any(feature.follows_sampler for feature in features):
        # After a loaded state has set it, and before the sampler is iterated, which may count epochs itself.
        sampler_epoch = inside.epoch_of(loader._index_sampler)
    is_first = previous is None
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
    if counts:
        rest = None if tracked is None else tracked.rest
        key_number = number if sampler_epoch is None else sampler_epoch
        found = (
            feature.places(taken._index_sampler, taken._base_seed, key_number, rest) for feature in features
        )
        places = next((one for one in found if one is not None), None)
    del taken._behind
    return EpochPlan(
        number,
        counts,
        sampler_epoch,
        has_moved=previous is None or previous.sampler_epoch != sampler_epoch,
        told=told,
        is_named=told is not (None if previous is None else previous.told),
        tracked=tracked,
        places=places,
        drawn=vars(taken),
    )


class _Given(InFront):
    """The loader of an epoch with a state, as torch's base class sees it.

    Args:
        loader: The loader.
        tracked: The epoch. The loader was asked for its sampler already.
        has_drawn: True if the epoch has drawn before: torch's draws come from a new generator.
    """

    def __init__(self, loader: TorchLoader, tracked: states.Epoch, has_drawn: bool) -> None:
        super().__init__(loader)
        if tracked.index_sampler is not None:
            self._index_sampler = tracked.index_sampler
        if has_drawn:
            self.generator = torch.Generator()


def _given(loader: TorchLoader, tracked: states.Epoch | None, is_first: bool) -> Any:
    """Returns the loader for torch's base class. ``is_first``: True for its constructor."""
    if tracked is None:
        return loader
    has_drawn = tracked.given_seed is not None if is_first else tracked.is_drawn
    is_torchs = type(loader)._index_sampler is internals.Loader._index_sampler
    return loader if is_torchs and not has_drawn else _Given(loader, tracked, has_drawn)
