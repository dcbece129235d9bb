"""The states of a worker's dataset: taken after its batches, sent along with them, and given back.

With :class:`Snapshots` the result of a batch is a list: ``[batch, sent]``. The bytes say which worker it is,
how many batches it was asked for in this epoch, and its state, if one was due.
"""

from __future__ import annotations

import pickle
import secrets
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import ringloader._native as _native
from ringloader._options import seeding
from ringloader._state.parts import Part, Snapshot, has_state
from ringloader._worker.options import CountsSamples, Failing, Fetcher, InFront, WorkerOption

# Before the bytes of the results of this process's workers: no batch of a program's own begins so.
_MARK = secrets.token_bytes(16)
_HEADER = struct.Struct("<16sIQQB")
_HAS_STATE, _IS_ENDED, _OUTLIVES, _HAS_FAILED = 1, 2, 4, 8


class Sent(NamedTuple):
    """The bytes behind a batch.

    Attributes:
        worker: The worker.
        asked: Batches that it was asked for in this epoch.
        outlives: As of a :class:`~ringloader._state.parts.Part`.
        snapshot: The state behind the batch, if one was due.
    """

    worker: int
    asked: int
    outlives: bool
    snapshot: Snapshot | None


def is_sent(found: Any) -> bool:
    """True for the result of a batch that :class:`Snapshots` has made."""
    return type(found) is list and len(found) == 2 and type(found[1]) is bytes and found[1].startswith(_MARK)


def read(sent: bytes) -> Sent:
    """Reads the bytes behind a batch."""
    _, worker, asked, samples, flags = _HEADER.unpack_from(sent)
    outlives = bool(flags & _OUTLIVES)
    if not flags & _HAS_STATE:
        return Sent(worker, asked, outlives, None)
    rest = sent[_HEADER.size :]
    failure = rest.decode() if flags & _HAS_FAILED else None
    return Sent(worker, asked, outlives, Snapshot(rest, bool(flags & _IS_ENDED), samples, failure))


