"""The iterator of a loader without workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ringloader._common import states
from ringloader._iterator.base import LoaderIterator
from ringloader._iterator.stages import NO_STAGES, Stages
from ringloader._options.seeding import Keys, Placing
from ringloader._torch import data_pipes, internals
from ringloader._worker import collate, gather
from ringloader._worker import options as worker_options
from ringloader._worker.options import EpochStart, WorkerOption

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader


_PROFILE_NAME = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


class SingleProcessIterator(LoaderIterator, internals.SingleIterator):  # type: ignore[misc]
    """An iterator that asks the dataset in the caller's process: torch's, whose collation is native."""

    _stages = NO_STAGES
    # Without a gate or an option.
    _take_next = staticmethod(internals.SingleIterator._next_data)

    def __init__(self, loader: TorchLoader) -> None:
        internals.SingleIterator.__init__(self, loader)
        # Analysers of traces look for it.
        self._profile_name = _PROFILE_NAME
        self._make_native()

    def _make_native(self) -> None:
        collate.put_native_again(self._dataset_fetcher)

    def _chain(self, gate: Any) -> Callable[[Any], Any]:
        take = self._stages.moved(internals.SingleIterator._next_data)
        return self._stages.chain(take, gate=gate)

    def __del__(self) -> None:
        if self._noted is not None:
            self._noted.count.end(self._num_yielded)

    def _stop(self, _message: str) -> None:
        # Lets go of the dataset's iterator, as the end of workers does.
        self.__dict__.pop("_dataset_fetcher", None)


class GatheringIterator(SingleProcessIterator):
    """An iterator over arrays, whose rows are gathered natively."""

    def _make_native(self) -> None:
        super()._make_native()
        self._dataset_fetcher = gather.wrapped(self._dataset_fetcher)  # type: ignore[has-type]


class IteratorWithOptions(SingleProcessIterator):
    """An iterator without workers, with options or states around it.

    MIRRORS torch dataloader.py::_SingleProcessDataLoaderIter, its base class.

    Args:
        loader: The loader.
        options: The options that workers would ask.
        stages: The stages of options between the source and the caller.
        keys: Makes the key and the places of the epoch's samples, by which an option seeds generators.
        counts_epochs: True if an option needs the numbers of epochs.
    """

    def __init__(
        self,
        loader: TorchLoader,
        options: Sequence[WorkerOption],
        stages: Stages,
        keys: Keys | None = None,
        counts_epochs: bool = False,
    ) -> None:
        self._counts_epochs = counts_epochs
        self._plan = self._decide(loader)
        self._init_base(loader)
        self._profile_name = _PROFILE_NAME
        if self._timeout != 0:
            raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")
        if stages.moving is not None:
            self._pin_memory = False
        data_pipes.shard(self)
        self._dataset_fetcher = worker_options.begin_epoch(
            options,
            self._torchs_fetcher,
            self._dataset,
            self._start(),
            self._dataset_kind == internals.ITERABLE,
            None if internals.is_in_worker() else collate.put_native,
        )
        self._stages = stages
        self._put_stages()
        epoch = self._plan.tracked
        if epoch is not None:
            epoch.read(self, options)
        if keys is not None:
            self._dataset_fetcher = Placing(self._dataset_fetcher, self._places(keys))
        kept = states.of(loader)
        if kept is not None:
            kept.has_begun(loader, epoch, stages.collecting)

    def _start(self) -> EpochStart:
        """Returns the beginning of the epoch, in which this process is the only worker."""
        position = None if self._plan.tracked is None else self._plan.tracked.start_of(0)
        # The dataset was told its epoch in this process.
        return EpochStart(self._plan.number, base_seed=self._base_seed, position=position)

    def _next_index(self) -> Any:
        read = super()._next_index
        return read() if self._plan.tracked is None else self._plan.tracked.next_index(read)

    def _torchs_fetcher(self, dataset: Any) -> Any:
        return internals.create_fetcher(
            self._dataset_kind, dataset, self._auto_collation, self._collate_fn, self._drop_last
        )
