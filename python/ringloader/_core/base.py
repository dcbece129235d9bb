"""``next`` of ringloader's iterators, and the beginning of their epochs."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ringloader._core import states
from ringloader._features.pausing.pausing import Pausing
from ringloader._features.seeding import epochs
from ringloader._sources import inside
from ringloader._torch import internals
from ringloader._worker.options import InFront

if TYPE_CHECKING:
    from collections.abc import Sequence

    import ringloader._native as _native
    from ringloader._common.protocols import OurIterator
    from ringloader._core.feature import Feature
    from ringloader._torch.protocols import TorchLoader

    # torch's iterators are untyped, so only a base shows mypy their attributes.
    _Declared = OurIterator
else:
    _Declared = object


class EpochPlan(NamedTuple):
    """All that tells one epoch from another. Iterators, workers, seeds and states only read it.

    Attributes:
        number: The number of the epoch, as ``Seeds`` count; None if no option counts epochs.
        key_number: The number from which ``seeding`` makes keys: the sampler's epoch, or ``number``.
        told: The epoch that ``set_epoch`` of the loader has named for it; None: it was not called.
        last_told: That epoch, or the last one before it; None: it was never called. A worker that begins
            anew in mid-epoch is told it.
        tracked: The epoch as a state knows it; None for a loader without states.
        of_tasks: The epoch in the numbers of its tasks; None for the first one, and until workers are told.
    """

    number: int | None = None
    key_number: int | None = None
    told: int | None = None
    last_told: int | None = None
    tracked: states.Epoch | None = None
    of_tasks: int | None = None


class _WithSampler(InFront):
    """A loader for torch's iterator, which then has a sampler that the loader was asked for before."""

    def __init__(self, loader: TorchLoader, index_sampler: Any) -> None:
        super().__init__(loader)
        self._index_sampler = index_sampler


class WithoutDrawing(InFront):
    """A loader for torch's iterator, which then draws its base seed from a new generator."""

    def __init__(self, loader: TorchLoader) -> None:
        super().__init__(loader)
        self.generator = torch.Generator()


class LoaderIterator(Pausing, _Declared):
    """The part that iterators with and without workers share. Stands before a class of torch's."""

    # Until torch's constructor sets it: another thread may ask for the state meanwhile.
    _num_yielded: int = 0
    _num_workers: int
    _dataset_kind: Any
    _profile_name: str
    _IterableDataset_len_called: int | None
    _plan = EpochPlan()
    _features: Sequence[Feature] = ()

    def __next__(self) -> Any:
        """Returns the next batch. MIRRORS torch dataloader.py::_BaseDataLoaderIter.__next__."""
        try:
            if internals.BaseIterator.__next__ is not internals.next_of_iterator:
                # Tools put their own there, which call `_next_data`.
                return super().__next__()  # type: ignore[safe-super]
            # The profiler's record takes longer than a small batch.
            if internals.profiler_enabled():
                with torch.autograd.profiler.record_function(self._profile_name):
                    data = self._take_next(self)
            else:
                data = self._take_next(self)
        except BaseException as error:
            if self._plan.tracked is not None:
                self._plan.tracked.record_error(self, error)
            raise
        if self._IterableDataset_len_called is not None:
            self._check_length(self._IterableDataset_len_called)
        # The last step: a signal handler that asks for the state finds the batch returned, or under way.
        self._num_yielded += 1
        return data

    @property
    def _batches_returned(self) -> int:
        """Batches that calls of ``next`` have returned; one that still runs does not count."""
        return self._num_yielded

    def _decide(self, loader: TorchLoader, told: int | None = None, are_same: bool = False) -> EpochPlan:
        """Decides the epoch that begins, before anything is drawn for it.

        Args:
            loader: The loader.
            told: The epoch that ``set_epoch`` of the loader has named.
            are_same: True if the workers are those of the epoch before.
        """
        counts = self._counts_epochs
        number = epochs.next_of(loader) if counts else None
        kept = states.of(loader)
        epoch = None if kept is None else kept.begin(loader, self, number, are_same)
        if number is not None:
            epochs.count_from(loader, number + 1)
        # After a loaded state has set it, and before the sampler is iterated, which may count epochs itself.
        named = inside.epoch_of(loader._index_sampler) if counts else None
        last_told = self._plan.last_told if told is None else told
        return EpochPlan(number, number if named is None else named, told, last_told, epoch)

    def _init_base(self, loader: TorchLoader) -> None:
        """Calls the constructor of torch's base, which draws the base seed unless it is known."""
        epoch = self._plan.tracked
        if epoch is None:
            internals.BaseIterator.__init__(self, loader)
            return
        given: Any = loader
        is_torchs = type(loader)._index_sampler is internals.Loader._index_sampler
        if epoch.index_sampler is not None and not is_torchs:
            given = _WithSampler(loader, epoch.index_sampler)
        seed = epoch.given_seed
        internals.BaseIterator.__init__(self, given if seed is None else WithoutDrawing(given))
        if seed is not None:
            self._base_seed = seed
        epoch.begin(self, seed is None)

    @property
    def _counts_epochs(self) -> bool:
        return any(feature.counts_epochs for feature in self._features)

    def _places(self) -> _native.Places | None:
        """Returns what gives tasks their places in the epoch that begins, if a feature needs them."""
        if self._plan.key_number is None:
            return None
        rest = None if self._plan.tracked is None else self._plan.tracked.rest
        arguments = self._index_sampler, self._base_seed, self._plan.key_number, rest
        found = (feature.places(*arguments) for feature in self._features)
        return next((places for places in found if places is not None), None)

    def _note_begun(self, loader: TorchLoader) -> None:
        """Makes the epoch that has begun the loader's: the last step of ``iter``."""
        kept, epoch = states.of(loader), self._plan.tracked
        if kept is not None and epoch is not None:
            kept.has_begun(loader, epoch)
            for feature in self._features:
                feature.track(epoch)

    def _drawing(self, loader: TorchLoader) -> Any:
        """Returns the loader for torch's ``_reset``; in front of it for an epoch that has drawn before."""
        has_drawn = self._plan.tracked is not None and self._plan.tracked.is_drawn
        return WithoutDrawing(loader) if has_drawn else loader

    def _next_data(self) -> Any:
        return self._take_next(self)

    def _check_length(self, length: int) -> None:
        fetched = self._num_yielded + 1
        # A program may set the length of a loader with indices, which torch does not look at.
        if fetched <= length or self._dataset_kind != internals.ITERABLE:
            return
        message = (
            f"Length of IterableDataset {self._dataset} was reported to be {length}"
            f"(when accessing len(dataloader)), but {fetched} samples have been fetched. "
        )
        if self._num_workers > 0:
            message += (
                "For multiprocessing data-loading, this could be caused by not properly configuring the "
                "IterableDataset replica at each worker. Please see "
                "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples."
            )
        warnings.warn(message, stacklevel=3)
