"""A batch stays its consumer's: to keep, to write to, and without weight of its neighbours."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import time

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from parity.datasets import Blocks, identity, right, value_of
from parity.harness import assert_path
from small_datasets import Made

MEBI = 1 << 20


def check_path(loader_name, iterator):
    if loader_name != "torch":
        assert_path(iterator, 1)


@pytest.mark.parametrize("size", [100, 8192, 8193, 100_000])
@pytest.mark.parametrize("workers", [1, 2])
def test_kept_batches_outlive_everything(loader_class, loader_name, size, workers):
    loader = loader_class(Blocks(60, size), num_workers=workers, batch_size=2)
    iterator = iter(loader)
    check_path(loader_name, iterator)
    kept = list(iterator)
    kept += list(loader)
    del iterator, loader
    gc.collect()
    for number, (blocks, labels) in enumerate(kept):
        first = number % 30 * 2
        assert labels.tolist() == [first, first + 1]
        expected = value_of(labels).to(torch.uint8)
        assert torch.equal(blocks, expected[:, None].expand(2, size))


@pytest.mark.parametrize("size", [100, 100_000])
def test_written_to_in_place(loader_class, size):
    """Writes stay in the batch that was written to, also while later batches arrive."""
    loader = loader_class(Blocks(30, size), num_workers=2, persistent_workers=True)
    for _ in range(2):
        before = None
        for number, (blocks, labels) in enumerate(loader):
            assert labels.tolist() == [number]
            assert bool((blocks == value_of(number)).all())
            blocks.fill_(252)
            labels.mul_(0).sub_(1)
            if before is not None:
                assert bool((before[0] == 252).all()) and before[1].item() == -1
            before = (blocks, labels)


def test_released_by_other_threads(loader_class):
    kept = []
    wrong = []

    def drop():
        while kept or running.is_set():
            try:
                batch = kept.pop()
            except IndexError:
                time.sleep(0.001)
                continue
            if not right(batch):
                wrong.append(int(batch[1]))
            del batch

    running = threading.Event()
    running.set()
    threads = [threading.Thread(target=drop) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        loader = loader_class(Blocks(200, 50_000), num_workers=2, batch_size=None, collate_fn=identity)
        for batch in loader:
            kept.append(batch)
    finally:
        running.clear()
        for thread in threads:
            thread.join()
    assert not wrong


class Refills(Dataset):
    """Returns one and the same tensor again and again, with new content: it must be sent as it was."""

    def __init__(self, elements, *, as_array=False):
        self.tensor = torch.zeros(elements, dtype=torch.int32)
        self.as_array = as_array

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.tensor.fill_(index)
        return self.tensor.numpy() if self.as_array else self.tensor


@pytest.mark.rings_only
@pytest.mark.parametrize("as_array", [False, True])
@pytest.mark.parametrize("elements", [10, 100_000])
def test_dataset_that_refills_one_tensor(loader_class, elements, as_array):
    """Torch moves the tensor itself into shared memory, so that its batches change under the reader."""
    loader = loader_class(
        Refills(elements, as_array=as_array),
        num_workers=1,
        batch_size=None,
        collate_fn=identity,
        prefetch_factor=4,
    )
    for number, value in enumerate(loader):
        assert int(value.min()) == int(value.max()) == number


class CachesCollated:
    """A collate function that keeps what it made, and the batch is one it made before."""

    def __init__(self, *, again):
        self.again = again
        self.cache = []

    def __call__(self, samples):
        batch = torch.utils.data.default_collate(samples)
        self.cache.append(batch)
        # Batches delivered before must still be what they were, though the parent has let go of them.
        for old in self.cache:
            if not all(
                bool((block == value_of(int(label))).all()) for block, label in zip(*old, strict=True)
            ):
                raise AssertionError("a cached batch has changed in the worker")
        return self.cache[0] if self.again and len(self.cache) % 3 == 0 else batch


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("size", [100, 20_000])
def test_collate_that_caches(loader_class, loader_name, size, again):
    loader = loader_class(
        Blocks(120, size),
        num_workers=1,
        batch_size=2,
        collate_fn=CachesCollated(again=again),
        prefetch_factor=3,
    )
    iterator = iter(loader)
    check_path(loader_name, iterator)
    for number, (blocks, labels) in enumerate(iterator):
        repeated = again and (number + 1) % 3 == 0
        assert labels.tolist() == ([0, 1] if repeated else [2 * number, 2 * number + 1])
        assert all(
            bool((block == value_of(int(label))).all()) for block, label in zip(blocks, labels, strict=True)
        )


def mixed(index):
    return {
        "image": torch.zeros(500_000, dtype=torch.uint8),
        "label": torch.full((8,), index),
        "array": np.full(8, index),
        "middle": torch.full((3000,), index),
    }


@pytest.mark.rings_only
def test_one_leaf_is_saved_alone(loader_class):
    """`torch.save`, `pickle` and `deepcopy` write a leaf's own bytes, not those of its batch."""
    for number, batch in enumerate(
        loader_class(Made(mixed, 4), num_workers=1, batch_size=None, collate_fn=identity)
    ):
        for name, limit in (("label", 4096), ("middle", 30_000)):
            leaf = batch[name]
            saved = io.BytesIO()
            torch.save(leaf, saved)
            assert saved.tell() < limit
            assert len(pickle.dumps(leaf)) < limit
            assert leaf.untyped_storage().nbytes() < limit
            assert copy.deepcopy(leaf).untyped_storage().nbytes() < limit
            saved.seek(0)
            assert torch.equal(torch.load(saved), torch.full(leaf.shape, number))
        assert len(pickle.dumps(batch["array"])) < 1024


@pytest.mark.parametrize("size", [100, 100_000])
def test_views_outlive_their_tensor(loader_class, size):
    """`.numpy()`, slices, memoryviews and the autograd graph keep the bytes."""
    loader = loader_class(Blocks(60, size), num_workers=2, batch_size=None, collate_fn=identity)
    kept = []
    for block, label in loader:
        kept.append(
            (
                int(label),
                block.numpy(),
                block[size // 2 :],
                memoryview(block.numpy()),
                block.untyped_storage(),
            )
        )
        del block
    gc.collect()
    for label, array, tail, view, storage in kept:
        assert (array == value_of(label)).all()
        assert bool((tail == value_of(label)).all())
        assert view[0] == view[-1] == storage[0] == value_of(label)


def test_autograd_keeps_its_inputs(loader_class):
    loader = loader_class(Arrays(10_000), num_workers=1, batch_size=None)
    weight = torch.ones(10_000, requires_grad=True)
    losses = []
    for block in loader:
        losses.append((block * weight).sum())
        del block
    gc.collect()
    torch.stack(losses).sum().backward()
    assert torch.equal(weight.grad, torch.full((10_000,), float(sum(range(60)))))


class Arrays(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return np.full(self.size, index, dtype=np.int32)


@pytest.mark.parametrize("size", [10, 100_000])
def test_arrays_are_kept_and_written_to(loader_class, size):
    kept = []
    for array in loader_class(Arrays(size), num_workers=2, batch_size=None, collate_fn=identity):
        assert array.flags.writeable
        array += 1
        kept.append(array[1:])
        del array
    gc.collect()
    assert [(int(a.min()), int(a.max())) for a in kept] == [(i + 1, i + 1) for i in range(60)]
