"""User code that changes a batch's memory while the batch is sent: the batch arrives, or an error."""

from __future__ import annotations

import gc
import random
import threading
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import ringloader
from parity import harness
from parity.datasets import identity

ACTIONS = {
    "resize_ to less": lambda tensor: tensor.resize_(min(1, tensor.numel())),
    "resize_ to none": lambda tensor: tensor.resize_(0),
    "set_": lambda tensor: tensor.set_(torch.full((tensor.numel(),), 9, dtype=tensor.dtype)),
    "data": lambda tensor: setattr(tensor, "data", torch.full_like(tensor, 8)),
    "share": lambda tensor: tensor.share_memory_(),
    "share, set_": lambda tensor: tensor.share_memory_().set_(torch.full((7,), 6, dtype=tensor.dtype)),
    "fill": lambda tensor: tensor.fill_(3),
    "transpose": lambda tensor: tensor.t_() if tensor.dim() == 2 else tensor.unsqueeze_(0),
}
# Actions that torch's worker does not survive, or sends garbage after.
RESIZING = {
    "resize_ to more": lambda tensor: tensor.resize_(4 * tensor.numel()),
    "storage to more": lambda tensor: tensor.untyped_storage().resize_(64 * tensor.numel()),
    "storage to none": lambda tensor: tensor.untyped_storage().resize_(0),
}


class Acting:
    """Does something to a tensor of the batch while it is pickled itself."""

    def __init__(self, tensor, name):
        self.tensor = tensor
        self.name = name

    def __reduce__(self):
        {**ACTIONS, **RESIZING, **ON_ARRAYS}[self.name](self.tensor)
        # Memory that was let go has another owner at once.
        self.noise = [torch.full((tensor_size,), -1, dtype=torch.int32) for tensor_size in (10, 5000)]
        return str, (self.name,)


class Acted(Dataset):
    """One sample for each action; the elements of all differ."""

    def __init__(self, size, actions, where, *, as_array=False):
        self.size = size
        self.names = list(actions)
        self.where = where
        self.as_array = as_array

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        changed = torch.arange(self.size, dtype=torch.int32) + index
        beside = torch.arange(self.size, dtype=torch.int32) - index
        view = beside[1:]
        if self.as_array:
            changed = changed.numpy().copy()
        acting = Acting(changed, self.names[index])
        return {
            "earlier": [beside, changed, view, acting],
            "later": [acting, changed, view, beside],
            "between": [changed, acting, beside, view, acting],
        }[self.where]


def described(part):
    return (np.asarray(part).tobytes(), tuple(part.shape)) if hasattr(part, "shape") else part


def content(loader_class, dataset):
    """By the action's name: what arrived, or the error that did."""
    iterator = iter(loader_class(dataset, num_workers=1, batch_size=None, collate_fn=identity, timeout=20))
    found = {}
    for name in dataset.names:
        try:
            found[name] = [described(part) for part in next(iterator)]
        except RuntimeError as error:
            found[name] = str(error)
    return found


WHERE = [("earlier", 10), ("earlier", 400_000), ("between", 5000)]


@pytest.mark.parametrize(("where", "size"), WHERE)
def test_reductions_that_change_a_tensor(loader_class, where, size):
    """It arrives as it is in the end. Another shape, or a storage without its bytes, is an error."""
    actions = {**ACTIONS, **RESIZING}
    for index, (name, found) in enumerate(content(loader_class, Acted(size, actions, where)).items()):
        tensor = torch.arange(size, dtype=torch.int32) + index
        actions[name](tensor)
        beside = torch.arange(size, dtype=torch.int32) - index
        if tensor.shape != (size,) or name == "storage to none":
            assert "was resized, or got other memory, while the batch" in found, name
        else:
            parts = {"earlier": found, "between": [found[2], found[0], found[3]]}[where]
            assert parts[:3] == [described(beside), described(tensor), described(beside[1:])], name


@pytest.mark.parametrize("size", [10, 5000])
def test_reductions_that_change_a_tensor_behind_them(loader_class, size):
    dataset = Acted(size, ACTIONS, "later")
    assert content(loader_class, dataset) == content(DataLoader, dataset)


