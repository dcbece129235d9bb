"""Tensors whose storage another thread replaces, or the dataset shrinks, while their bytes are read."""

import gc
import subprocess
import sys
import textwrap

import pytest
import torch

from ringloader import DataLoader
from small_datasets import Made

pytestmark = pytest.mark.rings_only

SWAPPED = """
    import threading
    import torch
    from torch.utils.data import TensorDataset
    from ringloader import DataLoader

    ROWS, LENGTH = 64, 100_000
    tensor = torch.zeros(ROWS, LENGTH)
    stop = threading.Event()

    def swap():
        turn = 0
        while not stop.is_set():
            turn += 1
            new = torch.full((ROWS, LENGTH), float(turn % 2))
            if turn % 3:
                tensor.data = new
            else:
                tensor.set_(new)

    thread = threading.Thread(target=swap)
    thread.start()
    wrong = 0
    try:
        for options in ({}, {"num_workers": 2, "worker_method": "thread"}):
            # In any order, row by row: a tool looks at what is copied when that begins.
            for shuffle in (False, True) * 3:
                for (batch,) in DataLoader(TensorDataset(tensor), 16, shuffle, **options):
                    whole = (batch == batch[:, :1]).all() and ((batch == 0) | (batch == 1)).all()
                    wrong += not whole
    finally:
        stop.set()
        thread.join()
    print("wrong batches:", wrong)
"""


def test_a_tensor_whose_storage_is_replaced_while_it_is_gathered():
    """Each row is of one of its storages. On freed memory the process dies, or rows have other bytes."""
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SWAPPED)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "wrong batches: 0\n", "")


PADDED = """
    import threading
    import torch
    from ringloader.batchify import Pad

    # A megabyte and more: other threads run while it is copied.
    tensors = [torch.zeros(100_000 + number) for number in range(16)]
    stop = threading.Event()

    def swap():
        turn = 0
        while not stop.is_set():
            turn += 1
            for tensor in tensors:
                tensor.data = torch.full_like(tensor, 1.0 + turn % 2)

    thread = threading.Thread(target=swap)
    thread.start()
    wrong = native = 0
    # A batch whose tensors move while they are looked at is left to torch, which reads freed memory itself.
    Pad._by_torch = lambda *_: []
    try:
        pad = Pad(value=-1.0)
        for _ in range(120):
            batch = pad(tensors)
            native += len(batch) > 0
            for row, tensor in zip(batch, tensors):
                filled = row[: len(tensor)]
                wrong += not bool((filled == filled[0]).all() and filled[0] in (0, 1, 2))
    finally:
        stop.set()
        thread.join()
    print("wrong rows:", wrong)
    assert native > 80, native
"""


def test_tensors_whose_storages_are_replaced_while_they_are_padded():
    """Each row is of one of the storages."""
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PADDED)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "wrong rows: 0\n"), ended.stderr


class Shrunk(torch.utils.data.Dataset):
    """The storage of the second sample has half of its bytes."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return 4

    def __getitem__(self, index):
        tensor = torch.full((self.length,), float(index))
        if index == 1:
            tensor.untyped_storage().resize_(2 * self.length)
        return tensor


def as_it_is(sample):
    return sample


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    "length, collate_fn",
    [
        (8, as_it_is),
        (1 << 20, as_it_is),
        pytest.param(
            1 << 20,
            None,
            marks=pytest.mark.skipif(
                not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="torch stacks them, and dies"
            ),
        ),
    ],
)
def test_a_tensor_that_is_larger_than_its_storage(length, collate_fn, persistent):
    loader = DataLoader(
        Shrunk(length),
        batch_size=1 if collate_fn is None else None,
        num_workers=1,
        collate_fn=collate_fn,
        persistent_workers=persistent,
    )
    for _ in range(1 + persistent):
        iterator = iter(loader)
        assert next(iterator).flatten()[0] == 0
        with pytest.raises(RuntimeError, match="from byte 0 of its storage, which has only"):
            next(iterator)
        assert [float(batch.flatten()[-1]) for batch in iterator] == [2, 3]


class Replacing:
    """Gives tensors other storages, once the collector finds it."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.itself = self

    def __del__(self):
        for tensor in self.tensors:
            tensor.set_(torch.full_like(tensor, 2))


def replaced(index):
    """The collector replaces storages of a batch after another number of allocations each time."""
    gc.disable()
    gc.collect()
    sample = [torch.ones(64) for _ in range(40)]
    Replacing(sample)
    gc.set_threshold(1 + index // 2)
    gc.enable()
    return sample


def test_storages_that_a_finaliser_replaces_while_a_worker_sends_them():
    """On freed memory the worker dies under a tool, or values are neither those before nor those after."""
    for batch in DataLoader(Made(replaced, 120), batch_size=None, num_workers=1, collate_fn=as_it_is):
        assert {float(value) for tensor in batch for value in (tensor.min(), tensor.max())} <= {1.0, 2.0}
