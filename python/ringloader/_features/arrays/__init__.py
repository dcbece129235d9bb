"""Datasets that are arrays: a batch is one gather of rows."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch
from torch.utils.data import TensorDataset

import ringloader._native as _native
from ringloader._core.feature import InWorkers, Setup
from ringloader._data.array_dataset import ArrayDataset
from ringloader._torch import collating, internals, modes, stand_ins
from ringloader._worker.collate import Collation
from ringloader._worker.fetch import SampleFetcher
from ringloader._worker.options import Fetcher, Position, WorkerOption

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader


# Makes the batch of gathered columns. A column that torch must collate is None. Returns None where
# torch must make all of it; no code of the user's has run by then.
_Assemble = Callable[["Rows", Any, list[Any], Sequence[int]], Any]


class _Kind(NamedTuple):
    """A class of datasets. Its objects' rows are those of their columns while ``getitem`` is its own."""

    cls: Any
    getitem: Any
    columns: Callable[[Any], Any]
    assemble: _Assemble


def _bare(_rows: Rows, _dataset: Any, gathered: list[Any], _index: Sequence[int]) -> Any:
    return gathered[0]


def _tuples(_rows: Rows, _dataset: Any, gathered: list[Any], _index: Sequence[int]) -> Any:
    return None if any(column is None for column in gathered) else gathered


def _arrays(rows: Rows, dataset: ArrayDataset, gathered: list[Any], index: Sequence[int]) -> Any:
    if all(column is None for column in gathered):
        return None
    arrays, named = dataset.arrays, dataset.named
    columns = gathered[: len(arrays)]
    by_name = dict(zip(named, gathered[len(arrays) :], strict=True))
    others = [number for number, column in enumerate(columns) if column is None]
    other_names = [name for name, column in by_name.items() if column is None]
    if others or other_names:
        # Row by row and in tuples and dicts, as torch's collation would get them.
        samples = [
            (
                tuple(arrays[number][row] for number in others),
                {name: named[name][row] for name in other_names},
            )
            for row in index
        ]
        collated, collated_by_name = rows.collate(samples)
        for number, column in zip(others, collated, strict=True):
            columns[number] = column
        by_name.update(collated_by_name)
    return dataset.shaped(columns, by_name, list)


def _of_one(dataset: Any) -> tuple[Any, ...]:
    return (dataset,)


def _has_own_getitem(cls: type) -> bool:
    """True if the method of numpy's, torch's or our own is what the class was written with."""
    found: Any = cls.__getitem__  # type: ignore[index]
    if isinstance(found, FunctionType):
        return found.__code__.co_qualname == f"{cls.__name__}.__getitem__"
    return isinstance(found, type(list.__len__))


_KINDS = {
    cls: _Kind(cls, cls.__getitem__, columns, assemble)
    for cls, columns, assemble in (
        (numpy.ndarray, _of_one, _bare),
        (numpy.memmap, _of_one, _bare),
        (torch.Tensor, _of_one, _bare),
        (TensorDataset, lambda dataset: dataset.tensors, _tuples),
        (ArrayDataset, lambda dataset: (*dataset.arrays, *dataset.named.values()), _arrays),
    )
    if _has_own_getitem(cls)
}


def feature_for(loader: TorchLoader, _options: Any, _setup: Setup) -> InWorkers | None:
    """Returns the feature that gathers batches, if it may do something for a loader."""
    option = option_for(loader)
    return None if option is None else InWorkers(option)


def option_for(loader: TorchLoader) -> Gather | None:
    """Returns the option that gathers batches, if it may do something for a loader."""
    may_gather = (
        type(loader.dataset) in _KINDS
        and loader.batch_sampler is not None
        and collating.is_default_collate(loader.collate_fn)
    )
    return Gather() if may_gather else None


def draws_nothing(dataset: Any) -> bool:
    """True for plain arrays and tensors: no random number has a part in their samples."""
    kind = _KINDS.get(type(dataset))
    plain = (numpy.ndarray, numpy.memmap, torch.Tensor)
    return (
        kind is not None
        and _has_its_rows(kind, dataset)
        and all(type(column) in plain for column in kind.columns(dataset))
    )


class Gather(WorkerOption):
    """Gathers the batches of arrays, where torch's own fetcher would index and collate."""

    position = Position.GATHER

    def fill(self, samples: SampleFetcher) -> None:
        made = wrapped(samples.torchs)
        samples.gather = None if made is samples.torchs else made


def wrapped(fetcher: Fetcher) -> Fetcher:
    """Returns what gathers the batches of a fetcher, or the fetcher itself where that may not be."""
    torchs: Any = fetcher
    if not internals.fetches_by_index(torchs) or not torchs.auto_collation:
        return fetcher
    collation, gather = torchs.collate_fn, None
    if type(collation) is Collation:
        gather = collation.gather
    elif _native.SUPPORTED and collating.collates_rows(collation, _native.Collate):
        parts = collating.parts_of_default_collate()
        gather = _native.Gather(stand_ins.port, parts, modes.MODES, collating.collate_fn_map)
    return fetcher if gather is None else Gathering(fetcher, gather)


class Gathering:
    """Stands in front of torch's fetcher, and is otherwise like it."""

    fetch: Callable[[Any], Any]

    def __init__(self, fetcher: Any, gather: _native.Gather) -> None:
        self.torchs = fetcher
        rows = Rows(fetcher, gather)
        if threading.get_ident() == threading.main_thread().ident:
            self.fetch = _native.FirstOf(rows.batch, fetcher.fetch, rows.note_torchs)
        else:
            # The interpreter's exit ends a thread in the middle of the dataset's code, which aborts the
            # process where native code has called that.
            self.fetch = functools.partial(_first_of, rows, fetcher)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.torchs, name)


def _first_of(rows: Rows, fetcher: Any, index: Any) -> Any:
    """MIRRORS the native ``FirstOf``."""
    batch = rows.batch(index)
    if batch is None:
        batch = fetcher.fetch(index)
        rows.note_torchs()
    return batch


class Rows:
    """The batches of a fetcher whose dataset is arrays."""

    # True once torch could warn of rows that may not be written to, which it does once.
    _has_warned = False

    def __init__(self, fetcher: Any, gather: _native.Gather) -> None:
        self._fetcher = fetcher
        self._gather = gather

    def batch(self, index: Any) -> Any:
        """Returns the batch, or None if torch must make it."""
        dataset = self._fetcher.dataset
        kind = _KINDS.get(type(dataset))
        if kind is None or not _has_its_rows(kind, dataset):
            return None
        may_be_read_only = self._has_warned and not torch.is_warn_always_enabled()
        gathered = self._gather(kind.columns(dataset), index, may_be_read_only)
        return None if gathered is None else kind.assemble(self, dataset, gathered, index)

    def note_torchs(self) -> None:
        """Notes that torch's own fetcher has made a batch."""
        self._has_warned = True

    def collate(self, samples: list[Any]) -> Any:
        """Returns what the fetcher's ``collate_fn`` makes of samples."""
        return self._fetcher.collate_fn(samples)


def _has_its_rows(kind: _Kind, dataset: Any) -> bool:
    """True if indexing the dataset is still what it was when this module was imported."""
    return (
        kind.cls.__getitem__ is kind.getitem
        and torch.Tensor.__getitem__ is _tensors_getitem
        and not hasattr(dataset, "__getitems__")
    )


_tensors_getitem: Any = torch.Tensor.__getitem__
