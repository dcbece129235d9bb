"""The option that takes the states of a worker's dataset after its batches, and begins epochs from them.

With it a batch comes with a snapshot (``_worker/fetch.py``), if one was due: which worker made it, how many
batches that was asked for in this epoch, and its state.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple

import ringloader._native as _native
from ringloader._common.attributes import class_has_method
from ringloader._common.weak_registry import WeakRegistry
from ringloader._features.seeding import generators
from ringloader._features.state.saved import Part, Snapshot, has_state
from ringloader._worker.fetch import Result, SampleFetcher
from ringloader._worker.options import EpochStart, Failing, Fetcher, Position, WorkerOption

# The attribute in which a stream of Hugging Face's has a loaded state. It begins each epoch from there.
_KEPT = "_starting_state_dict"
# By dataset in this process, which no workers share: True if it got a state, and has had no epoch since.
_has_loaded: WeakRegistry[bool] = WeakRegistry()


class SnapshotPolicy(NamedTuple):
    """The times at which states are taken, and the objects whose states they are.

    Attributes:
        every: Steps of the loader from one state to the next; None: no states.
        workers: The number of workers; 0 for none.
        is_iterable: True for a dataset that each worker reads by itself.
        of_dataset: False if workers share the dataset, whose state is then no worker's.
    """

    every: int | None
    workers: int
    is_iterable: bool
    of_dataset: bool


class Sent(NamedTuple):
    """The state that a worker sends with a batch.

    Attributes:
        worker: The worker.
        asked: Batches that it was asked for in this epoch.
        snapshot: The state after the batch.
    """

    worker: int
    asked: int
    snapshot: Snapshot


def read_sent(sent: bytes) -> Sent:
    """Reads the bytes that came with a batch."""
    worker, asked, snapshot = pickle.loads(sent)
    return Sent(worker, asked, Snapshot(*snapshot))


class Objects:
    """The dataset of a worker's epoch, its iterator and fetcher, and which of them have a state.

    Args:
        dataset: The dataset.
        samples: The slots of the fetcher, and torch's own.
        fetcher: The fetcher that options have made of it.
        policy: When states are taken, and of what.
    """

    def __init__(
        self, dataset: Any, samples: SampleFetcher, fetcher: Fetcher, policy: SnapshotPolicy
    ) -> None:
        self.dataset = dataset
        self.torchs = samples.torchs
        self._turn = samples.turn
        self._fetcher = fetcher
        self._policy = policy
        iterator = getattr(self.torchs, "dataset_iter", None) if policy.is_iterable else None
        self._has_iterator = has_state(iterator)
        self._has_dataset = policy.of_dataset and iterator is not dataset and has_state(dataset)
        # Batches that are passed over before the first one, of how many samples, in which worker.
        self._to_pass = self._size = self._worker = 0

    @property
    def have_state(self) -> bool:
        """True if there is a state to take."""
        return self._has_dataset or self._has_iterator

    def sent(self, worker: int, asked: int) -> bytes:
        """Returns the bytes to send with a batch. ``asked``: batches that the worker was asked for."""
        return pickle.dumps((worker, asked, self.snapshot()), pickle.HIGHEST_PROTOCOL)

    def snapshot(self) -> tuple[bytes, bool, int]:
        """Returns the fields of a :class:`Snapshot` of now."""
        found = {}
        if self._has_dataset:
            found["dataset"] = self.dataset.state_dict()
        if self._has_iterator:
            found["iterator"] = self.torchs.dataset_iter.state_dict()
        samples = self._turn.number if self._policy.is_iterable else 0
        is_ended = bool(getattr(self.torchs, "ended", False))
        return pickle.dumps(found, pickle.HIGHEST_PROTOCOL), is_ended, samples

    def pass_over(self, batches: int, size: int, worker: int) -> Fetcher:
        """Returns a fetcher that first reads and drops batches.

        It does so when the first task has come, as the key of seeded generators comes with that.

        Args:
            batches: The number of batches.
            size: The samples of a batch.
            worker: The worker.
        """
        self._to_pass, self._size, self._worker = batches, size, worker
        return self

    def fetch(self, index: Any, /) -> Any:
        """Returns the next batch."""
        if self._to_pass:
            try:
                # Without workers, what was drawn for these batches was drawn before.
                with contextlib.nullcontext() if self._policy.workers else generators.put_back():
                    self._drop()
            except ValueError as error:
                self._fetcher = Failing(error, once=True)
            self._to_pass = 0
        return self._fetcher.fetch(index)

    def _drop(self) -> None:
        """Reads and drops the batches between the state of the worker and the point where its epoch resumes.

        Raises:
            ValueError: If there are fewer.
        """
        torchs = self.torchs
        index = [None] * self._size if torchs.auto_collation else None
        collate, torchs.collate_fn = torchs.collate_fn, lambda _samples: None
        try:
            for number in range(self._to_pass):
                try:
                    self._fetcher.fetch(index)
                except StopIteration:
                    raise ValueError(
                        f"load_state_dict(): the dataset of worker {self._worker} has ended after {number} "
                        f"of the {self._to_pass} batches that are read again: it is not the dataset "
                        "of the state"
                    ) from None
                except Exception:
                    # The caller got this error before, in its turn.
                    pass
        finally:
            torchs.collate_fn = collate


class ResumePoint(NamedTuple):
    """The point from which a worker continues in an epoch that was resumed, or in place of a lost worker.

    Attributes:
        part: The position; without a state and with no batches, the beginning.
        asked: Batches that its predecessor was asked for in this epoch.
        size: The samples of a batch that is read again.
    """

    part: Part
    asked: int = 0
    size: int = 1


class Snapshots(WorkerOption):
    """Takes the states of a worker's dataset, and begins epochs from them.

    Args:
        policy: When a state is taken. Without workers nothing is sent: it is taken when it is asked for.
    """

    position = Position.SNAPSHOT

    def __init__(self, policy: SnapshotPolicy) -> None:
        self._policy = policy
        # Without workers: the fetcher that has the state, until the epoch ends. So the dataset's iterator
        # lives on in an epoch that is broken off, whose state may be asked for.
        self.here: Asked | None = None
        self._worker = 0
        self._point: ResumePoint | None = None
        # While an epoch begins: its dataset, the slots of its fetcher, and the states that they get.
        self._dataset: Any = None
        self._samples: Any = None
        self._states: dict[str, Any] = {}

    def join(self, worker: int, port: _native.Port | None, start: EpochStart) -> None:  # noqa: ARG002
        self._worker = worker

    def begin(self, dataset: Any, start: EpochStart) -> Any:
        self._point = point = start.position
        self._dataset, self._states = dataset, {}
        part = None if point is None else point.part
        if part is not None and part.snapshot is not None:
            self._states = part.snapshot.states()
        if "dataset" in self._states and part is not None and not part.is_at_end():
            _load(dataset, self._states["dataset"], "dataset")
            _has_loaded.put(dataset, True)
        elif _has_loaded.pop(dataset):
            _forget_loaded(dataset)
        return dataset

    def fill(self, samples: SampleFetcher) -> None:
        self._samples = samples

    def wrap(self, fetcher: Fetcher) -> Fetcher:
        try:
            return self._wrapped(fetcher)
        finally:
            # The dataset's iterator goes with its fetcher, and not with the option.
            self._samples = self._dataset = None
            self._states = {}

    def _wrapped(self, fetcher: Fetcher) -> Fetcher:
        policy, point = self._policy, self._point
        objects = Objects(self._dataset, self._samples, fetcher, policy)
        if policy.is_iterable and point is not None:
            fetcher = self._resumed(point, objects, fetcher)
        if policy.every is None or not objects.have_state:
            return fetcher
        if not policy.workers:
            self.here = Asked(fetcher, objects)
            return self.here
        return _Sending(fetcher, objects, policy, self._worker, 0 if point is None else point.asked)

    def _resumed(self, point: ResumePoint, objects: Objects, fetcher: Fetcher) -> Fetcher:
        """Brings the iterator to where the epoch resumes. MIRRORS torchdata worker.py::_worker_loop."""
        part = point.part
        if part.is_at_end():
            # The dataset may be ready for the next epoch.
            self._samples.torchs.ended = True
            return fetcher
        if "iterator" in self._states:
            _load(self._samples.torchs.dataset_iter, self._states["iterator"], "iterator")
        if part.snapshot is not None:
            self._samples.turn.number = part.snapshot.samples
        return objects.pass_over(part.since, point.size, self._worker) if part.since else fetcher


class _Sending:
    """Sends states along with batches.

    Args:
        fetcher: The fetcher that makes the batches.
        objects: Have the state.
        policy: When a state is due.
        worker: The worker.
        asked: Batches that its predecessor was asked for in this epoch.
    """

    def __init__(
        self, fetcher: Fetcher, objects: Objects, policy: SnapshotPolicy, worker: int, asked: int
    ) -> None:
        self._fetcher = fetcher
        self._objects = objects
        self._worker = worker
        self._asked = asked
        # Batches of an iterable dataset that came since a state are read again by the worker.
        self._every = max(1, (policy.every or 1) // policy.workers) if policy.is_iterable else 1

    def fetch(self, index: Any, /) -> Any:
        self._asked += 1
        data = self._fetcher.fetch(index)
        if self._asked % self._every:
            return data
        snapshot = self._objects.sent(self._worker, self._asked)
        return data._replace(snapshot=snapshot) if type(data) is Result else Result(data, snapshot=snapshot)


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

    def fetch(self, index: Any, /) -> Any:
        self._asked += 1
        # Left so by an error.
        self._is_in_batch = True
        data = self._fetcher.fetch(index)
        self._is_in_batch = False
        return data

    def is_after(self, passed: int) -> bool:
        """True if the dataset has made exactly this number of batches, and is not in the midst of one."""
        return not self._is_in_batch and passed == self._asked

    def taken(self, passed: int) -> Sent:
        """Takes the present state, which is the one after this number of batches."""
        return Sent(0, passed, Snapshot(*self._objects.snapshot()))


def _load(thing: Any, state: Any, what: str) -> None:
    if not has_state(thing):
        raise RuntimeError(
            f"load_state_dict(): the state has that of the {what}, and the {what} {thing!r:.80} has no "
            "state_dict and load_state_dict"
        )
    # torchdata's loader has the state None before its first batch: nothing to load.
    if state is not None:
        thing.load_state_dict(state)


def _forget_loaded(dataset: Any) -> None:
    """Makes the streams of Hugging Face in a dataset begin at their beginning."""
    for one in _holders(dataset, set()):
        if vars(one).get(_KEPT) is not None:
            setattr(one, _KEPT, None)


def _holders(thing: Any, seen: set[int]) -> Iterator[Any]:
    """Yields a dataset, and the objects with a state in it, to which it hands parts of its state over."""
    if id(thing) in seen or not hasattr(thing, "__dict__"):
        return
    seen.add(id(thing))
    yield thing
    for value in list(vars(thing).values()):
        parts = value if type(value) in (list, tuple) else value.values() if type(value) is dict else (value,)
        for part in parts:
            if not isinstance(part, type) and class_has_method(part, "load_state_dict"):
                yield from _holders(part, seen)
