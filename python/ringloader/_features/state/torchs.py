"""The epoch that torch's own loader runs whole: its sampler is read through ours, its batches are counted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

import ringloader._native as _native
from ringloader._core.feature import Stage, StagePosition
from ringloader._features.state import dataset_state
from ringloader._features.state.epoch import SampledEpoch
from ringloader._torch import internals, select_path
from ringloader._worker.options import InFront

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchIterator, TorchLoader


def why_not(loader: TorchLoader, get_iterator: TorchIterator) -> str | None:
    """Returns the reason why a loader has no state where torch's own loader runs, or None.

    Args:
        loader: The loader.
        get_iterator: What stands in the place of torch's ``DataLoader._get_iterator``, our hook aside.
    """
    if not _native.SUPPORTED or internals.missing_name() is not None:
        return "this build or torch lacks what a state needs"
    if not isinstance(loader.num_workers, int):
        return "num_workers is no int"
    reason = select_path.reason_against_reading(loader, get_iterator)
    if reason is not None:
        return reason
    if loader.num_workers > 1 and not loader.in_order:
        return "with in_order=False it does not say which batches it has given"
    return "no position of an IterableDataset can be had there" if dataset_state.decides(loader) else None


class TorchsEpoch(SampledEpoch):
    """An epoch of an iterator of torch's, whose sampler is read through it."""

    position = StagePosition.SNAPSHOTS
    # Indices that were read, and those whose batches the caller got.
    _read = _got = 0

    def make(self, loader: TorchLoader, get_iterator: Callable[[Any], Any]) -> Any:
        """Returns torch's iterator, which reads the sampler through this epoch."""
        given: Any = InFront(loader)
        given._index_sampler = _Sampler(loader._index_sampler, self)
        if self.given_seed is not None:
            # The epoch has drawn before: the seeds of its workers come from its own, and from no draw.
            given.generator = torch.Generator().manual_seed(self.given_seed)
        iterator = get_iterator(given)
        self.begin(iterator, self.given_seed is None)
        return iterator

    def reset(self, loader: TorchLoader, iterator: TorchIterator) -> None:
        """Begins this epoch with the workers of an iterator of torch's that has had one."""
        iterator._index_sampler = _Sampler(loader._index_sampler, self)
        iterator._reset(loader)
        self.begin(iterator, False)

    def stages(self) -> Iterable[Stage]:
        """Returns the stage that records what the caller gets."""
        return (self,)

    def around(self, take: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns ``take`` for an iterator of torch's, whose batches are recorded."""
        return functools.partial(self._next, take)

    def _next(self, take: Callable[[Any], Any], iterator: TorchIterator) -> Any:
        self.ledger.begin_call()
        before = self._consumed(iterator)
        try:
            found = take(iterator)
        except StopIteration:
            raise
        except BaseException:
            # Without a batch, the wait for one has raised.
            if self._consumed(iterator) > before:
                self._record()
            raise
        self._record()
        return found

    def _consumed(self, iterator: TorchIterator) -> int:
        """Returns a number that grows with each batch that torch's iterator takes."""
        return int(getattr(iterator, "_rcvd_idx", self._read))

    def _record(self) -> None:
        if self._got < self._read:
            self.ledger.got(self._got)
            self._got += 1

    def indices(self, made: Iterator[Any]) -> Iterator[Any]:
        """Returns the indices of the epoch. torch asks twice with workers, and reads what it gets then."""
        return map(self._record_read, super().indices(made))

    def _record_read(self, index: Any) -> Any:
        self.ledger.read(index)
        self._read += 1
        return index


class _Sampler(InFront):
    """A loader's index sampler, which is read through an epoch."""

    def __init__(self, behind: Any, epoch: TorchsEpoch) -> None:
        super().__init__(behind)
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return self._epoch.indices(iter(self._behind))

    def __len__(self) -> int:
        return len(self._behind)
