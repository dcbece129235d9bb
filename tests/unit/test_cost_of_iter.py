"""``iter()`` without workers, counted in instructions of the interpreter: a short epoch is little else."""

from __future__ import annotations

import sys

import pytest
import torch.utils.data

import ringloader

pytestmark = pytest.mark.rings_only


def instructions_of_iter(loader: torch.utils.data.DataLoader) -> int:
    """Returns how many instructions of Python code an iterator takes, from its beginning to its end."""
    count = 0

    def trace(frame, event, _argument):
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    # The first iterators note parts of torch.
    for _ in range(20):
        iter(loader)
    before = sys.gettrace()
    # Newer Pythons count the instructions of a function only if a frame of it has asked before.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        iter(loader)
        count = 0
        iter(loader)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    ("cls", "data", "options", "most"),
    [
        (ringloader.DataLoader, [1, 2, 3, 4], {}, 2.3),
        (ringloader.DataLoader, [1, 2, 3, 4], {"batch_size": 2, "shuffle": True}, 2.3),
        (ringloader.DataLoader, [1, 2, 3, 4], {"batch_size": None}, 2.4),
        (ringloader.DataLoader, torch.utils.data.TensorDataset(torch.arange(4)), {}, 3.9),
        (ringloader.StatefulDataLoader, [1, 2, 3, 4], {}, 30),
    ],
    ids=["plain", "shuffled", "unbatched", "tensors", "stateful"],
)
def test_an_iterator_without_workers_takes_few_instructions(cls, data, options, most) -> None:
    torchs = instructions_of_iter(torch.utils.data.DataLoader(data, **options))
    ours = instructions_of_iter(cls(data, **options))
    assert torchs > 100
    assert ours < most * torchs, (ours, torchs)


def test_iterators_take_no_more_as_their_number_grows() -> None:
    loader = ringloader.DataLoader([1, 2, 3, 4])
    first = instructions_of_iter(loader)
    for _ in range(200):
        iter(loader)
    assert instructions_of_iter(loader) <= first
