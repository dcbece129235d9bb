"""The state of a dataset before its first epoch, for datasets that live on after an epoch.

A state that was taken before the dataset had one begins there. So does the epoch after a resumed one, if the
dataset keeps a loaded state and begins each ``__iter__`` from it, as the streams of Hugging Face do.
"""

from __future__ import annotations

import copy
import pickle
import weakref
from typing import Any

from ringloader._state.objects import Objects
from ringloader._state.parts import has_state
from ringloader._worker.options import Fetcher


class Beginning:
    """The first state of a dataset, where it lives: in a worker, or in the main process.

    Args:
        of_dataset: False if several workers share the dataset, whose state is then no worker's.
    """

    def __init__(self, of_dataset: bool) -> None:
        self._of_dataset = of_dataset
        self._dataset: weakref.ref[Any] | None = None
        # The state, pickled; None if it cannot be had.
        self._state: bytes | None = None
        # The dataset as it was, if its first state cannot be had.
        self._copy: Any = None
        # True if each epoch gets a copy.
        self._is_replaced = False
        # True once an epoch has begun.
        self.is_used = False
        # The state after the first batch that was read from a loaded state, until another epoch was begun.
        self.after_first: bytes | None = None

    def take(self, dataset: Any) -> None:
        """Takes the state of a dataset that begins its first epoch here."""
        if not self._of_dataset or (self._dataset is not None and self._dataset() is dataset):
            return
        self._state = self._copy = self.after_first = None
        self._is_replaced = self.is_used = False
        try:
            self._dataset = weakref.ref(dataset)
        except TypeError:
            self._dataset = None
        if has_state(dataset):
            self._state = _pickled(dataset)

    def keep_copy(self, dataset: Any) -> None:
        """Copies a dataset that is about to load a state, if its first state cannot be had."""
        if self._of_dataset and not self.is_used and self._state is None and self._copy is None:
            try:
                self._copy = copy.deepcopy(dataset)
            except Exception:
                # It is not needed unless the dataset keeps a loaded state.
                self._copy = None

    def put_back(self, dataset: Any) -> bool:
        """Loads the first state. False: it cannot be had."""
        if self._state is None:
            return False
        dataset.load_state_dict(pickle.loads(self._state))
        return True

    def begin_again(self, objects: Objects) -> None:
        """Begins the epoch of an iterable dataset again, from the dataset's beginning.

        Raises:
            RuntimeError: If neither the first state nor a copy of the dataset can be had.
        """
        dataset = objects.torchs.dataset
        if not self.put_back(dataset):
            if self._copy is None:
                raise RuntimeError(
                    f"the {type(dataset).__name__} keeps the state that was loaded and begins this epoch "
                    "from it: samples would be lost. It has no state before its first epoch, and cannot be "
                    "copied: give it a state_dict() that works before iter(), or begin __iter__ anew once "
                    "its end was reached"
                )
            self._is_replaced = True
            objects.replace_dataset(self.dataset_of_epoch(objects.dataset))
        objects.begin_anew()

    def dataset_of_epoch(self, dataset: Any) -> Any:
        """Returns the dataset for an epoch: a copy of the one that was, if it keeps a loaded state."""
        return copy.deepcopy(self._copy) if self._is_replaced else dataset

    def is_kept(self, now: bytes | None) -> bool:
        """True if an epoch that gave its first batch has begun from the state that an epoch before loaded."""
        return now is not None and now == self.after_first and now != self._state


def _pickled(dataset: Any) -> bytes | None:
    try:
        # Twice: equal states are equal bytes, whatever objects in them are one.
        state = pickle.loads(pickle.dumps(dataset.state_dict(), pickle.HIGHEST_PROTOCOL))
        return None if state is None else pickle.dumps(state, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return None


class NotingFirst:
    """The fetcher of an epoch whose dataset has loaded a state: notes the state after the first batch.

    Args:
        fetcher: The fetcher.
        beginning: Keeps the state.
        objects: The dataset.
    """

    def __init__(self, fetcher: Fetcher, beginning: Beginning, objects: Objects) -> None:
        self._fetcher = fetcher
        self._objects: Objects | None = objects
        self._beginning = beginning

    def fetch(self, index: Any, /) -> Any:
        try:
            return self._fetcher.fetch(index)
        finally:
            if self._objects is not None:
                self._beginning.after_first = _pickled(self._objects.dataset)
                self._objects = None


class CheckingFirst:
    """The fetcher of the epoch after that: begins it again if the dataset began from the loaded state.

    Args:
        fetcher: The fetcher.
        beginning: Has the state after the first batch of the epoch before.
        objects: The dataset.
    """

    def __init__(self, fetcher: Fetcher, beginning: Beginning, objects: Objects) -> None:
        self._fetcher = fetcher
        self._objects: Objects | None = objects
        self._beginning = beginning

    def fetch(self, index: Any, /) -> Any:
        if self._objects is None:
            return self._fetcher.fetch(index)
        objects, self._objects = self._objects, None
        try:
            data = self._fetcher.fetch(index)
        except StopIteration:
            raise
        except Exception:
            if not self._is_kept(objects):
                raise
        else:
            if not self._is_kept(objects):
                return data
        self._beginning.begin_again(objects)
        objects.begin_batch()
        return self._fetcher.fetch(index)

    def _is_kept(self, objects: Objects) -> bool:
        is_kept = self._beginning.is_kept(_pickled(objects.dataset))
        self._beginning.after_first = None
        return is_kept