def through(transform: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns ``transform`` for the results of workers that send states, or none."""

    def transformed(found: Any) -> Any:
        return [transform(found[0]), found[1]] if is_sent(found) else transform(found)

    return transformed


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


class Start(NamedTuple):
    """The beginning of a worker's epoch.

    Attributes:
        part: The position that it goes on from; None: its beginning.
        asked: Batches that its predecessor was asked for in this epoch.
        first: The worker that gets the first task.
        size: The samples of a batch that is read again; None for the loader's own.
    """

    part: Part | None = None
    asked: int = 0
    first: int = 0
    size: int | None = None


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
        self.flags = _OUTLIVES if self._has_dataset or (own is dataset and self._has_iterator) else 0

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
            return 0, self.flags | _HAS_STATE | _HAS_FAILED, text.encode(errors="backslashreplace")
        is_ended = getattr(self.torchs, "ended", False)
        flags = self.flags | _HAS_STATE | (_IS_ENDED if is_ended else 0)
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


class Snapshots(WorkerOption):
    """Takes the states of a worker's dataset, and begins epochs from them.

    Args:
        rule: When a state is taken.
        is_here: True without workers: nothing is sent, and the state is taken when it is asked for.
    """

    def __init__(self, rule: Rule, is_here: bool) -> None:
        self._rule = rule
        self._is_here = is_here
        self._mark = _MARK
        # By worker: where the epoch begins.
        self.starts: dict[int, Start] = {}
        # Without workers: the fetcher that knows the state.
        self.here: Asked | None = None
        self._worker = 0
        self._start = Start()
        # While an epoch begins: its dataset, torch's fetcher of it, and the states that they get.
        self._dataset: Any = None
        self._torchs: Any = None
        self._states: dict[str, Any] = {}

    def join(self, worker: int, port: _native.Port | None) -> None:  # noqa: ARG002
        self._worker = worker

    def begin_at(self, start: Start) -> None:
        self.starts = {self._worker: start}

    def miss(self) -> None:
        self.starts.pop(self._worker, None)

    def begin(self, dataset: Any) -> Any:
        self._start = self.starts.pop(self._worker, Start())
        self._dataset = dataset
        part = self._start.part
        self._states = {}
        if part is not None and part.snapshot is not None:
            self._states = part.snapshot.states()
            # Else the dataset may be ready for the next epoch: it gets this state when that begins.
            if not part.is_at_end() and "dataset" in self._states:
                _load(dataset, self._states["dataset"], "dataset")
        return dataset

    def meet(self, fetcher: Any) -> None:
        self._torchs = fetcher

    def wrap(self, fetcher: Fetcher) -> Fetcher:
        try:
            return self._wrapped(fetcher)
        finally:
            # The dataset's iterator goes with its fetcher, and not with the option.
            self._torchs = self._dataset = None
            self._states = {}

    def _wrapped(self, fetcher: Fetcher) -> Fetcher:
        objects = Objects(self._dataset, self._torchs, fetcher, self._rule)
        part = self._start.part
        if part is not None and self._rule.is_iterable:
            fetcher = self._resumed(part, objects)
        if self._rule.every is None or not objects.have_state:
            return fetcher
        if self._is_here:
            self.here = Asked(fetcher, objects)
            return self.here
        return _Sending(fetcher, objects, self._rule, self._mark, self._worker, self._start)

    def _resumed(self, part: Part, objects: Objects) -> Fetcher:
        """Brings the iterator to where the epoch goes on. MIRRORS torchdata worker.py::_worker_loop."""
        torchs, snapshot = self._torchs, part.snapshot
        if part.is_at_end():
            torchs.ended = True
            return objects.fetcher
        was_ended = snapshot is not None and snapshot.is_ended
        if "iterator" in self._states and part.ends >= 0:
            _load(torchs.dataset_iter, self._states["iterator"], "iterator")
            if was_ended:
                objects.begin_anew()
        if snapshot is not None and part.ends == 0:
            objects.count_from(snapshot.samples)
        reading = _Reading(objects, part, self._index(), self._worker)
        if not reading.is_needed():
            return objects.fetcher
        if objects.are_seeded:
            # The key of the generators comes with the first task.
            return _Later(objects, reading)
        if self._is_here:
            # What was drawn for these batches was drawn before.
            generators = seeding.Global()
            states = generators.states()
            try:
                reading.read()
            finally:
                generators.put_back(states)
        else:
            reading.read()
        return objects.fetcher

    def _index(self) -> Any:
        if self._rule.size is None:
            return None
        return [None] * (self._rule.size if self._start.size is None else self._start.size)


class _Reading:
    """The batches that are read again, between the state of a worker and where its epoch goes on.

    Args:
        objects: The fetcher, and what it reads.
        part: The position.
        index: The index of a batch.
        worker: The worker.
    """

    def __init__(self, objects: Objects, part: Part, index: Any, worker: int) -> None:
        self._objects = objects
        self._index = index
        self._worker = worker
        was_ended = part.snapshot is not None and part.snapshot.is_ended
        # Batches in the epoch of the state, epochs that are read to their end, and batches in this epoch.
        self._first = part.since if part.ends == 0 or (part.ends > 0 and not was_ended) else 0
        self._epochs = max(0, part.ends - was_ended)
        self._last = part.batches if part.ends else 0
        if part.ends > 0 and was_ended:
            objects.fetcher = _Again(objects)

    def is_needed(self) -> bool:
        """True if there are any."""
        return bool(self._first or self._epochs or self._last)

    def read(self) -> None:
        """Reads them, and drops them.

        Raises:
            ValueError: If there are fewer.
        """
        self._pass_over(self._first)
        for _ in range(self._epochs):
            while self._objects.dropped(self._index):
                pass
            self._objects.begin_anew()
        self._pass_over(self._last)

    def _pass_over(self, batches: int) -> None:
        for number in range(batches):
            if not self._objects.dropped(self._index):
                raise ValueError(
                    f"load_state_dict(): the dataset of worker {self._worker} has ended after {number} of "
                    f"the {batches} batches that are read again: it is another one than that of the state"
                )


class _Later:
    """Reads batches again when the first task has come.

    Args:
        objects: The fetcher, and what it reads.
        reading: The batches.
    """

    def __init__(self, objects: Objects, reading: _Reading) -> None:
        self._objects = objects
        self._reading: _Reading | None = reading
        self._fetcher = objects.fetcher

    def fetch(self, index: Any, /) -> Any:
        reading, self._reading = self._reading, None
        if reading is not None:
            try:
                reading.read()
            except Exception as error:
                self._fetcher = Failing(error, once=True)
            self._objects.begin_batch()
        return self._fetcher.fetch(index)


class _Again:
    """The fetcher of an epoch whose dataset was given its state at the end of the epoch before.

    Some datasets then have nothing to give once, and after that all. Others are ready for the next epoch.

    Args:
        objects: The fetcher, and what it reads.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._fetcher = objects.fetcher
        self._is_first = True

    def fetch(self, index: Any, /) -> Any:
        is_first, self._is_first = self._is_first, False
        try:
            return self._fetcher.fetch(index)
        except StopIteration:
            if not is_first:
                raise
        self._objects.begin_anew()
        self._objects.begin_batch()
        return self._fetcher.fetch(index)


class _Sending:
    """Sends states along with batches.

    Args:
        fetcher: The fetcher that makes the batches.
        objects: Have the state.
        rule: When a state is due.
        mark: Begins the bytes.
        worker: The worker.
        start: Where its epoch begins.
    """

    def __init__(
        self, fetcher: Fetcher, objects: Objects, rule: Rule, mark: bytes, worker: int, start: Start
    ) -> None:
        self._fetcher = fetcher
        self._objects = objects
        self._mark = mark
        self._worker = worker
        self._asked = start.asked
        every = rule.every or 1
        # Of an iterable dataset the worker itself reads again what came since.
        self._by_step = not rule.is_iterable and rule.in_order and every > 1
        self._every = every if self._by_step else max(1, every // rule.workers) if rule.is_iterable else 1
        self._workers = rule.workers
        self._turn = (worker - start.first) % rule.workers
        self._since = 0

    def fetch(self, index: Any, /) -> Any:
        self._asked += 1
        self._since += 1
        data = self._fetcher.fetch(index)
        samples, flags, state = self._objects.snapshot() if self._is_due() else (0, self._objects.flags, b"")
        return [data, _HEADER.pack(self._mark, self._worker, self._asked, samples, flags) + state]

    def _is_due(self) -> bool:
        if self._by_step:
            # The last batch of this worker before a step at which states are taken.
            step = (self._asked - 1) * self._workers + self._turn
            return (step + self._workers) // self._every > step // self._every
        if self._since < self._every:
            return False
        self._since = 0
        return True


class Asked:
    """The fetcher of a loader without workers, which has the state when it is asked for.

    Args:
        fetcher: The fetcher that makes the batches.
        objects: Have the state.
    """

    def __init__(self, fetcher: Fetcher, objects: Objects) -> None:
        self._fetcher = fetcher
        self._objects = objects
        self._asked = 0
        self._is_in_batch = False
        # Called when the fetcher goes.
        self.leave: Callable[[Asked], None] | None = None

    def fetch(self, index: Any, /) -> Any:
        self._asked += 1
        # Left so by an error.
        self._is_in_batch = True
        data = self._fetcher.fetch(index)
        self._is_in_batch = False
        return data

    def is_behind(self, passed: int) -> bool:
        """True if the state is now the one behind so many batches, and not in the midst of one or further."""
        return not self._is_in_batch and passed == self._asked

    def taken(self, passed: int, at_end: bool = False) -> Sent:
        """Takes the state as it is now, behind so many batches."""
        samples, flags, pickled = self._objects.snapshot()
        flags |= _IS_ENDED if at_end else 0
        return read(_HEADER.pack(_MARK, 0, passed, samples, flags) + pickled)

    def __del__(self) -> None:
        if self.leave is not None and not sys.is_finalizing():
            self.leave(self)


def _load(thing: Any, state: Any, what: str) -> None:
    if not has_state(thing):
        raise RuntimeError(
            f"load_state_dict(): the state has that of the {what}, and the {what} {thing!r:.80} has no "
            "state_dict and load_state_dict"
        )
    # As torchdata's loader: a state of None is that of an object which has none yet.
    if state is not None:
        thing.load_state_dict(state)


def _nothing(_data: Any) -> None:
    return None
