"""The beginning of a dataset's epochs, for datasets that live on after an epoch.

A state that was taken before the dataset had one begins there. So does the epoch after a resumed one, if the
dataset keeps a loaded state and begins each ``__iter__`` from it, as the streams of Hugging Face do.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

from ringloader._common.equality import are_equal
from ringloader._common.rebound import Rebound
from ringloader._common.weak_registry import WeakRegistry
from ringloader._state.objects import Objects
from ringloader._state.parts import has_state
from ringloader._worker.options import Fetcher

# In place of a batch that was read from a state which the dataset had kept.
_KEPT = object()


class _First:
    """The first sample of an epoch, and the state after it.

    It stands before the dataset's iterator until then. The states of some datasets are not quite the same
    whenever the same sample is read, as threads read ahead: then the samples tell.

    Args:
        objects: The dataset.
    """

    def __init__(self, objects: Objects) -> None:
        self.is_there = False
        self.sample: bytes | None = None
        self.state: bytes | None = None
        self._torchs: Any = objects.torchs
        self._dataset: Any = objects.dataset
        self._iterator = self._torchs.dataset_iter
        self._torchs.dataset_iter = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        iterator = self._iterator
        dataset = self._dataset
        self.leave()
        try:
            found = next(iterator)
            self.is_there = True
            with contextlib.suppress(Exception):
                self.sample = _bytes(found)
        finally:
            self.state = _state_of(dataset)
        return found

    def leave(self) -> None:
        """Gives the iterator its place back."""
        if self._torchs is not None and self._torchs.dataset_iter is self:
            self._torchs.dataset_iter = self._iterator
        self._torchs = self._dataset = self._iterator = None


class Beginning:
    """The beginning of a dataset, where it lives: in a worker, or in the main process.

    Args:
        of_dataset: False if several workers share the dataset, whose state is then no worker's.
    """

    def __init__(self, of_dataset: bool) -> None:
        self._of_dataset = of_dataset
        self._dataset: weakref.ref[Any] | None = None
        # The first state, pickled; None if it cannot be had.
        self._first: bytes | None = None
        # The dataset as it was, if its first state cannot be had.
        self._copy: Any = None
        # True if each epoch gets a copy.
        self._is_replaced = False
        # True once an epoch has begun, and while it is the first one.
        self._is_used = self._is_in_first = False
        # The first sample of the first epoch, if no state was loaded for that.
        self._first_of_all: _First | None = None
        # True if the dataset has gone on since its beginning, and may begin there by itself or not.
        self._may_be_further = False
        self._rebound = Rebound()
        # The state that was loaded last, pickled, as long as the dataset may keep it.
        self._loaded: bytes | None = None
        # The first sample that was read from there.
        self._after_load: _First | None = None
        # The state before the epoch that has begun since.
        self._before: bytes | None = None

    def take(self, dataset: Any) -> None:
        """Takes the state of a dataset that begins its first epoch here."""
        if not self._of_dataset or (self._dataset is not None and self._dataset() is dataset):
            return
        self._copy = self._loaded = self._after_load = self._first_of_all = None
        self._is_in_first = self._may_be_further = False
        self._rebound = Rebound()
        self._is_replaced = self._is_used = False
        try:
            self._dataset = weakref.ref(dataset)
        except TypeError:
            self._dataset = None
        self._first = _state_of(dataset) if has_state(dataset) else None

    def load(self, dataset: Any, state: Any) -> None:
        """Loads a state into the dataset, which may keep it."""
        if self._of_dataset and not self._is_used and self._first is None and self._copy is None:
            try:
                self._copy = copy.deepcopy(dataset)
            except Exception:
                # It is not needed unless the dataset keeps the state.
                self._copy = None
        loaded = _bytes(state)
        self._rebound.load(dataset, state)
        self._loaded, self._after_load, self._may_be_further = loaded, None, False

    def dataset_of_epoch(self, dataset: Any) -> Any:
        """Returns the dataset for an epoch: a copy of the one that was, if that keeps a loaded state."""
        return copy.deepcopy(self._copy) if self._is_replaced else dataset

    def begin(self, dataset: Any) -> None:
        """Notes that an epoch of the dataset begins."""
        self._is_in_first, self._is_used = not self._is_used, True
        if self._after_load is not None:
            self._before = _state_of(dataset)

    def go_back(self, dataset: Any) -> None:
        """Brings the dataset to its beginning, if it has been used: it may have gone on since."""
        self._loaded = self._after_load = None
        if not self._is_used or self._rebound.set_back() or self._first is None:
            return
        if self._first_of_all is None:
            dataset.load_state_dict(pickle.loads(self._first))
        else:
            self._may_be_further = True

    def is_to_watch(self, are_taken: bool) -> bool:
        """True if the first batch of the epoch says something that must be known.

        Args:
            are_taken: True if states of the dataset are taken.
        """
        return self._loaded is not None or self._may_be_further or (self._is_in_first and are_taken)

    def fetch_first(self, fetcher: Fetcher, index: Any, objects: Objects) -> Any:
        """Returns the first batch of an epoch. Begins it again if it has not begun at the beginning.

        Raises:
            RuntimeError: If the dataset keeps a loaded state, and cannot be brought to its beginning.
        """
        if self._may_be_further:
            return self._fetch_from_beginning(fetcher, index, objects)
        if self._loaded is None and not self._is_in_first:
            return fetcher.fetch(index)
        first = _First(objects)
        if self._loaded is None:
            self._first_of_all = first
            return _fetched(fetcher, index, first)
        if self._after_load is None:
            self._after_load = first
            return _fetched(fetcher, index, first)
        data = self._fetch_unless(self._is_kept, fetcher, index, objects, first)
        if data is _KEPT and self._rebound.set_back():
            first = self._begin_again(objects)
            data = self._fetch_unless(self._has_same_state, fetcher, index, objects, first)
            self._loaded = self._loaded if data is _KEPT else None
        if data is not _KEPT:
            if not self._rebound.holds():
                self._loaded = self._after_load = None
            return data
        self._loaded = self._after_load = None
        if not self._load_first(objects) and not self._replace(objects):
            kind = type(objects.torchs.dataset).__name__
            raise RuntimeError(
                f"the {kind} keeps the state that was loaded and begins this epoch from it: samples would be "
                "lost. It has no state before its first epoch, and cannot be copied: give it a state_dict() "
                "that works before iter(), or begin __iter__ anew once its end was reached"
            )
        # If this is the same batch, it was the beginning all the same.
        return _fetched(fetcher, index, self._begin_again(objects))

    def _begin_again(self, objects: Objects) -> _First:
        objects.begin_anew()
        objects.begin_batch()
        objects.is_at_beginning = False
        return _First(objects)

    def _fetch_unless(
        self,
        is_kept: Callable[[_First, bool], bool],
        fetcher: Fetcher,
        index: Any,
        objects: Objects,
        first: _First,
    ) -> Any:
        """Returns the batch, or _KEPT."""
        objects.is_at_beginning = False
        try:
            data = _fetched(fetcher, index, first)
        except Exception as error:
            if not is_kept(first, isinstance(error, StopIteration)):
                raise
            return _KEPT
        return _KEPT if is_kept(first, False) else data

    def _fetch_from_beginning(self, fetcher: Fetcher, index: Any, objects: Objects) -> Any:
        """Returns the first batch. Loads the first state only if the epoch begins elsewhere by itself.

        Some datasets take their first state for one of another epoch, or of another worker.
        """
        self._may_be_further = False
        first, known = _First(objects), self._first_of_all
        assert known is not None
        try:
            data = _fetched(fetcher, index, first)
        except Exception:
            data = _KEPT
        if data is not _KEPT and (
            are_equal(first.state, known.state) or are_equal(first.sample, known.sample)
        ):
            return data
        self._load_first(objects)
        return _fetched(fetcher, index, self._begin_again(objects))

    def _is_kept(self, first: _First, is_empty: bool) -> bool:
        """True if an epoch has begun from the loaded state: with its first sample, or at its end."""
        if self._has_same_state(first, is_empty):
            return True
        known = self._after_load
        assert known is not None
        is_same = not known.is_there if is_empty else are_equal(first.sample, known.sample)
        # Two samples may be equal by chance, and attributes may have an equal number by themselves.
        return is_same and self._rebound.holds_state()

    def _has_same_state(self, first: _First, is_empty: bool) -> bool:
        """True if the state is the one that came after the loaded one.

        A dataset that was there by itself when the epoch began is not meant.
        """
        known = self._after_load
        assert known is not None
        if known.is_there != first.is_there:
            # From the same state there is a first sample both times, or none.
            return False
        if not are_equal(first.state, known.state) or are_equal(first.state, self._first):
            return False
        return is_empty or not are_equal(self._before, self._loaded)

    def _load_first(self, objects: Objects) -> bool:
        if self._first is None:
            return False
        objects.torchs.dataset.load_state_dict(pickle.loads(self._first))
        return True

    def _replace(self, objects: Objects) -> bool:
        if self._copy is None:
            return False
        self._is_replaced = True
        objects.replace_dataset(copy.deepcopy(self._copy))
        return True


# Of datasets in this process: loaders that have the same one share its beginning.
_here: WeakRegistry[Beginning] = WeakRegistry()


def beginning_here(dataset: Any) -> Beginning:
    """Returns the beginning of a dataset in this process that no workers share."""
    found = _here.get(dataset)
    if found is None:
        found = Beginning(of_dataset=True)
        _here.put(dataset, found)
    return found


def _fetched(fetcher: Fetcher, index: Any, first: _First) -> Any:
    try:
        return fetcher.fetch(index)
    finally:
        first.leave()


def _state_of(dataset: Any) -> bytes | None:
    try:
        return _bytes(dataset.state_dict())
    except Exception:
        return None


def _bytes(state: Any) -> bytes | None:
    # Twice: equal states are mostly equal bytes then, whatever objects in them are one.
    state = pickle.loads(pickle.dumps(state, pickle.HIGHEST_PROTOCOL))
    return None if state is None else pickle.dumps(state, pickle.HIGHEST_PROTOCOL)


class Watching:
    """The fetcher of an epoch whose dataset may keep a loaded state.

    Args:
        fetcher: The fetcher.
        beginning: The dataset's beginning.
        objects: The dataset.
    """

    def __init__(self, fetcher: Fetcher, beginning: Beginning, objects: Objects) -> None:
        self._fetcher = fetcher
        self._beginning = beginning
        # They have this fetcher: without a cycle the dataset's iterator goes with it.
        self._objects = weakref.ref(objects)
        self._until_first: Objects | None = objects

    def fetch(self, index: Any, /) -> Any:
        objects, self._until_first = self._objects(), None
        if objects is None or not objects.is_at_beginning:
            return self._fetcher.fetch(index)
        objects.is_at_beginning = False
        return self._beginning.fetch_first(self._fetcher, index, objects)
