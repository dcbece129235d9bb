"""The option that takes the states of a worker's dataset after its batches, and begins epochs from them.

Some datasets keep a loaded state in an attribute, and begin each epoch there (``Beginning``).
"""

from __future__ import annotations

import contextlib
import pickle
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import ringloader._native as _native
from ringloader._common.attributes import class_has_method
from ringloader._common.weak_registry import WeakRegistry
from ringloader._features.state.objects import Objects, Sent, SnapshotPolicy
from ringloader._features.state.positions import Part, Snapshot, has_state
from ringloader._worker.fetch import SampleFetcher
from ringloader._worker.options import EpochStart, Fetcher, Position, WorkerOption
from ringloader._worker.result import Result


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
        beginning = beginning_of(dataset) if self._policy.of_dataset and has_state(dataset) else None
        part = None if point is None else point.part
        if part is not None and part.snapshot is not None:
            self._states = part.snapshot.states()
        if "dataset" in self._states and part is not None and not part.is_at_end():
            _load(dataset, self._states["dataset"], "dataset", beginning)
        elif beginning is not None:
            beginning.begin()
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


def _load(thing: Any, state: Any, what: str, beginning: Beginning | None = None) -> None:
    if not has_state(thing):
        raise RuntimeError(
            f"load_state_dict(): the state has that of the {what}, and the {what} {thing!r:.80} has no "
            "state_dict and load_state_dict"
        )
    # torchdata's loader has the state None before its first batch: nothing to load.
    if state is None:
        return
    if beginning is None:
        thing.load_state_dict(state)
    else:
        beginning.load(thing, state)


# Stands for a missing attribute.
_NONE = object()


class _Held(NamedTuple):
    """An attribute that has a loaded state itself, or a container in it.

    Attributes:
        holder: Its object.
        name: Its name.
        before: The value before.
        state: The value that it got.
        pickled: The pickle of that value.
    """

    holder: weakref.ref[Any]
    name: str
    before: Any
    state: Any
    pickled: bytes | None


class Beginning:
    """The beginning of a dataset in this process, which no workers share.

    Some datasets keep a loaded state in an attribute and begin each ``__iter__`` from it, as the streams of
    Hugging Face do: an epoch from the beginning then sets the attribute back.
    """

    def __init__(self) -> None:
        self._held: list[_Held] = []

    def load(self, dataset: Any, state: Any) -> None:
        """Loads a state into the dataset, and records which attributes have it since."""
        self.begin()
        before = [(holder, dict(vars(holder))) for holder in _holders(dataset, set())]
        dataset.load_state_dict(state)
        containers = {id(container) for container in _containers(state)}
        for holder, had in before:
            for name, value in vars(holder).items():
                if id(value) in containers and had.get(name, _NONE) is not value:
                    # An object of a class without weak references is not set back.
                    with contextlib.suppress(TypeError):
                        reference = weakref.ref(holder)
                        old = had.get(name, _NONE)
                        self._held.append(_Held(reference, name, old, value, _pickled(value)))

    def begin(self) -> None:
        """Sets back the attributes that have the loaded state, unless they have changed: an epoch begins."""
        held, self._held = self._held, []
        for reference, name, before, state, pickled in held:
            holder = reference()
            if holder is None or vars(holder).get(name) is not state or _pickled(state) != pickled:
                continue
            if before is _NONE:
                del vars(holder)[name]
            else:
                vars(holder)[name] = before


# Loaders that have the same dataset share its beginning.
_beginnings: WeakRegistry[Beginning] = WeakRegistry()


def beginning_of(dataset: Any) -> Beginning:
    """Returns the beginning of a dataset in this process."""
    found = _beginnings.get(dataset)
    if found is None:
        found = Beginning()
        _beginnings.put(dataset, found)
    return found


def _pickled(state: Any) -> bytes | None:
    try:
        return pickle.dumps(state, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return None


def _containers(state: Any) -> Iterator[Any]:
    """Yields a state if it is a container, and the containers in it."""
    if type(state) in (dict, list, tuple):
        yield state
        for part in state.values() if type(state) is dict else state:
            yield from _containers(part)


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