ON_ARRAYS = {
    "resize": lambda array: array.resize((4 * array.size,), refcheck=False),
    "resize to less": lambda array: array.resize((1,), refcheck=False),
    "state": lambda array: array.__setstate__((1, (3,), np.dtype("i4"), False, bytes(12))),
    "fill an array": lambda array: array.fill(4),
}


@pytest.mark.rings_only
@pytest.mark.parametrize("size", [10, 400_000])
def test_reductions_that_resize_an_array(loader_class, size):
    """Torch has copied an earlier one by then: here that batch is an error, unless the memory stayed."""
    dataset = Acted(size, ON_ARRAYS, "later", as_array=True)
    assert content(loader_class, dataset) == content(DataLoader, dataset)
    found = content(loader_class, Acted(size, ON_ARRAYS, "earlier", as_array=True))
    assert found.pop("fill an array")[1] == described(np.full(size, 4, "i4"))
    for error in found.values():
        assert f"an array of {4 * size} bytes was resized, or got other memory" in error


class Nothing:
    """Makes the batch one that is pickled."""


class ChangedByThread(Dataset):
    """A thread of the worker changes all tensors and arrays of the batches made so far, all the time."""

    def __init__(self, size, *, pickled):
        self.size = size
        self.pickled = pickled
        self.made = []

    def __len__(self):
        return 60

    def change(self):
        choice = random.Random(0)
        while True:
            for value, parts in self.made[-4:]:
                tensor, other, array = parts
                action = choice.randrange(4)
                if action < 2:
                    # Not by `set_`, which lets the interpreter lock go while it swaps the storage.
                    (tensor, other)[action].data = torch.full((self.size,), value, dtype=torch.int32)
                elif action == 2 and self.size < 100_000:
                    array.resize((self.size + choice.randrange(3),), refcheck=False)
                    array.fill(value)
                self.noise = torch.full((self.size,), -1, dtype=torch.int32)
            time.sleep(0)

    def __getitem__(self, index):
        if not self.made:
            threading.Thread(target=self.change, daemon=True).start()
        tensor, other = (torch.full((self.size,), index, dtype=torch.int32) for _ in range(2))
        parts = [tensor, other, np.full(self.size, index, dtype=np.int32)]
        self.made.append((index, parts))
        return [*parts, Nothing()] if self.pickled else parts


@pytest.mark.rings_only
@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("size", [50, 300_000])
def test_a_thread_that_changes_them_while_the_worker_waits_for_room(loader_class, size, pickled):
    """Whenever it does so, it writes the same values: others are another owner's memory."""
    loader = loader_class(
        ChangedByThread(size, pickled=pickled),
        num_workers=1,
        batch_size=None,
        collate_fn=identity,
        prefetch_factor=16,
        max_shared_bytes=8 << 20,
    )
    iterator = iter(loader)
    harness.assert_path(iterator, 1)
    wrong = []
    number = 0
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            break
        except RuntimeError as error:
            # Only a pickled batch cannot be read again.
            assert pickled and "an array of" in str(error)
        else:
            for part in batch[:3]:
                # An array's new end, and a batch that is changed while it is read, are zero or the value.
                values = set(np.unique(np.asarray(part)).tolist())
                wrong += [] if values <= {number, 0} else [(number, values)]
        number += 1
        if number % 8 == 0:
            time.sleep(0.01)
    assert number == 60
    assert not wrong


class SaysIfTheCollectorIsOn(Dataset):
    def __init__(self, is_on):
        self.is_on = is_on

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index == 0:
            (gc.enable if self.is_on else gc.disable)()
        return {"is on": torch.tensor(gc.isenabled()), "small": torch.full((8,), index)}


@pytest.mark.parametrize("is_on", [True, False])
def test_a_workers_collector_is_left_as_it_was(is_on):
    for batch in ringloader.DataLoader(SaysIfTheCollectorIsOn(is_on), batch_size=None, num_workers=1):
        assert bool(batch["is on"]) == is_on
