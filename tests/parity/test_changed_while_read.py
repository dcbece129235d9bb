"""A thread that gives tensors other memory while native code reads them: no byte is read after it was freed.

Native code may use an address while it keeps the interpreter lock. To let the lock go lets the thread in.
"""

import collections
import math
import sys
import threading
import time

import pytest
import torch
from torch.utils.data import Dataset

from parity.datasets import identity


class ChangedByThread(Dataset):
    """Some time after it returned tensors of zeros, its thread gives them other memory of zeros."""

    def change_after(self, seconds, tensors):
        self.begin = math.inf
        self.is_ready = False
        threading.Thread(target=self.change, args=(list(tensors),), daemon=True).start()
        while not self.is_ready:
            time.sleep(0.001)
        # The thread asks for the lock soon after this one has got it, and has it whenever this one lets go.
        sys.setswitchinterval(1e-6)
        time.sleep(0.001)
        self.begin = time.monotonic() + seconds

    def change(self, tensors):
        others = [torch.zeros_like(tensor) for tensor in tensors]
        self.is_ready = True
        while time.monotonic() < self.begin:
            pass
        # In one call of C: it is not interrupted.
        collections.deque(map(torch.Tensor.data.__set__, tensors, others), maxlen=0)
        del others


class Sent(ChangedByThread):
    """Sample 1 is large: the thread waits for the lock by the time that its last tensor is read."""

    def __init__(self, last, dtype):
        self.last = last
        self.dtype = dtype

    def __len__(self):
        return 2

    def __getitem__(self, index):
        tensors = [torch.zeros(50, dtype=torch.int32) for _ in range((2, 3000)[index])]
        if index == 1:
            self.change_after(0, tensors)
            return [*tensors, torch.zeros(self.last, dtype=self.dtype)]
        return [*tensors, torch.zeros(1)]


@pytest.mark.parametrize(
    ("last", "dtype"),
    [
        pytest.param(50, torch.uint8, id="a first small element type"),
        pytest.param(1, torch.float32, id="a number that may be a negative view"),
    ],
)
def test_while_a_batch_is_sent(loader_class, last, dtype):
    loader = loader_class(
        Sent(last, dtype),
        num_workers=1,
        batch_size=None,
        collate_fn=identity,
        multiprocessing_context="spawn",
    )
    for batch in loader:
        assert not any(part.any() for part in batch)


class Collated(ChangedByThread):
    def __init__(self, count, size):
        self.count = count
        self.size = size

    def __len__(self):
        return self.count

    def __getitems__(self, indices):
        tensors = [torch.zeros(self.size) for _ in indices]
        self.change_after(0.0005, tensors)
        return tensors


@pytest.mark.parametrize(("count", "size"), [(10_000, 1), (2000, 100), (10_000, 100)])
def test_while_a_batch_is_collated(loader_class, count, size):
    for batch in loader_class(Collated(count, size), num_workers=1, batch_size=count):
        assert not batch.any()
