"""`device_transform=` while copies are late: once for each batch, and safe on any stream."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
import torch

from accelerator import pretend
from accelerator.copies import SIZES, Kept, streams
from accelerator.moved import (
    DEVICE,
    Numbered,
    assert_numbered,
    bytes_of,
    loader_on,
    path,
    registrar,
)
from ringloader._features.device import device_copy

pytestmark = [pytest.mark.rings_only, pytest.mark.usefixtures("registrar")]

__all__ = ["path", "registrar"]


class Scale:
    """Makes floats of bytes, and writes down what it saw."""

    def __init__(self):
        self.streams, self.calls = [], 0

    def __call__(self, batch):
        self.streams.append(torch.accelerator.current_stream())
        self.calls += 1
        return {name: tensor.float() / 2 for name, tensor in batch.items()}


def test_the_transform_runs_once_behind_the_copies(path):
    transform = Scale()
    caller = torch.accelerator.current_stream()
    with pretend.delayed(5000):
        for number, batch in enumerate(loader_on(path, Numbered(8, SIZES), device_transform=transform)):
            for name, tensor in batch.items():
                assert tensor.dtype == torch.float32 and tensor.device == DEVICE
                assert torch.equal(tensor.cpu() * 2, bytes_of(number + int(name), tensor.numel()).float())
    assert transform.calls == 8
    assert caller not in transform.streams and len({one.stream_id for one in transform.streams}) == 1


def test_what_the_transform_makes_is_safe_on_every_stream(path):
    pretend.set_poison(True)
    kept, turns = Kept(), streams(3)
    iterator = iter(loader_on(path, Numbered(20, SIZES), device_transform=dict))
    with pretend.delayed(10_000):
        for number in range(20):
            with pretend.on_stream(turns[number % 3]):
                kept.keep(next(iterator), number)
    kept.check()
    assert pretend.violations() == []


@dataclasses.dataclass
class Sample:
    """No container."""

    tensors: dict[str, torch.Tensor]


class Moves:
    """Moves itself, and says nothing of its memory."""

    __slots__ = ("tensors",)

    def __init__(self, tensors):
        self.tensors = tensors

    def to(self, device, non_blocking=False):
        return Moves({name: one.to(device, non_blocking=non_blocking) for name, one in self.tensors.items()})


class InClosure:
    def __init__(self, tensors):
        self.take = lambda: tensors

    @property
    def tensors(self):
        return self.take()


class Unseen:
    """Python knows not what an array of objects refers to."""

    def __init__(self, tensors):
        self._array = np.empty(1, dtype=object)
        self._array[0] = tensors

    @property
    def tensors(self):
        return self._array[0]


def two_loaders_on_two_streams(path, kind, turns):
    """One stream is far behind when memory of its batches would serve the other's loader.

    A kind that has no ``to`` is made by the transform, the other by the dataset.
    """
    kept = Kept()
    made = Made(kind, 6) if kind is Moves else Numbered(6, SIZES)
    transform = (lambda batch: batch) if kind is Moves else kind
    iterators = [iter(loader_on(path, made, device_transform=transform)) for _ in range(2)]
    for number in range(6):
        for iterator, stream in zip(iterators, turns, strict=True):
            # By then the worker has the next batch, which takes memory that is free.
            time.sleep(0.02)
            with pretend.on_stream(stream):
                batch = next(iterator)
                with pretend.delayed(20_000 if stream is turns[0] else 0):
                    kept.keep(batch.tensors, number)
            del batch
    kept.check()
    assert pretend.violations() == []


class Made(Numbered):
    def __init__(self, kind, count):
        super().__init__(count, SIZES)
        self._kind = kind

    def __getitem__(self, number):
        return self._kind(super().__getitem__(number))


@pytest.mark.parametrize("kind", [Sample, Moves, InClosure])
def test_what_no_container_shows_is_not_used_again_too_early(path, kind):
    pretend.set_poison(True)
    two_loaders_on_two_streams(path, kind, streams(2))


def test_where_memory_is_not_found_the_streams_are_waited_for():
    """Without poison, which comes before any copy could, as in a transform of another thread."""
    two_loaders_on_two_streams("native", Unseen, streams(2))


def test_memory_that_is_seen_is_safe_on_the_copy_stream_itself():
    pretend.set_poison(True)
    two_loaders_on_two_streams("native", Sample, [*streams(1), device_copy.stream_on(DEVICE)])


def test_torch_uses_no_memory_too_early():
    """The code that a user writes with torch's loader: the transform is called on the caller's stream."""
    pretend.set_poison(True)
    kept, turns = Kept(), streams(2)
    iterators = [iter(torch.utils.data.DataLoader(Numbered(6, SIZES), batch_size=None)) for _ in turns]
    for number in range(6):
        for iterator, stream in zip(iterators, turns, strict=True):
            with pretend.on_stream(stream):
                batch = Moves(next(iterator)).to(DEVICE, non_blocking=True)
                with pretend.delayed(20_000 if stream is turns[0] else 0):
                    kept.keep(batch.tensors, number)
            del batch
    kept.check()


def fails_at(number, error):
    asked = []

    def transform(batch):
        asked.append(batch)
        if torch.equal(batch["0"].cpu(), bytes_of(number, 100)):
            raise error
        return batch

    return transform, asked


def test_what_the_transform_raises_is_raised_in_its_turn(path):
    transform, asked = fails_at(2, KeyError("mine"))
    iterator = iter(loader_on(path, Numbered(6, SIZES), device_transform=transform))
    for number in (0, 1):
        assert_numbered(next(iterator), number)
    with pytest.raises(KeyError, match="mine"):
        next(iterator)
    for number in (3, 4, 5):
        assert_numbered(next(iterator), number)
    assert len(asked) == 6
    assert list(iterator) == []
