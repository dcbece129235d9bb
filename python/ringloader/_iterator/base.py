"""``next`` of ringloader's iterators, and what options do to a batch on its way to the caller."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ringloader._common import states
from ringloader._iterator.pausing import Pausing
from ringloader._iterator.plan import EpochPlan
from ringloader._options import epochs
from ringloader._sources import inside
from ringloader._torch import internals
from ringloader._worker.options import InFront

if TYPE_CHECKING:
    import ringloader._native as _native
    from ringloader._options.collecting import Collecting
    from ringloader._options.seeding import Keys
    from ringloader._placement.device import Moving
    from ringloader._stats.recording import Recording


class Delivery(NamedTuple):
    """Options that take part when a batch is handed out.

    Attributes:
        moving: Moves batches to a device.
        collecting: Takes batches apart, and lists their bad samples.
        transform: The ``device_transform`` of batches that stay on the CPU.
        recording: Notes how long ``next`` takes.
    """

    moving: Moving | None = None
    collecting: Collecting | None = None
    transform: Callable[[Any], Any] | None = None
    recording: Recording | None = None

    def around(self, take: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns ``take`` with the options around it, but for ``moving``."""
        if self.collecting is not None:
            take = functools.partial(self.collecting.next, take)
        if self.transform is not None:
            take = functools.partial(_transformed, self.transform, take)
        return take if self.recording is None else self.recording.around(take)

    def moved(self, take: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns ``take`` with all options around it: a batch is moved when it is asked for."""
        return self.around(take if self.moving is None else functools.partial(_moved, self.moving, take))

    def begin_recording(self) -> None:
        """Begins the times of another epoch of the same iterator: the first step of ``iter``."""
        if self.recording is not None:
            self.recording.recorder.begin()

    def begin_epoch(self, loader: Any) -> None:
        """Begins another epoch of the same iterator."""
        if self.moving is not None:
            self.moving.begin_epoch()
        if self.collecting is not None:
            self.collecting.begin_epoch(loader)

    @property
    def counters(self) -> Callable[[], dict[str, int]]:
        """Returns what a report counts of the options. A report keeps it: it does not lead to the loader."""
        return dict if self.moving is None else self.moving.counts


def _moved(moving: Moving, take: Callable[[Any], Any], iterator: Any) -> Any:
    return moving.place_next(functools.partial(take, iterator))


def _transformed(transform: Callable[[Any], Any], take: Callable[[Any], Any], iterator: Any) -> Any:
    batch = take(iterator)
    try:
        return transform(batch)
    except StopIteration as error:
        # To the caller that would be the end of the epoch.
        raise RuntimeError("device_transform raised StopIteration") from error


class WithoutDrawing(InFront):
    """A loader for torch's iterator, which then draws its base seed from a new generator."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.generator = torch.Generator()


class LoaderIterator(Pausing):
    """The part that iterators with and without workers share. Stands before a class of torch's."""

    _dataset: Any
    _num_workers: int
    # Until torch's constructor sets it: another thread may ask for the state meanwhile.
    _num_yielded: int = 0
    _base_seed: Any
    _index_sampler: Any
    _profile_name: str
    _IterableDataset_len_called: int | None
    _plan = EpochPlan()
    # While the next epoch is begun early, which resets torch's count: the count of this one.
    _returned_meanwhile: int | None = None
    # True if an option needs the numbers of epochs.
    _counts_epochs = False

    def __next__(self) -> Any:
        """Returns the next batch. MIRRORS torch dataloader.py::_BaseDataLoaderIter.__next__."""
        try:
            if internals.BaseIterator.__next__ is not internals.next_of_iterator:
                # Tools put their own there, which call `_next_data`.
                return super().__next__()  # type: ignore[misc]
            # The profiler's record takes longer than a small batch.
            if internals.profiler_enabled():
                with torch.autograd.profiler.record_function(self._profile_name):
                    data = self._take_next(self)
            else:
                data = self._take_next(self)
        except BaseException as error:
            if self._plan.epoch is not None:
                self._plan.epoch.note_raised(self, error)
            raise
        if self._IterableDataset_len_called is not None:
            self._check_length(self._IterableDataset_len_called)
        # The last step: a signal handler that asks for the state finds the batch returned, or under way.
        self._num_yielded += 1
        return data

    @property
    def _batches_returned(self) -> int:
        """Batches that calls of ``next`` have returned; one that still runs does not count."""
        returned = self._returned_meanwhile
        return self._num_yielded if returned is None else returned

    def _decide(self, loader: Any, told: int | None = None, are_same: bool = False) -> EpochPlan:
        """Decides the epoch that begins, before anything is drawn for it.

        Args:
            loader: The loader.
            told: The epoch that ``set_epoch`` of the loader has named.
            are_same: True if the workers are those of the epoch before.
        """
        number = epochs.take_next(loader) if self._counts_epochs else None
        kept = states.of(loader)
        epoch = None if kept is None else kept.begin(loader, self, number, are_same)
        # After a loaded state has set it, and before the sampler is iterated, which may count epochs itself.
        named = inside.epoch_of(loader._index_sampler) if self._counts_epochs else None
        return EpochPlan(number, number if named is None else named, told, epoch)

    def _init_base(self, loader: Any) -> None:
        """Calls the constructor of torch's base, which draws the base seed unless it is known."""
        epoch = self._plan.epoch
        if epoch is None or epoch.given_seed is None:
            internals.BaseIterator.__init__(self, loader)
        else:
            internals.BaseIterator.__init__(self, WithoutDrawing(loader))
            self._base_seed = epoch.given_seed
        if epoch is not None:
            epoch.begin(self, epoch.given_seed is None)

    def _places(self, keys: Keys) -> _native.Places:
        """Returns what gives tasks their places in the epoch that begins."""
        rest = None if self._plan.epoch is None else self._plan.epoch.rest
        assert self._plan.key_number is not None
        return keys.places(self._index_sampler, self._base_seed, self._plan.key_number, rest)

    def _drawing(self, loader: Any) -> Any:
        """Returns the loader for torch's ``_reset``; in front of it for an epoch that has drawn before."""
        has_drawn = self._plan.epoch is not None and self._plan.epoch.is_drawn
        return WithoutDrawing(loader) if has_drawn else loader

    def _next_data(self) -> Any:
        return self._take_next(self)

    def _check_length(self, length: int) -> None:
        fetched = self._num_yielded + 1
        if fetched <= length:
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
