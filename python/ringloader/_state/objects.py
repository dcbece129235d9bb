"""The dataset of a worker's epoch, its iterator and fetcher: their state, and batches that are dropped.

With the option ``Snapshots`` a batch comes with a snapshot (``_worker/result.py``): which worker made it, how
many batches that was asked for in this epoch, and its state, if one was due.
"""

from __future__ import annotations

import pickle
import struct
import traceback
from typing import Any, NamedTuple, Protocol

from ringloader._common.looking import is_of
from ringloader._state.parts import Part, Snapshot, has_state
from ringloader._worker.options import CountsSamples, Fetcher, InFront

_HEADER = struct.Struct("<IQQB")
_HAS_STATE, _IS_ENDED, _OUTLIVES, _HAS_FAILED = 1, 2, 4, 8


class Rule(NamedTuple):
    """The times at which states are taken, and the objects whose states they are.

    Attributes:
        every: Steps of the loader from one state to the next; None: no states.
        workers: The number of workers; 0 for none.
        is_iterable: True for a dataset that each worker reads by itself.
        of_dataset: False if workers share the dataset, whose state is then no worker's.
        batches: True if an iterator is asked for batches, and not for samples.
        is_here: True if the dataset is the one of the main process.
    """

    every: int | None
    workers: int
    is_iterable: bool
    of_dataset: bool
    batches: bool
    is_here: bool


class Sent(NamedTuple):
    """The bytes that a worker sends with a batch.

    Attributes:
        worker: The worker.
        asked: Batches that it was asked for in this epoch.
        outlives: As of a :class:`~ringloader._state.parts.Part`.
        snapshot: The state after the batch, if one was due.
    """

    worker: int
    asked: int
    outlives: bool
    snapshot: Snapshot | None


def read_sent(sent: bytes) -> Sent:
    """Reads the bytes that came with a batch."""
    worker, asked, samples, flags = _HEADER.unpack_from(sent)
    outlives = bool(flags & _OUTLIVES)
    if not flags & _HAS_STATE:
        return Sent(worker, asked, outlives, None)
    rest = sent[_HEADER.size :]
    failure = rest.decode() if flags & _HAS_FAILED else None
    return Sent(worker, asked, outlives, Snapshot(rest, bool(flags & _IS_ENDED), samples, failure))


class BeginsEpochs(Protocol):
    """Begins a dataset's epochs at its beginning. ``_state/beginning.py`` implements it."""

    def begin(self, dataset: Any) -> None:
        """Records that an epoch of the dataset begins."""

    def fetch_first(self, objects: Objects, index: Any) -> Any:
        """Returns the first batch of an epoch."""


