"""``next`` of ringloader's iterators, and the beginning of their epochs."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from ringloader._core import epochs
from ringloader._core.epochs import Drawn, EpochPlan
from ringloader._core.pausing import Pausing
from ringloader._torch import internals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringloader._common.protocols import OurIterator
    from ringloader._core.feature import Feature
    from ringloader._torch.protocols import TorchLoader

    # torch's iterators are untyped, so only a base shows mypy their attributes.
    _Declared = OurIterator
else:
    _Declared = object


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
            for feature in self._features:
                feature.raised(self, error)
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

    def _take(self, plan: EpochPlan, drawn: Drawn) -> None:
        """Begins the epoch of a plan in this process, with its draws."""
        vars(self).update(drawn)
        self._plan = plan

    def _note_begun(self, loader: TorchLoader) -> None:
        """Makes the epoch that has begun the loader's: the last step of ``iter``."""
        if self._plan.counts:
            epochs.count(loader, self._plan.number)
        for feature in self._features:
            feature.begun(loader, self)

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
