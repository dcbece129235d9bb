"""The state of a loader as values, those of its workers first; and as the dict that a program gets."""

from __future__ import annotations

import base64
import binascii
import copy
import dataclasses
import operator
import pickle
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_type_hints

import torch

from ringloader._common.attributes import has_method

VERSION = 1


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
    return Part(**of_part, snapshot=Snapshot(pickle.dumps(states), **of_snapshot))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("it must be a str")
    return value


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not -(1 << 63) <= value < 1 << 64:
        raise ValueError("it must be an int of 64 bits")
    return value


def _state(value: object) -> torch.Tensor:
    try:
        raw = base64.b64decode(_text(value), validate=True)
    except binascii.Error as error:
        raise ValueError(f"it must be the state of a generator, in base64 ({error})") from None
    made = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    # Raises for a bad state.
    torch.Generator().set_state(made)
    return made


def _drawn(value: object) -> int | torch.Tensor:
    return _state(value) if isinstance(value, str) else _number(value)


def _indices(value: object) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError("it must be a list of ints")
    return tuple(_number(index) for index in value)


def _ranges(value: object) -> tuple[int, ...]:
    found = _indices(value)
    if len(found) % 2 or list(found) != sorted(set(found)) or not all(0 <= end < 1 << 63 for end in found):
        raise ValueError("it must be pairs of numbers, each larger than the one before it")
    return found


