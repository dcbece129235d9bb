"""The position of each worker in its part of a dataset, as values and as the key ``workers`` of a state."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_type_hints

import torch

from ringloader._common.attributes import has_method


def has_state(thing: object) -> bool:
    """True if an object has a state that can be loaded again, by torchdata's protocol.

    The weights of a module are no position in an epoch.
    """
    if issubclass(type(thing), torch.nn.Module):
        return False
    return has_method(thing, "state_dict") and has_method(thing, "load_state_dict")


def count(value: object) -> int:
    """Reads a number of things."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise ValueError("it must be an int, from 0 on and below 2**63")
    return value


def flag(value: object) -> bool:
    """Reads a truth value."""
    if not isinstance(value, bool):
        raise ValueError("it must be true or false")
    return value


def or_none(read: Callable[[object], Any]) -> Callable[[object], Any]:
    """Returns a reader that takes None too."""
    return lambda value: None if value is None else read(value)


def read_fields(cls: Any, value: object, keys: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Reads the fields of a dataclass from a dict: those whose type is annotated with a reader.

    Args:
        cls: The dataclass.
        value: The dict.
        keys: The keys of fields that have other names there.

    Raises:
        ValueError: For a key that is missing or has a bad value.
    """
    if not isinstance(value, Mapping):
        raise ValueError("it must be a dict")
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        key = (keys or {}).get(name, name)
        for read in getattr(hint, "__metadata__", ()):
            if key not in value:
                raise ValueError(f"the key {key!r} is missing")
            try:
                found[name] = read(value[key])
            except (TypeError, ValueError, RuntimeError) as error:
                raise ValueError(f"{key}={value[key]!r:.80}: {error}") from None
    return found


def _read_parts(value: object) -> tuple[Part, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError("it must be a list")
    return tuple(map(_read_part, value))


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The state of a worker's dataset and of its iterator.

    Attributes:
        pickled: A dict of the two states that there are, pickled: ``dataset``, ``iterator``.
        is_ended: True if the iterator was at its end. The dataset may be ready for the next epoch then.
        samples: Samples of the epoch that the iterator was asked for, if an option counts them.
    """

    pickled: bytes
    is_ended: Annotated[bool, flag] = False
    samples: Annotated[int, count] = 0

    def states(self) -> dict[str, Any]:
        """Returns the states, as objects of their own."""
        found: dict[str, Any] = pickle.loads(self.pickled)
        return found


@dataclasses.dataclass(frozen=True)
class Part:
    """The position of one worker.

    Attributes:
        batches: Batches of the epoch that are passed.
        since: Batches that are passed since the state was taken, which are read again.
        snapshot: The state; None for a worker that is read again from the beginning.
    """

    batches: Annotated[int, count] = 0
    since: Annotated[int, count] = 0
    snapshot: Snapshot | None = None

    def is_at_end(self) -> bool:
        """True if the worker had given all of its part. Its dataset may be ready for the next epoch then."""
        return self.snapshot is not None and self.snapshot.is_ended

    def moved(self, step: int) -> Part:
        """Returns the position a batch further, or before. Before its state is the beginning, read again."""
        batches = self.batches + step
        if batches < 0:
            return self
        if self.since + step < 0:
            return Part(batches, batches)
        return dataclasses.replace(self, batches=batches, since=self.since + step)


@dataclasses.dataclass(frozen=True)
class Workers:
    """The positions of all workers of an epoch; without workers, of the main process.

    Attributes:
        num_workers: The number of workers.
        parts: The position of each.
        next: The worker whose turn it is.
        is_stateful: True if the dataset, or its iterator, has a state.
        shared_seed: The seed that torch gives the DataPipes of all workers.
    """

    num_workers: Annotated[int, count]
    parts: Annotated[tuple[Part, ...], _read_parts]
    next: Annotated[int, count] = 0
    is_stateful: Annotated[bool, flag] = False
    shared_seed: Annotated[int | None, or_none(count)] = None

    def moved(self, batches: int) -> Workers:
        """Returns the positions ``batches`` batches later, or earlier if negative."""
        parts, end = list(self.parts), self.next + batches
        step = 1 if batches > 0 else -1
        for turn in range(self.next, end) if batches > 0 else range(self.next - 1, end - 1, -1):
            at = turn % len(parts)
            parts[at] = parts[at].moved(step)
        return dataclasses.replace(self, parts=tuple(parts), next=end % len(parts))

    def batches(self) -> int:
        """Returns how many batches all workers have passed."""
        return sum(part.batches for part in self.parts)

    def reads_again(self) -> int:
        """Returns the number of batches that are read again because no state was taken before them."""
        return sum(part.batches for part in self.parts if part.snapshot is None)

    def to_dict(self) -> dict[str, Any]:
        """Returns a dict, with states as objects of their own."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        found["parts"] = [_part_to_dict(part) for part in self.parts]
        return found


def _part_to_dict(part: Part) -> dict[str, Any]:
    """Leaves out missing parts: a state of many workers is small."""
    made = {name: getattr(part, name) for name in ("batches", "since")}
    if part.snapshot is not None:
        made |= {"is_ended": part.snapshot.is_ended, "samples": part.snapshot.samples}
    made = {name: value for name, value in made.items() if value}
    return made if part.snapshot is None else made | part.snapshot.states()


def read_workers(value: object) -> Workers:
    """Reads the dict of :meth:`Workers.to_dict`.

    Raises:
        ValueError: For a key that is missing or has a bad value.
    """
    found = Workers(**read_fields(Workers, value))
    many = max(1, found.num_workers)
    if len(found.parts) != many or found.next >= many:
        raise ValueError(f"its 'parts' must be a list of {many}, and its 'next' one of them")
    return found


def _read_part(value: object) -> Part:
    if not isinstance(value, Mapping):
        raise ValueError("each must be a dict")
    # A dict leaves out what a part that has nothing has too.
    given = {**vars(Part()), **vars(Snapshot(b"")), **value}
    of_part, of_snapshot = read_fields(Part, given), read_fields(Snapshot, given)
    states = {name: value[name] for name in ("dataset", "iterator") if name in value}
    if not states:
        return Part(**of_part)
    try:
        pickled = pickle.dumps(states)
    except Exception as error:
        raise ValueError(f"a worker's state cannot be pickled: {error}") from None
    return Part(**of_part, snapshot=Snapshot(pickled, **of_snapshot))