class Objects:
    """The dataset of a worker's epoch, its iterator and fetcher, and which of them have a state.

    Args:
        dataset: The dataset.
        torchs: torch's fetcher.
        fetcher: The fetcher that options have made of it.
        rule: The rule.
        beginning: The beginning of the dataset's epochs; None for a dataset that workers share.
    """

    def __init__(
        self, dataset: Any, torchs: Any, fetcher: Any, rule: Rule, beginning: BeginsEpochs | None
    ) -> None:
        self.dataset = dataset
        self.torchs = torchs
        self.fetcher: Fetcher = fetcher
        self._counting = fetcher
        self._rule = rule
        iterator = getattr(torchs, "dataset_iter", None) if rule.is_iterable else None
        # An option may stand in front of the dataset's own.
        own = iterator._behind if is_of(iterator, InFront) else iterator
        self._has_iterator = has_state(own)
        # True if the iterator is the dataset itself, and has its state.
        self.is_own_iterator = own is dataset and self._has_iterator
        self._has_dataset = rule.of_dataset and own is not dataset and has_state(dataset)
        # True if the next epoch finds an object that has the state.
        self._outlives = self._has_dataset or self.is_own_iterator
        self._beginning = beginning
        # True until the first batch of an epoch is asked for.
        self._is_at_beginning = True
        # True until the first batch, if the dataset was given its state at the end of the epoch before. Some
        # datasets then have nothing to give once, and after that all. Others are ready for the next epoch.
        self.may_have_ended = False

    @property
    def have_state(self) -> bool:
        """True if there is a state to take."""
        return self._has_dataset or self._has_iterator

    def sent(self, worker: int, asked: int, is_due: bool = True, at_end: bool = False) -> bytes:
        """Returns the bytes to send with a batch.

        Args:
            worker: The worker.
            asked: Batches that it was asked for.
            is_due: True if they have the state.
            at_end: True if the iterator is at its end, whether the fetcher knows it or not.
        """
        flags = _OUTLIVES if self._outlives else 0
        samples, state = 0, b""
        if is_due:
            flags |= _HAS_STATE
            try:
                state = self._pickled()
                samples = max((counter.samples_asked for counter in self._counters()), default=0)
                if at_end or getattr(self.torchs, "ended", False):
                    flags |= _IS_ENDED
            except Exception as error:
                # Of the program that asks for the state, and not of one that only reads batches.
                text = f"the state of the dataset cannot be had: {error}\nOriginal {traceback.format_exc()}"
                flags, state = flags | _HAS_FAILED, text.encode(errors="backslashreplace")
        return _HEADER.pack(worker, asked, samples, flags) + state

    def _pickled(self) -> bytes:
        found = {}
        if self._has_dataset:
            found["dataset"] = self.dataset.state_dict()
        if self._has_iterator:
            found["iterator"] = self.torchs.dataset_iter.state_dict()
        return pickle.dumps(found, pickle.HIGHEST_PROTOCOL)

    def replace_dataset(self, dataset: Any) -> None:
        """Puts another dataset in the place of this one, for the next iterator."""
        self.dataset = dataset
        front = self.torchs.dataset
        if is_of(front, InFront):
            front._behind = dataset
        else:
            self.torchs.dataset = dataset

    def begin_anew(self) -> None:
        """Begins another epoch of an iterable dataset, with the same fetcher."""
        if self._beginning is not None:
            self._beginning.begin(self.dataset)
        self._is_at_beginning = True
        self.torchs.dataset_iter = iter(self.torchs.dataset)
        self.torchs.ended = False
        self.count_from(0)

    def begin_again(self) -> None:
        """Begins an epoch again whose first batch was read from elsewhere."""
        self.begin_anew()
        self.begin_batch()
        self._is_at_beginning = False

    def fetch(self, index: Any, /) -> Any:
        """Returns the next batch: the first one of an epoch from the dataset's beginning."""
        if self.may_have_ended:
            self.may_have_ended = False
            try:
                return self.fetch(index)
            except StopIteration:
                # The dataset may keep that state, and begin each epoch there: the first batch tells.
                self.begin_anew()
                self.begin_batch()
        if not self._is_at_beginning or self._beginning is None:
            return self.fetcher.fetch(index)
        self._is_at_beginning = False
        return self._beginning.fetch_first(self, index)

    def count_from(self, samples: int) -> None:
        """Sets the count of samples, for options that count them."""
        for counter in self._counters():
            counter.samples_asked = samples

    def _counters(self) -> list[Any]:
        """The objects of options that count the samples that the iterator is asked for."""
        if not self._rule.is_iterable:
            return []
        found = (self.torchs.dataset_iter, self._counting)
        return [one for one in found if is_of(one, CountsSamples)]

    def _dropped(self, index: Any) -> bool:
        """Reads a batch and drops it. False: there is none."""
        torchs = self.torchs
        self.begin_batch()
        collate, torchs.collate_fn = torchs.collate_fn, _nothing
        try:
            self.fetch(index)
        except StopIteration:
            return False
        except Exception:
            # The caller got this error before, in its turn.
            pass
        finally:
            torchs.collate_fn = collate
        return True

    def begin_batch(self) -> None:
        """Sets generators for a batch that is read out of turn."""
        if self.are_seeded:
            self.torchs.dataset_iter.begin_batch()

    @property
    def are_seeded(self) -> bool:
        """True if an option sets generators before samples or batches, by their number."""
        return is_of(self.torchs.dataset_iter, InFront)

    def read_again(self, part: Part, size: int, worker: int) -> None:
        """Reads and drops the batches between the state of a worker and where its epoch goes on.

        Args:
            part: The position.
            size: The samples of a batch.
            worker: The worker.

        Raises:
            ValueError: If there are fewer.
        """
        index = [None] * size if self._rule.batches else None
        first, epochs, last = part.read_again()
        self._pass_over(first, index, worker)
        for _ in range(epochs):
            while self._dropped(index):
                pass
            self.begin_anew()
        self._pass_over(last, index, worker)

    def _pass_over(self, batches: int, index: Any, worker: int) -> None:
        for number in range(batches):
            if not self._dropped(index):
                raise ValueError(
                    f"load_state_dict(): the dataset of worker {worker} has ended after {number} of "
                    f"the {batches} batches that are read again: it is another one than that of the state"
                )


def _nothing(_data: Any) -> None:
    return None