@dataclasses.dataclass(frozen=True)
class Saved:
    """The position of an epoch, and what its order comes from.

    Samples are numbered in the order in which the sampler gives them to this rank. For a batch sampler that
    is not torch's, the numbers are those of batches.

    Attributes:
        sampler: The kind of sampler: the name of its class.
        num_yielded: Batches that are passed. Other code may have edited it.
        is_finished: True if the epoch is over. Other code may have edited it.
        batches: Batches that were passed.
        samples: Samples before the first that was not passed.
        overtaken: Ranges of samples after it that were passed all the same: first, end, first, ...
        batch_size: Samples in a batch, with which an edited number of batches becomes one of samples.
        passed: The fingerprint of the samples that were passed; None where an index is no int.
        fingerprint: The fingerprint of the samples that were returned.
        base_seed: The seed of the epoch's workers; None if the epoch has not begun.
        base_seed_drawn: True if the epoch drew it, as the first of persistent workers does.
        drawn: What the sampler drew from the program's generator: a seed, or the state before its first draw.
        draws: The number of draws since that state; None for all draws of the epoch.
        loader_generator: The state of the loader's generator when the epoch began.
        sampler_generator: The state of the sampler's; None if it has none or the loader's.
        inner_generator: The state of the generator of a sampler that Python iterates, or of one inside it.
        rest: The indices with which an epoch of ``rollover`` began.
        number: The number of the epoch, as ``Seeds`` count.
        epoch: The epoch by which a ``DistributedSampler`` shuffled.
        rank: The rank of a ``DistributedSampler``, or of another sampler that has one.
        num_replicas: The number of its ranks.
        start: Samples that all ranks had passed when the number of ranks last changed.
        bad_samples: The bad samples of the epoch so far, by their option.
        sampler_begun: The state of another sampler when the epoch began.
        sampler_state: Its state now.
        sampler_ended: True if that is one of the next epoch, because the sampler was read up to its end.
        workers: The positions of the workers, if the dataset has a part in the state.
    """

    sampler: Annotated[str, _text]
    num_yielded: Annotated[int, count] = 0
    is_finished: Annotated[bool, flag] = False
    batches: Annotated[int, count] = 0
    samples: Annotated[int, count] = 0
    overtaken: Annotated[tuple[int, ...], _ranges] = ()
    batch_size: Annotated[int, count] = 1
    passed: Annotated[int | None, or_none(_number)] = 0
    fingerprint: Annotated[int | None, or_none(_number)] = 0
    base_seed: Annotated[int | None, or_none(_number)] = None
    base_seed_drawn: Annotated[bool, flag] = False
    drawn: Annotated[int | torch.Tensor | None, or_none(_drawn)] = None
    draws: Annotated[int | None, or_none(count)] = None
    loader_generator: Annotated[torch.Tensor | None, or_none(_state)] = None
    sampler_generator: Annotated[torch.Tensor | None, or_none(_state)] = None
    inner_generator: Annotated[torch.Tensor | None, or_none(_state)] = None
    rest: Annotated[tuple[Any, ...] | None, or_none(_indices)] = None
    number: Annotated[int, count] = 0
    epoch: Annotated[int | None, or_none(count)] = None
    rank: Annotated[int | None, or_none(count)] = None
    num_replicas: Annotated[int | None, or_none(count)] = None
    start: Annotated[int, count] = 0
    bad_samples: Annotated[int, count] = 0
    sampler_begun: Annotated[Any, copy.deepcopy] = None
    sampler_state: Annotated[Any, copy.deepcopy] = None
    sampler_ended: Annotated[bool, flag] = False
    workers: Annotated[Workers | None, or_none(read_workers)] = None

    def but(self, **changes: Any) -> Saved:
        """Returns ``dataclasses.replace(self, **changes)``, in fewer steps: each `iter` asks."""
        made = object.__new__(Saved)
        vars(made).update(vars(self), **changes)
        return made

    @property
    def has_begun(self) -> bool:
        """True if the epoch has drawn its base seed."""
        return self.base_seed is not None

    @property
    def is_edited(self) -> bool:
        """True if other code has moved the position."""
        return self.num_yielded != self.batches

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The ranges of samples to pass over: those passed, or as many as an edited number of batches has."""
        first = self.samples
        if self.is_edited:
            first = max(0, first + (self.num_yielded - self.batches) * self.batch_size)
        ends = iter(() if self.is_edited else self.overtaken)
        return [*(((0, first),) if first else ()), *zip(ends, ends, strict=True)]


# The keys of the dict that frameworks edit, as torchdata's `StatefulDataLoader` names them.
_NAMES = {"num_yielded": "_num_yielded", "is_finished": "_iterator_finished"}
EDITED = frozenset(_NAMES.values())


def to_dict(saved: Saved) -> dict[str, Any]:
    """Returns a state as a dict of values that JSON and ``torch.load(weights_only=True)`` take.

    Raises:
        RuntimeError: If an index of the remainder is no int.
    """
    made: dict[str, Any] = {"version": VERSION}
    for name, value in vars(saved).items():
        kind = type(value)
        if name == "rest" and value is not None:
            value = [_plain(index) for index in value]
        elif kind is torch.Tensor:
            value = base64.b64encode(value.numpy().tobytes()).decode("ascii")
        elif kind is tuple:
            value = list(value)
        elif kind is Workers:
            value = value.to_dict()
        elif name in ("sampler_begun", "sampler_state"):
            # The user's own objects.
            value = copy.deepcopy(value)
        made[_NAMES.get(name, name)] = value
    return made


def _plain(index: Any) -> int:
    """Returns an index of the remainder as an int of Python's own."""
    try:
        return operator.index(index)
    except TypeError:
        raise RuntimeError(
            f"state_dict(): last_batch='rollover' keeps the index {index!r:.80} for the next epoch, and a "
            "state can have ints there only: use a sampler of ints"
        ) from None


def from_dict(state: Mapping[str, Any]) -> Saved:
    """Reads the dict of :func:`to_dict`.

    Raises:
        ValueError: For a dict without a known version, and for a key that is missing or has a bad value.
    """
    if "version" not in state:
        if "_snapshot" in state or "_sampler_iter_state" in state:
            raise ValueError(
                "load_state_dict() got a state of torchdata's StatefulDataLoader, which has another layout: "
                "load it there, or start the epoch over"
            )
        raise ValueError("load_state_dict() needs the key 'version', which this state does not have")
    if state["version"] != VERSION or isinstance(state["version"], bool):
        raise ValueError(
            f"load_state_dict() knows version={VERSION}, and this state has "
            f"version={state['version']!r:.50}: use the version of ringloader that made it, or a newer one"
        )
    try:
        return Saved(**read_fields(Saved, state, _NAMES))
    except ValueError as error:
        raise ValueError(f"load_state_dict(): {error}; pass the dict that state_dict() returned") from None
