"""The state of a loader as values, and as the dict that ``state_dict`` returns."""

from __future__ import annotations

import base64
import binascii
import copy
import dataclasses
import operator
from collections.abc import Mapping
from typing import Annotated, Any

import torch

from ringloader._features.state.positions import Workers, count, flag, or_none, read_fields, read_workers

VERSION = 1


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
