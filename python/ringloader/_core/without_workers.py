"""The iterator of a loader without workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ringloader._core.base import LoaderIterator
from ringloader._core.epochs import plan_epoch
from ringloader._core.feature import Feature, chain, loaded_of, placement_of
from ringloader._torch import internals
from ringloader._worker import collate
from ringloader._worker import options as worker_options
from ringloader._worker.options import EpochStart, Fetcher, InFront, WorkerOption

if TYPE_CHECKING:
    import ringloader._native as _native
    from ringloader._torch.protocols import TorchLoader


_PROFILE_NAME = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


class SingleProcessIterator(LoaderIterator, internals.SingleIterator):  # type: ignore[misc]
    """An iterator that asks the dataset in the caller's process: torch's, whose collation is native.

    Args:
        loader: The loader.
        wrap: Returns what stands in front of the fetcher of such a dataset; None for most datasets.
    """

    # Without a gate or an option.
    _take_next = staticmethod(internals.SingleIterator._next_data)

    def __init__(self, loader: TorchLoader, wrap: Callable[[Any], Any] | None = None) -> None:
        internals.SingleIterator.__init__(self, loader)
        # Analysers of traces look for it.
        self._profile_name = _PROFILE_NAME
        fetcher: Any = self._dataset_fetcher  # type: ignore[has-type]
        collate.put_native_again(fetcher)
        if wrap is not None:
            self._dataset_fetcher = wrap(fetcher)

    def _chain(self, gate: Any) -> Callable[[Any], Any]:
        return chain(internals.SingleIterator._next_data, self._features, gate)

    def __del__(self) -> None:
        self._settle()

    def _stop(self, _message: str) -> None:
        # Lets go of the dataset's iterator, as the end of workers does.
        self.__dict__.pop("_dataset_fetcher", None)


class _Placing(InFront):
    """In front of the fetcher of a loader without workers: places indices, as natively for workers.

    Args:
        fetcher: The fetcher, which takes the places off again.
        places: The epoch's.
    """

    def __init__(self, fetcher: Fetcher, places: _native.Places) -> None:
        super().__init__(fetcher)
        self._places = places

    def fetch(self, index: Any, /) -> Any:
        return self._behind.fetch(self._places.placed(index))


class IteratorWithOptions(SingleProcessIterator):
    """An iterator without workers, with options or states around it.

    MIRRORS torch dataloader.py::_SingleProcessDataLoaderIter, its base class.

    Args:
        loader: The loader.
        options: The options that workers would ask.
        features: The features that are on.
    """

    def __init__(
        self, loader: TorchLoader, options: Sequence[WorkerOption], features: Sequence[Feature]
    ) -> None:
        self._features = features
        self._take(*plan_epoch(loader, self, None, loaded_of(features, loader)))
        self._profile_name = _PROFILE_NAME
        if self._timeout != 0:
            raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")
        if placement_of(features) is not None:
            self._pin_memory = False
        internals.shard(self)
        self._dataset_fetcher = worker_options.begin_epoch(
            options,
            self._torchs_fetcher,
            self._dataset,
            self._start(),
            self._dataset_kind == internals.ITERABLE,
        )
        self._put_stages()
        if self._plan.tracked is not None:
            self._plan.tracked.read(self)
        if self._plan.places is not None:
            self._dataset_fetcher = _Placing(self._dataset_fetcher, self._plan.places)
        self._note_begun(loader)

    def _start(self) -> EpochStart:
        """Returns the beginning of the epoch, in which this process is the only worker."""
        position = None if self._plan.tracked is None else self._plan.tracked.start_of(0)
        # The dataset was told its epoch in this process.
        return EpochStart(self._plan.number, base_seed=self._base_seed, position=position)

    def _next_index(self) -> Any:
        read = super()._next_index
        return read() if self._plan.tracked is None else self._plan.tracked.next_index(read)

    def _torchs_fetcher(self, dataset: Any) -> Any:
        made = internals.create_fetcher(
            self._dataset_kind, dataset, self._auto_collation, self._collate_fn, self._drop_last
        )
        if not internals.is_in_worker():
            collate.put_native(made)
        return made
