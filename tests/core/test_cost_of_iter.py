"""``iter()`` without workers, and constructors, counted in instructions: a short epoch is little else."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch.utils.data

import ringloader

pytestmark = pytest.mark.rings_only

DATA = [1, 2, 3, 4]
# What torch's function calls once the process has had workers that are threads, as those of another test.
OF_THREAD_WORKERS = ("get_worker_info", "_of_thread")


def instructions_of(make: Callable[[], object]) -> int:
    """Returns how many instructions of Python code an object takes, from its beginning to its end."""
    count = 0

    def trace(frame, event, _argument):
        nonlocal count
        if frame.f_code.co_name in OF_THREAD_WORKERS:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    # The first ones note parts of torch.
    for _ in range(20):
        make()
    before = sys.gettrace()
    # Newer Pythons count the instructions of a function only if a frame of it has asked before.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        make()
        count = 0
        make()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    ("cls", "data", "options", "most"),
    [
        (ringloader.DataLoader, DATA, {}, 4),
        (ringloader.DataLoader, DATA, {"batch_size": 2, "shuffle": True}, 4),
        (ringloader.DataLoader, DATA, {"batch_size": None}, 4),
        (ringloader.DataLoader, torch.utils.data.TensorDataset(torch.arange(4)), {}, 4),
        (ringloader.StatefulDataLoader, DATA, {}, 16.1),
    ],
    ids=["plain", "shuffled", "unbatched", "tensors", "stateful"],
)
def test_an_iterator_without_workers_takes_few_instructions(cls, data, options, most) -> None:
    torchs_loader, loader = torch.utils.data.DataLoader(data, **options), cls(data, **options)
    torchs = instructions_of(lambda: iter(torchs_loader))
    ours = instructions_of(lambda: iter(loader))
    assert torchs > 100
    assert ours < most * torchs, (ours, torchs)


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


@pytest.mark.parametrize(
    ("make", "options", "most"),
    [
        (range, {"on_error": "skip"}, 27),
        (range, {"seeding": "sample"}, 152),
        (range, {"seeding": "batch"}, 8),
        (Stream, {"on_error": "skip"}, 68),
        (Stream, {"seeding": "sample"}, 162),
        (Stream, {"seeding": "batch"}, 39),
    ],
)
def test_a_sample_takes_few_instructions(make, options, most) -> None:
    def epoch(length: int) -> int:
        loader = ringloader.DataLoader(make(length), batch_size=length, collate_fn=len, **options)
        return instructions_of(lambda: list(loader))

    assert 0 < epoch(80) - epoch(40) <= 40 * most


def test_iterators_take_no_more_as_their_number_grows() -> None:
    loader = ringloader.DataLoader(DATA)
    first = instructions_of(lambda: iter(loader))
    for _ in range(200):
        iter(loader)
    assert instructions_of(lambda: iter(loader)) <= first


class Subclass(ringloader.DataLoader):
    """As programs have them."""

    def __init__(self, dataset, *, name="train", **kwargs) -> None:
        super().__init__(dataset, **kwargs)
        self.name = name


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 2, "shuffle": True, "collate_fn": list, "drop_last": True},
        {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4},
    ],
    ids=["plain", "shuffled", "workers"],
)
@pytest.mark.parametrize(
    "cls", [ringloader.DataLoader, Subclass, ringloader.StatefulDataLoader], ids=lambda cls: cls.__name__
)
def test_a_constructor_takes_few_instructions(cls, options) -> None:
    torchs = instructions_of(lambda: torch.utils.data.DataLoader(DATA, **options))
    ours = instructions_of(lambda: cls(DATA, **options))
    assert torchs > 100
    assert ours < 2.4 * torchs, (ours, torchs)


def test_a_constructor_takes_few_instructions_for_an_option() -> None:
    torchs = instructions_of(lambda: torch.utils.data.DataLoader(DATA))
    ours = instructions_of(lambda: ringloader.DataLoader(DATA, on_error="skip"))
    assert ours < 4 * torchs, (ours, torchs)


class NeverEqual:
    """A value whose comparison is an error."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")

    __hash__ = None

    def __call__(self, *_: object) -> None:
        """Does nothing."""


@pytest.mark.parametrize("cls", [ringloader.DataLoader, ringloader.StatefulDataLoader])
def test_a_constructor_compares_no_argument_of_torchs(cls) -> None:
    value = NeverEqual()
    loader = cls(DATA, collate_fn=value, worker_init_fn=value)
    assert loader.collate_fn is value
    assert loader.worker_init_fn is value
