"""Where each worker is in its part of a dataset, as values and as the key ``workers`` of a state."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping
from typing import Any


def has_state(thing: object) -> bool:
    """True if an object has a state that can be loaded again, by torchdata's protocol."""
    methods = (getattr(thing, "state_dict", None), getattr(thing, "load_state_dict", None))
    return all(callable(method) for method in methods)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The state of a worker's dataset and of its iterator.

    Attributes:
        pickled: A dict of the two states that there are, pickled: ``dataset``, ``iterator``.
        is_ended: True if the iterator was at its end. The dataset may be ready for the next epoch then.
        samples: Samples of the epoch that the iterator was asked for, if an option counts them.
        failure: The reason why the state cannot be had.
    """

    pickled: bytes
    is_ended: bool = False
    samples: int = 0
    failure: str | None = None

    def is_of_dataset(self) -> bool:
        """True if the dataset itself has a state."""
        return "dataset" in self.states()

    def states(self) -> dict[str, Any]:
        """Returns the states, as objects of their own.

        Raises:
            RuntimeError: If they could not be had.
        """
        if self.failure is not None:
            raise RuntimeError(self.failure)
        found: dict[str, Any] = pickle.loads(self.pickled)
        return found


@dataclasses.dataclass(frozen=True)
class Part:
    """The position of one worker.

    Attributes:
        batches: Batches of the epoch that are passed.
        since: Batches that are passed since the state was taken, in the epoch of the state.
        snapshot: The state; None for a worker that is read again from the beginning.
        ends: Epochs that ended between the state and this epoch: 0 for a state of this epoch, -1 if the epoch
            of the state was given up.
        outlives: True if the next epoch finds an object that has the state, and not an iterator of its own.
    """

    batches: int = 0
    since: int = 0
    snapshot: Snapshot | None = None
    ends: int = 0
    outlives: bool = False

    def is_at_end(self) -> bool:
        """True if the worker had given all of its part. Its dataset may be ready for the next epoch then."""
        return self.ends == 0 and self.snapshot is not None and self.snapshot.is_ended

    def next_epoch(self, has_ended: bool) -> Part:
        """Returns the position of the same worker when the next epoch begins."""
        if not self.outlives:
            return Part()
        ends = self.ends + 1 if has_ended and self.ends >= 0 else -1
        return Part(0, self.since, self.snapshot, ends, True)

    def moved(self, step: int) -> Part:
        """Returns the position a batch further, or before.

        Before its state, an iterator is read again from the beginning. A dataset that has the state itself
        may be anywhere by now, and stays where the state has it.
        """
        last = self.since if self.ends == 0 else self.batches
        if last + step < 0:
            batches = self.batches + step
            return self if self.outlives or batches < 0 else Part(batches, batches)
        since = self.since + (step if self.ends == 0 else 0)
        return dataclasses.replace(self, batches=self.batches + step, since=since)


@dataclasses.dataclass(frozen=True)
class Workers:
    """The positions of all workers of an epoch; without workers, of the main process.

    Attributes:
        num_workers: The number of workers.
        parts: The position of each.
        next: The worker whose turn it is.
        drop: Batches of all workers that are read again and dropped in the main process.
        is_stateful: True if the dataset, or its iterator, has a state.
        is_counted: True if the batches of each worker are known, and not only their sum, ``drop``.
        is_in_order: True if batches came in turn.
        shared_seed: The seed that torch gives the DataPipes of all workers.
    """

    num_workers: int
    parts: tuple[Part, ...]
    next: int = 0
    drop: int = 0
    is_stateful: bool = False
    is_counted: bool = True
    is_in_order: bool = True
    shared_seed: int | None = None

    @classmethod
    def uncounted(cls, num_workers: int, batches: int) -> Workers:
        """Returns the position behind so many batches of all workers, which are read again."""
        if num_workers <= 1:
            return cls(num_workers, (Part(batches, batches),))
        return cls(num_workers, (Part(),) * num_workers, drop=batches, is_counted=False)

    def moved(self, batches: int) -> Workers:
        """Returns the positions so many batches further, or before."""
        if not self.is_counted:
            return dataclasses.replace(self, drop=max(0, self.drop + batches))
        parts, turn = list(self.parts), self.next
        for _ in range(abs(batches)):
            if batches < 0:
                turn = (turn - 1) % len(parts)
            parts[turn] = parts[turn].moved(1 if batches > 0 else -1)
            if batches > 0:
                turn = (turn + 1) % len(parts)
        return dataclasses.replace(self, parts=tuple(parts), next=turn)

    def next_epoch(self, lives_on: bool) -> Workers:
        """Returns the positions when the next epoch begins.

        Args:
            lives_on: True if it finds the dataset as this epoch has left it.
        """
        parts = tuple(part.next_epoch(True) if lives_on else Part() for part in self.parts)
        return dataclasses.replace(self, parts=parts, next=0, drop=0, is_counted=True, shared_seed=None)

    def batches(self) -> int:
        """Returns how many batches all workers have passed."""
        return sum(part.batches for part in self.parts) if self.is_counted else self.drop

    def reads_again(self) -> int:
        """Returns how many batches are read again because there is no state behind which they came."""
        return (
            sum(part.batches for part in self.parts if part.snapshot is None)
            if self.is_counted
            else self.drop
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns a dict, with states as objects of their own."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        found["parts"] = [_part_to_dict(part) for part in self.parts]
        return found


# The values of a part that has nothing.
_PLAIN = {"batches": 0, "since": 0, "ends": 0, "samples": 0, "is_ended": False, "outlives": False}


def _part_to_dict(part: Part) -> dict[str, Any]:
    """Leaves out what is not there: a state of many workers is small."""
    made: dict[str, Any] = {
        "batches": part.batches,
        "since": part.since,
        "ends": part.ends,
        "outlives": part.outlives,
    }
    if part.snapshot is not None:
        made["is_ended"], made["samples"] = part.snapshot.is_ended, part.snapshot.samples
        made.update(part.snapshot.states())
    return {name: value for name, value in made.items() if name not in _PLAIN or value != _PLAIN[name]}


def read_workers(value: object) -> Workers:
    """Reads the dict of :meth:`Workers.to_dict`.

    Raises:
        ValueError: For a key that is missing or has a bad value.
    """
    if not isinstance(value, Mapping):
        raise ValueError("it must be a dict")
    found: dict[str, Any] = {}
    for field in dataclasses.fields(Workers):
        if field.name not in value:
            raise ValueError(f"its key {field.name!r} is missing")
        found[field.name] = value[field.name]
    for name in ("num_workers", "next", "drop"):
        _check_count(name, found[name])
    for name in ("is_stateful", "is_counted", "is_in_order"):
        if not isinstance(found[name], bool):
            raise ValueError(f"its {name!r} must be true or false")
    if found["shared_seed"] is not None:
        _check_count("shared_seed", found["shared_seed"])
    parts, many = found["parts"], max(1, found["num_workers"])
    if not isinstance(parts, (list, tuple)) or len(parts) != many or found["next"] >= many:
        raise ValueError(f"its 'parts' must be a list of {many}, and its 'next' one of them")
    found["parts"] = tuple(_read_part(part) for part in parts)
    return Workers(**found)


def _read_part(value: object) -> Part:
    if not isinstance(value, Mapping):
        raise ValueError("each of its 'parts' must be a dict")
    given = {**_PLAIN, **value}
    for name in ("batches", "since", "samples"):
        _check_count(name, given[name])
    if not isinstance(given["ends"], int) or isinstance(given["ends"], bool) or given["ends"] < -1:
        raise ValueError("the 'ends' of a part must be an int, from -1 on")
    for name in ("is_ended", "outlives"):
        if not isinstance(given[name], bool):
            raise ValueError(f"the {name!r} of a part must be true or false")
    states = {name: value[name] for name in ("dataset", "iterator") if name in value}
    snapshot = None
    if states:
        try:
            snapshot = Snapshot(pickle.dumps(states), given["is_ended"], given["samples"])
        except Exception as error:
            raise ValueError(f"a worker's state cannot be pickled: {error}") from None
    return Part(given["batches"], given["since"], snapshot, given["ends"], given["outlives"])


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"its {name!r} must be an int, from 0 on")
