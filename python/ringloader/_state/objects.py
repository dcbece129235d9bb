"""The dataset of a worker's epoch, its iterator and fetcher: their state, and batches that are dropped."""

from __future__ import annotations

import pickle
import traceback
from typing import Any, NamedTuple

from ringloader._state import sent
from ringloader._state.parts import has_state
from ringloader._worker.options import CountsSamples, Fetcher, InFront


class Rule(NamedTuple):
    """The rule by which states are taken.

    Attributes:
        every: Steps of the loader from one state to the next; None: no states.
        workers: The number of workers; 0 for none.
        is_iterable: True for a dataset that each worker reads by itself.
        in_order: True if batches are handed out in turn.
        of_dataset: False if workers share the dataset, whose state is then no worker's.
        size: The samples of a batch that is read again; None without batches.
    """

    every: int | None
    workers: int
    is_iterable: bool
    in_order: bool
    of_dataset: bool
    size: int | None


class Objects:
    """The dataset of a worker's epoch, its iterator and fetcher, and which of them have a state.

    Args:
        dataset: The dataset.
        torchs: torch's fetcher.
        fetcher: The fetcher that options have made of it.
        rule: The rule.
    """

    def __init__(self, dataset: Any, torchs: Any, fetcher: Any, rule: Rule) -> None:
        self.dataset = dataset
        self.torchs = torchs
        self.fetcher: Fetcher = fetcher
        self._counting = fetcher
        self._is_iterable = rule.is_iterable
        iterator = getattr(torchs, "dataset_iter", None) if rule.is_iterable else None
        # An option may stand in front of the dataset's own.
        own = iterator._behind if isinstance(iterator, InFront) else iterator
        self._has_iterator = has_state(own)
        self._has_dataset = rule.of_dataset and own is not dataset and has_state(dataset)
        # The flags of a batch without a state.
        self.flags = sent.OUTLIVES if self._has_dataset or (own is dataset and self._has_iterator) else 0

    @property
    def have_state(self) -> bool:
        """True if there is a state to take."""
        return self._has_dataset or self._has_iterator

    def snapshot(self) -> tuple[int, int, bytes]:
        """Takes the state: the samples that were asked for, flags, and bytes."""
        try:
            found = {}
            if self._has_dataset:
                found["dataset"] = self.dataset.state_dict()
            if self._has_iterator:
                found["iterator"] = self.torchs.dataset_iter.state_dict()
            pickled = pickle.dumps(found, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            # Of the program that asks for the state, and not of one that only reads batches.
            text = f"the state of the dataset cannot be had: {error}\nOriginal {traceback.format_exc()}"
            return 0, self.flags | sent.HAS_STATE | sent.HAS_FAILED, text.encode(errors="backslashreplace")
        is_ended = getattr(self.torchs, "ended", False)
        flags = self.flags | sent.HAS_STATE | (sent.IS_ENDED if is_ended else 0)
        return max((counter.samples_asked for counter in self._counters()), default=0), flags, pickled

    def begin_anew(self) -> None:
        """Begins another epoch of an iterable dataset, with the same fetcher."""
        self.torchs.dataset_iter = iter(self.torchs.dataset)
        self.torchs.ended = False
        self.count_from(0)

    def count_from(self, samples: int) -> None:
        """Has options that count samples go on from a number."""
        for counter in self._counters():
            counter.samples_asked = samples

    def _counters(self) -> list[Any]:
        """The objects of options that count the samples that the iterator is asked for."""
        if not self._is_iterable:
            return []
        found = (self.torchs.dataset_iter, self._counting)
        return [one for one in found if isinstance(one, CountsSamples)]

    def dropped(self, index: Any) -> bool:
        """Reads a batch and drops it. False: there is none."""
        torchs = self.torchs
        self.begin_batch()
        collate, torchs.collate_fn = torchs.collate_fn, _nothing
        try:
            self.fetcher.fetch(index)
        except StopIteration:
            return False
        except Exception:
            # It was raised before, in its turn.
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
        return isinstance(self.torchs.dataset_iter, InFront)


def _nothing(_data: Any) -> None:
    return None
