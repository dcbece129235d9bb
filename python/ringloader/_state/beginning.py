"""The beginning of a dataset's epochs, for datasets that live on after an epoch.

A state that was taken before the dataset had one begins there. So does the epoch after a resumed one, if the
dataset keeps a loaded state and begins each ``__iter__`` from it, as the streams of Hugging Face do.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
from collections.abc import Callable
from typing import Any

from ringloader._common.equality import are_equal, pickled
from ringloader._common.rebound import Rebound
from ringloader._common.weak_registry import WeakRegistry
from ringloader._state.objects import Objects
from ringloader._state.parts import has_state

# In place of a batch that was not read from the beginning.
_WRONG = object()


class _First:
    """Stands before a dataset's iterator until its first sample. Has that, and the dataset's state after it.

    The states of some datasets are not quite the same whenever the same sample is read, as threads read
    ahead: then the samples tell.

    Args:
        objects: The dataset and its iterator.
    """

    def __init__(self, objects: Objects) -> None:
        self.is_there = False
        self.sample: bytes | None = None
        self.state: bytes | None = None
        self._objects: Objects | None = objects
        self._iterator = objects.torchs.dataset_iter
        objects.torchs.dataset_iter = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        objects, iterator = self._objects, self._iterator
        assert objects is not None
        self.release()
        try:
            found = next(iterator)
            self.is_there = True
            with contextlib.suppress(Exception):
                self.sample = pickled(found)
            return found
        finally:
            self.state = _state_of(objects.dataset)

    def release(self) -> None:
        """Gives the iterator its place back."""
        if self._objects is not None and self._objects.torchs.dataset_iter is self:
            self._objects.torchs.dataset_iter = self._iterator
        self._objects = self._iterator = None


class Beginning:
    """The beginning of a dataset in this process, which no workers share.

    Args:
        dataset: The dataset, before its first epoch here.
    """

    def __init__(self, dataset: Any) -> None:
        self.process = os.getpid()
        # A copy that is read in its place, once it cannot be brought to its beginning.
        self.replacement: Any = None
        # The first state, pickled; None if it cannot be had.
        self._first = _state_of(dataset) if has_state(dataset) else None
        # The dataset before a state was loaded, if its first state cannot be had.
        self._copy: Any = None
        # True once an epoch has begun, and while it is the first one.
        self._is_used = self._is_in_first = False
        # The first sample of the first epoch, if no state was loaded for that.
        self._at_first: _First | None = None
        # True if the dataset has gone on since its beginning, and may begin there by itself or not.
        self._may_be_further = False
        self._rebound = Rebound()
        # The state that was loaded last, pickled, as long as the dataset may keep it.
        self._loaded: bytes | None = None
        # The first sample that was read from there.
        self._after_load: _First | None = None
        # The state before the epoch that has begun since.
        self._before: bytes | None = None

    def is_watching(self, are_taken: bool) -> bool:
        """True if the first batch of the epoch says something that must be known.

        Args:
            are_taken: True if states of the dataset are taken.
        """
        return self._loaded is not None or self._may_be_further or (self._is_in_first and are_taken)

    def load(self, dataset: Any, state: Any) -> None:
        """Loads a state into the dataset, which may keep it."""
        if self._first is None and self._copy is None:
            # Only a dataset that keeps the state needs the copy.
            with contextlib.suppress(Exception):
                self._copy = copy.deepcopy(dataset)
        loaded = pickled(state)
        self._rebound.load(dataset, state)
        self._loaded, self._after_load, self._may_be_further = loaded, None, False

    def begin(self, dataset: Any) -> None:
        """Records that an epoch of the dataset begins."""
        self._is_in_first, self._is_used = not self._is_used, True
        if self._after_load is not None:
            self._rebound.set_back(only_states=True)
            self._before = _state_of(dataset)

    def go_back(self, dataset: Any) -> None:
        """Brings the dataset to its beginning, if it has been used: it may have gone on since."""
        self._loaded = self._after_load = None
        if not self._is_used or self._rebound.set_back() or self._first is None:
            return
        # Some datasets take their first state for one of another epoch, or of another worker.
        self._may_be_further = self._at_first is not None
        if not self._may_be_further:
            dataset.load_state_dict(pickle.loads(self._first))

    def fetch_first(self, objects: Objects, index: Any) -> Any:
        """Returns the first batch of an epoch. Begins it again if it has not begun at the beginning.

        Raises:
            RuntimeError: If the dataset keeps a loaded state, and cannot be brought to its beginning.
        """
        first = _First(objects)
        if self._may_be_further:
            data = _fetched(objects, index, first, self._is_further)
        elif self._loaded is None:
            self._at_first = first if self._is_in_first else self._at_first
            return _fetched(objects, index, first)
        elif self._after_load is None:
            self._after_load = first
            return _fetched(objects, index, first)
        else:
            data = _fetched(objects, index, first, self._is_kept)
            if data is _WRONG and self._rebound.set_back():
                objects.begin_again()
                data = _fetched(objects, index, _First(objects), self._is_kept)
                self._loaded = self._loaded if data is _WRONG else None
        self._may_be_further = False
        if data is not _WRONG:
            return data
        self._loaded = self._after_load = None
        if self._first is not None:
            objects.dataset.load_state_dict(pickle.loads(self._first))
        elif self._copy is not None:
            self.replacement, self._copy = self._copy, None
            objects.replace_dataset(self.replacement)
        else:
            raise RuntimeError(
                f"the {type(objects.dataset).__name__} keeps the state that was loaded and begins this epoch "
                "from it: samples would be lost. It has no state before its first epoch, and cannot be "
                "copied: give it a state_dict() that works before iter(), or begin __iter__ anew once its "
                "end was reached"
            )
        # If this is the same batch, it was the beginning all the same.
        objects.begin_again()
        return objects.fetcher.fetch(index)

    def _is_further(self, first: _First, _is_empty: bool) -> bool:
        """True if an epoch has not begun as the first one."""
        known = self._at_first
        assert known is not None
        return not (are_equal(first.state, known.state) or are_equal(first.sample, known.sample))

    def _is_kept(self, first: _First, is_empty: bool) -> bool:
        """True if an epoch has begun at the loaded state again. That may be the end: then it is empty."""
        known = self._after_load
        assert known is not None
        return (
            first.is_there == known.is_there
            and are_equal(first.state, known.state)
            and not are_equal(first.state, self._first)
            # A dataset may have been there by itself when the epoch began.
            and (is_empty or not are_equal(self._before, self._loaded))
        )


def _fetched(
    objects: Objects, index: Any, first: _First, is_wrong: Callable[[_First, bool], bool] | None = None
) -> Any:
    """Returns the first batch; _WRONG, if it was read from another place than the beginning."""
    try:
        data = objects.fetcher.fetch(index)
    except Exception as error:
        if is_wrong is None or not is_wrong(first, isinstance(error, StopIteration)):
            raise
        return _WRONG
    finally:
        first.release()
    return data if is_wrong is None or not is_wrong(first, False) else _WRONG


# Loaders that have the same dataset share its beginning.
_beginnings: WeakRegistry[Beginning] = WeakRegistry()


def beginning_of(dataset: Any) -> Beginning:
    """Returns the beginning of a dataset in this process: a forked child has another one."""
    found = _beginnings.get(dataset)
    if found is None or found.process != os.getpid():
        found = Beginning(dataset)
        _beginnings.put(dataset, found)
    return found


def _state_of(dataset: Any) -> bytes | None:
    try:
        return pickled(dataset.state_dict())
    except Exception:
        return None
