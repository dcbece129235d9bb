"""The rows of docs/differences.md about pinned memory."""

from __future__ import annotations

import threading

import pytest
import torch

from accelerator.pinned import IS_NAMED, PIN
from parity.datasets import identity
from ringloader import DataLoader

pytestmark = [
    pytest.mark.rings_only,
    pytest.mark.skipif(IS_NAMED, reason="torch's own thread pins"),
]


class Custom:
    """Pins itself, and remembers in which thread it did, and when."""

    handed_out = 0

    def __init__(self, number):
        self.number = number
        self.thread = self.before = None

    def pin_memory(self):
        self.thread, self.before = threading.get_ident(), Custom.handed_out
        return self


def customs(kind):
    Custom.handed_out = 0
    loader = kind(
        [Custom(number) for number in range(8)],
        batch_size=None,
        collate_fn=identity,
        num_workers=1,
        prefetch_factor=4,
        **PIN,
    )
    for batch in loader:
        yield batch
        Custom.handed_out += 1


def test_a_batchs_own_method_is_called_by_the_caller():
    here = threading.get_ident()
    assert all(batch.thread != here for batch in customs(torch.utils.data.DataLoader))
    for batch in customs(DataLoader):
        assert batch.thread == here
        assert batch.number - 2 <= batch.before <= batch.number


def test_there_is_no_pinning_thread():
    dataset = torch.arange(4)
    torchs = iter(torch.utils.data.DataLoader(dataset, num_workers=1, **PIN))
    assert torchs._pin_memory and torchs._pin_memory_thread.is_alive()
    before = threading.enumerate()
    ours = iter(DataLoader(dataset, num_workers=1, **PIN))
    assert ours._pin_memory and not hasattr(ours, "_pin_memory_thread")
    assert threading.enumerate() == before
    assert [batch.is_pinned() for batch in ours] == [True] * 4
    list(torchs)
