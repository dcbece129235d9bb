"""The option that takes the states of a worker's dataset after its batches, and begins epochs from them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import ringloader._native as _native
from ringloader._options import generators
from ringloader._state.beginning import Beginning, beginning_of
from ringloader._state.objects import Objects, Rule, Sent, read_sent
from ringloader._state.parts import Part, has_state
from ringloader._worker.options import EpochStart, Failing, Fetcher, Position, WorkerOption
from ringloader._worker.result import with_snapshot


class Start(NamedTuple):
    """The beginning of a worker's epoch.

    Attributes:
        part: The position that it goes on from; None: its beginning.
        asked: Batches that its predecessor was asked for in this epoch.
        first: The worker that gets the first task.
        size: The samples of a batch that is read again.
    """

    part: Part | None = None
    asked: int = 0
    first: int = 0
    size: int = 1


class Snapshots(WorkerOption):
    """Takes the states of a worker's dataset, and begins epochs from them.

    Args:
        rule: When a state is taken. Without workers nothing is sent: it is taken when it is asked for.
    """

    position = Position.SNAPSHOT

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        # Without workers: the fetcher that knows the state.
        self.here: Asked | None = None
        self._worker = 0
        self._start = Start()
        # While an epoch begins: its dataset, torch's fetcher of it, and the states that they get.
        self._dataset: Any = None
        self._beginning: Beginning | None = None
        self._torchs: Any = None
        self._states: dict[str, Any] = {}

    def join(self, worker: int, port: _native.Port | None) -> None:  # noqa: ARG002
        self._worker = worker

    def begin(self, dataset: Any, start: EpochStart) -> Any:
        self._start = Start() if start.position is None else start.position
        part = self._start.part
        beginning = beginning_of(dataset) if self._rule.of_dataset else None
        while beginning is not None and beginning.replacement is not None:
            dataset = beginning.replacement
            beginning = beginning_of(dataset)
        self._dataset, self._beginning = dataset, beginning
        self._states = {}
        if part is not None and part.snapshot is not None:
            self._states = part.snapshot.states()
            # A dataset that has ended may be ready for the next epoch: it gets this state when that begins.
            if not part.is_at_end() and "dataset" in self._states:
                _load(dataset, self._states["dataset"], "dataset", beginning)
        elif part is not None and beginning is not None:
            # The batches that are passed over come from the dataset's beginning.
            beginning.go_back(dataset)
        if beginning is not None and (part is None or not part.is_at_end()):
            beginning.begin(dataset)
        return dataset

    def meet(self, fetcher: Any) -> None:
        self._torchs = fetcher

    def wrap(self, fetcher: Fetcher) -> Fetcher:
        try:
            return self._wrapped(fetcher)
        finally:
            # The dataset's iterator goes with its fetcher, and not with the option.
            self._torchs = self._dataset = self._beginning = None
            self._states = {}

    def _wrapped(self, fetcher: Fetcher) -> Fetcher:
        objects = Objects(self._dataset, self._torchs, fetcher, self._rule, self._beginning)
        part = self._start.part
        if self._rule.is_iterable:
            # The first batch tells if the dataset keeps a loaded state.
            are_taken = self._rule.every is not None and objects.have_state
            if self._beginning is not None and self._beginning.is_watching(are_taken):
                fetcher = objects
            if part is not None:
                fetcher = self._resumed(part, objects)
        if self._rule.every is None or not objects.have_state:
            return fetcher
        if not self._rule.workers:
            self.here = Asked(fetcher, objects)
            return self.here
        return _Sending(fetcher, objects, self._rule, self._worker, self._start)

    def _resumed(self, part: Part, objects: Objects) -> Fetcher:
        """Brings the iterator to where the epoch goes on. MIRRORS torchdata worker.py::_worker_loop."""
        torchs, snapshot = self._torchs, part.snapshot
        if part.is_at_end():
            torchs.ended = True
            return objects
        was_ended = snapshot is not None and snapshot.is_ended
        if "iterator" in self._states and part.ends >= 0:
            beginning = self._beginning if objects.is_own_iterator else None
            _load(torchs.dataset_iter, self._states["iterator"], "iterator", beginning)
            if was_ended:
                objects.begin_anew()
        if snapshot is not None and part.ends == 0:
            objects.count_from(snapshot.samples)
        objects.may_have_ended = part.ends > 0 and was_ended
        if not any(part.read_again()):
            return objects
        return _Later(objects, part, self._start.size, self._worker if self._rule.workers else None)


class _Later:
    """Reads batches again when the first task has come, as the key of seeded generators comes with it.

    Args:
        objects: The fetcher, and what it reads.
        part: The position up to which it reads.
        size: The samples of a batch.
        worker: The worker; None without workers.
    """

    def __init__(self, objects: Objects, part: Part, size: int, worker: int | None) -> None:
        self._objects = objects
        self._part: Part | None = part
        self._size = size
        self._worker = worker
        self._fetcher: Fetcher = objects

    def fetch(self, index: Any, /) -> Any:
        part, self._part = self._part, None
        if part is not None:
            try:
                # Without workers, what was drawn for these batches was drawn before.
                with generators.put_back() if self._worker is None else contextlib.nullcontext():
                    self._objects.read_again(part, self._size, self._worker or 0)
            except Exception as error:
                self._fetcher = Failing(error, once=True)
            self._objects.begin_batch()
        return self._fetcher.fetch(index)


class _Sending:
    """Sends states along with batches.

    Args:
        fetcher: The fetcher that makes the batches.
        objects: Have the state.
        rule: When a state is due.
        worker: The worker.
        start: Where its epoch begins.
    """

    def __init__(self, fetcher: Fetcher, objects: Objects, rule: Rule, worker: int, start: Start) -> None:
        self._fetcher = fetcher
        self._objects = objects
        self._worker = worker
        self._asked = start.asked
        # Batches of an iterable dataset that came since a state are read again by the worker.
        self._every = max(1, (rule.every or 1) // rule.workers) if rule.is_iterable else 1
        self._since = 0

    def fetch(self, index: Any, /) -> Any:
        self._asked += 1
        self._since += 1
        data = self._fetcher.fetch(index)
        return with_snapshot(data, self._objects.sent(self._worker, self._asked, self._is_due()))

    def _is_due(self) -> bool:
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
        self.on_end: Callable[[Asked], None] | None = None

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

    def taken(self, passed: int, at_end: bool = False) -> Sent:
        """Takes the present state, which is the one after this number of batches."""
        return read_sent(self._objects.sent(0, passed, at_end=at_end))

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # A default: at the interpreter's exit the names of this module may be gone.
        if self.on_end is not None and not is_finalizing():
            self.on_end(self)


def _load(thing: Any, state: Any, what: str, beginning: Beginning | None = None) -> None:
    if not has_state(thing):
        raise RuntimeError(
            f"load_state_dict(): the state has that of the {what}, and the {what} {thing!r:.80} has no "
            "state_dict and load_state_dict"
        )
    # A state of None is that of an object which has none yet, as for torchdata's loader.
    if state is None:
        return
    if beginning is None:
        thing.load_state_dict(state)
    else:
        beginning.load(thing, state)
