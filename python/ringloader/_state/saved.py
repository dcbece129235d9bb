"""The state of a loader as values, and as the dict that ``state_dict`` returns."""

from __future__ import annotations

import base64
import binascii
import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ringloader._state.parts import Workers, read_workers

VERSION = 1


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
        overtaken: Ranges of samples behind that one that were passed all the same: first, end, first, ...
        batch_size: Samples in a batch, with which an edited number of batches becomes one of samples.
        passed: The fingerprint of the samples that were passed; None where an index is no int.
        fingerprint: The fingerprint of the samples that were returned.
        base_seed: The seed of the epoch's workers; None if the epoch has not begun.
        base_seed_drawn: True if the epoch drew it, as the first of persistent workers does.
        drawn: What the sampler drew from the program's generator: a seed, or the state before the draw.
        loader_generator: The state of the loader's generator when the epoch began.
        sampler_generator: The state of the sampler's; None if it has none or the loader's.
        inner_generator: The state of the generator of a sampler that Python iterates, or of one inside it.
        rest: The indices with which an epoch of ``rollover`` began.
        number: The number of the epoch, as ``Seeds`` count.
        epoch: The epoch by which a ``DistributedSampler`` shuffled.
        rank: The rank, and
        num_replicas: the number of ranks, of a ``DistributedSampler``, or of another sampler that has them.
        start: Samples that all ranks had passed when there came to be so many ranks.
        bad_samples: The bad samples of the epoch so far, by their option.
        sampler_begun: The state of another sampler when the epoch began.
        sampler_state: Its state now.
        sampler_ended: True if that is one of the next epoch, because the sampler was read up to its end.
        workers: The positions of the workers, if the dataset has a part in the state.
    """

    sampler: str
    num_yielded: int = 0
    is_finished: bool = False
    batches: int = 0
    samples: int = 0
    overtaken: tuple[int, ...] = ()
    batch_size: int = 1
    passed: int | None = 0
    fingerprint: int | None = 0
    base_seed: int | None = None
    base_seed_drawn: bool = False
    drawn: int | torch.Tensor | None = None
    loader_generator: torch.Tensor | None = None
    sampler_generator: torch.Tensor | None = None
    inner_generator: torch.Tensor | None = None
    rest: tuple[int, ...] | None = None
    number: int = 0
    epoch: int | None = None
    rank: int | None = None
    num_replicas: int | None = None
    start: int = 0
    bad_samples: int = 0
    sampler_begun: Any = None
    sampler_state: Any = None
    sampler_ended: bool = False
    workers: Workers | None = None

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
_KEYS = {field.name: _NAMES.get(field.name, field.name) for field in dataclasses.fields(Saved)}
# States of the user's own objects.
_OF_USERS = ("sampler_begun", "sampler_state")
# Their values, and those of the other keys.
_COUNTS = ("num_yielded", "batches", "samples", "batch_size", "number", "start", "bad_samples")
_STATES = ("loader_generator", "sampler_generator", "inner_generator")


def to_dict(saved: Saved) -> dict[str, Any]:
    """Returns a state as a dict of values that JSON and ``torch.load(weights_only=True)`` take."""
    made: dict[str, Any] = {"version": VERSION}
    for name, key in _KEYS.items():
        value = getattr(saved, name)
        kind = type(value)
        if kind is torch.Tensor:
            value = base64.b64encode(value.numpy().tobytes()).decode("ascii")
        elif kind is tuple:
            value = list(value)
        elif kind is Workers:
            value = value.to_dict()
        elif name in _OF_USERS:
            value = copy.deepcopy(value)
        made[key] = value
    return made


def from_dict(state: Mapping[str, Any]) -> Saved:
    """Reads the dict of :func:`to_dict`.

    Raises:
        ValueError: For a dict without a known version, and for a key that is missing or has a bad value.
    """
    if "version" not in state:
        if "_snapshot" in state or "_sampler_iter_state" in state:
            raise ValueError(
                "load_state_dict() got a state of torchdata's StatefulDataLoader, which has another layout: "
                "load it there, or begin the epoch anew"
            )
        raise ValueError("load_state_dict() needs the key 'version', which this state does not have")
    if state["version"] != VERSION or isinstance(state["version"], bool):
        raise ValueError(
            f"load_state_dict() knows version={VERSION}, and this state has "
            f"version={state['version']!r:.50}: use the version of ringloader that made it, or a newer one"
        )
    found: dict[str, Any] = {}
    for name, key in _KEYS.items():
        if key not in state:
            raise ValueError(f"load_state_dict() needs the key {key!r}, which this state does not have")
        try:
            found[name] = _READ[name](state[key])
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"load_state_dict() got {key}={state[key]!r:.80}: {error}") from None
    return Saved(**found)


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise ValueError("it must be an int, from 0 on and below 2**63")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("it must be true or false")
    return value


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
    # It checks the state.
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


def _as_it_is(value: object) -> Any:
    return copy.deepcopy(value)


def _or_none(read: Callable[[object], Any]) -> Callable[[object], Any]:
    return lambda value: None if value is None else read(value)


_READ: dict[str, Callable[[object], Any]] = {
    "sampler": _text,
    "workers": _or_none(read_workers),
    "is_finished": _flag,
    "base_seed_drawn": _flag,
    "sampler_ended": _flag,
    "overtaken": _ranges,
    "passed": _or_none(_number),
    "fingerprint": _or_none(_number),
    "base_seed": _or_none(_number),
    "drawn": _or_none(_drawn),
    "rest": _or_none(_indices),
    "epoch": _or_none(_count),
    "rank": _or_none(_count),
    "num_replicas": _or_none(_count),
    "sampler_begun": _as_it_is,
    "sampler_state": _as_it_is,
    **dict.fromkeys(_COUNTS, _count),
    **dict.fromkeys(_STATES, _or_none(_state)),
}
