"""Shared memory is bounded by `max_shared_bytes`, and no batch waits for another to be given back."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from faults.proc import shared_resident_kib, wait_until
from parity import harness
from parity.datasets import Blocks, identity, right
from parity.harness import assert_path

MEBI = 1 << 20


@pytest.mark.rings_only
@pytest.mark.limit(300)
def test_list_of_more_than_the_budget(loader_class):
    """Holding batches never waits for one to be given back."""
    loader = loader_class(
        Blocks(32, MEBI), num_workers=2, batch_size=None, collate_fn=identity, max_shared_bytes=8 * MEBI
    )
    iterator = iter(loader)
    assert_path(iterator, 2)
    kept = list(iterator)
    assert len(kept) == 32 and all(map(right, kept))


@pytest.mark.rings_only
@pytest.mark.limit(300)
def test_released_in_any_order(loader_class):
    loader = loader_class(
        Blocks(120, MEBI // 4),
        num_workers=2,
        batch_size=None,
        collate_fn=identity,
        max_shared_bytes=16 * MEBI,
    )
    generator = np.random.default_rng(1)
    kept = []
    for batch in loader:
        kept.append(batch)
        while len(kept) > generator.integers(1, 30):
            assert right(kept.pop(generator.integers(len(kept))))
    assert all(map(right, kept))


@pytest.mark.rings_only
@pytest.mark.limit(300)
@pytest.mark.parametrize("size", [3 * MEBI, 20 * MEBI])
def test_oversize_batches_travel_and_say_so_once(loader_class, size, caplog):
    """A batch larger than half a worker's share of the budget."""
    import ringloader

    loader = loader_class(
        Blocks(6, size), num_workers=2, batch_size=None, collate_fn=identity, max_shared_bytes=8 * MEBI
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        iterator = iter(loader)
        kept = list(iterator)
    assert len(kept) == 6 and all(map(right, kept))
    assert ringloader.report(iterator).counters["oversize"] == 6
    said = [str(warning.message) for warning in caught] + [entry.getMessage() for entry in caplog.records]
    told = [text for text in said if "max_shared_bytes" in text]
    assert len(told) == 1, said
    assert told[0].startswith(
        f"ringloader: a batch of {size // MEBI} MiB is larger than half of its worker's 4 MiB"
    )
    enough = re.search(r"pass max_shared_bytes=(\d+ \* 2\*\*20), or", told[0])
    assert eval(enough[1]) >= 2 * 2 * size


@pytest.mark.rings_only
def test_oversize_among_small_ones_keeps_order(loader_class):
    class Growing(Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            return torch.full((6 * MEBI if index % 4 == 3 else 20_000,), index, dtype=torch.uint8)

    loader = loader_class(
        Growing(), num_workers=2, batch_size=None, collate_fn=identity, max_shared_bytes=8 * MEBI
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = [(int(block[0]), int(block[-1]), block.numel()) for block in loader]
    assert [value[0] for value in values] == [value[1] for value in values] == list(range(12))


@pytest.mark.rings_only
@pytest.mark.limit(300)
def test_shared_memory_stays_within_the_budget(loader_class):
    """Many batches pass; what is resident in this process is bounded by the budget."""
    before = shared_resident_kib()
    loader = loader_class(
        Blocks(120, MEBI), num_workers=2, batch_size=None, collate_fn=identity, max_shared_bytes=32 * MEBI
    )
    highest = 0
    for batch in loader:
        assert right(batch)
        highest = max(highest, shared_resident_kib() - before)
    assert highest < 40 * 1024
    del batch, loader
    gc.collect()
    assert wait_until(lambda: shared_resident_kib() - before < 2048, 10)


def on_their_way(iterator, size):
    """Bytes of batches of `size` bytes, all oversize, that the main process has not taken, with the slots."""
    engine = iterator._transport.engine
    return engine.committed() * size + os.fstat(engine.segment).st_blocks * 512


def at_rest(iterator, size):
    """Returns ``on_their_way`` once the workers have filled what they may: one batch at least."""
    assert wait_until(lambda: on_their_way(iterator, size) >= size, 30)
    seen = [-1, on_their_way(iterator, size)]
    while seen[-1] != seen[-2] or len(seen) < 5:
        time.sleep(0.03)
        seen.append(on_their_way(iterator, size))
    return max(seen)


@pytest.mark.rings_only
@pytest.mark.limit(300)
@pytest.mark.parametrize("path", harness.PATHS)
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize(("size", "share"), [(5 * MEBI, 8 * MEBI), (12 * MEBI, 8 * MEBI)])
def test_oversize_batches_stay_within_the_budget(loader_class, size, share, in_order, path):
    """A worker's share, or one batch if that is more, whatever the user holds of his batches."""
    with harness.taking(path):
        loader = loader_class(
            Blocks(16, size), num_workers=2, batch_size=None, collate_fn=identity, in_order=in_order,
            max_shared_bytes=2 * share, prefetch_factor=6, persistent_workers=True,
        )  # fmt: skip
        # Control structures and indices.
        most = 2 * max(share, size + MEBI // 16) + MEBI // 4
        for _ in range(2):
            kept, highest = [], 0
            iterator = iter(loader)
            assert_path(iterator, 2)
            for number, batch in enumerate(iterator):
                kept.append(batch)
                if number in (0, 1, 7):
                    highest = max(highest, at_rest(iterator, size))
            assert highest <= most, (highest / MEBI, most / MEBI)
            assert sorted(int(label) for _, label in kept) == list(range(16))
            assert all(map(right, kept))
            del kept, batch


def kept_segments(workers):
    """Bytes of the segments of oversize batches that each worker has open, by their inodes."""
    found = []
    for worker in workers:
        found.append({})
        for link in Path(f"/proc/{worker.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if "ringloader-batch" in str(link.readlink()):
                    state = link.stat()
                    found[-1][state.st_ino] = state.st_blocks * 512
    return found


def keep_nothing(workers):
    return not any(kept_segments(workers))


@pytest.mark.rings_only
@pytest.mark.limit(300)
@pytest.mark.parametrize("path", harness.PATHS)
def test_memory_of_oversize_batches_is_used_again(loader_class, path):
    """Never while a batch in it is held; two segments a worker, which are given back when it is idle."""
    size, share = 5 * MEBI, 8 * MEBI
    with harness.taking(path):
        loader = loader_class(
            Blocks(60, size), num_workers=2, batch_size=None, collate_fn=identity, max_shared_bytes=2 * share,
            persistent_workers=True,
        )  # fmt: skip
        for _ in range(2):
            kept, segments = [], set()
            iterator = iter(loader)
            assert_path(iterator, 2)
            for number, batch in enumerate(iterator):
                kept.append(batch)
                if number % 7 == 6:
                    assert all(map(right, kept))
                if number % 3:
                    kept.pop(number % len(kept))
                for worker in kept_segments(iterator._workers):
                    segments |= worker.keys()
                    # One more while its batch is sent.
                    assert len(worker) <= 3
            assert len(segments) < 60
            assert all(map(right, kept)) and len(kept) == 20
            del kept, batch
            assert wait_until(functools.partial(keep_nothing, iterator._workers), 20)
        del iterator, loader


class Unequal(Blocks):
    """The first worker is slow, for the first batches."""

    def __getitem__(self, index):
        if get_worker_info().id == 0 and index < 4:
            time.sleep(0.3)
        return super().__getitem__(index)


@pytest.mark.rings_only
@pytest.mark.parametrize("path", harness.PATHS)
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("held", [2, 400])
def test_more_batches_on_their_way_than_slots(loader_class, monkeypatch, held, in_order, path):
    """Workers wait for the parent, which may hold half of the slots: no other batch shows in its own."""
    import ringloader

    made = ringloader._native.Engine

    def of_many_workers(_workers, most_tasks, share):
        # Only the first of them are started. Each has 32 slots, with windows for batches of half its share.
        return made(150, most_tasks, share)

    monkeypatch.setattr(ringloader._native, "Engine", of_many_workers)
    with harness.taking(path):
        loader = loader_class(
            Unequal(400, 5_000), num_workers=2, batch_size=None, collate_fn=identity, in_order=in_order,
            max_shared_bytes=1 << 28, prefetch_factor=80, persistent_workers=True,
        )  # fmt: skip
        for _ in range(2):
            kept, labels = [], []
            iterator = iter(loader)
            assert_path(iterator, 2)
            for number, batch in enumerate(iterator):
                if number in (0, 90, 200):
                    time.sleep(0.2)
                    assert iterator._transport.engine.committed() <= 2 * 32
                labels.append(int(batch[1]))
                kept.append(batch)
                assert right(batch) and right(kept[0])
                del kept[: max(0, len(kept) - held)]
            assert labels == list(range(400)) if in_order else sorted(labels) == list(range(400))
            assert all(map(right, kept))
            assert ringloader.report(iterator).counters["oversize"] == 0
            del kept, batch


@pytest.mark.rings_only
def test_counters_say_how_leaves_travelled(loader_class):
    import ringloader

    class Leaves(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return {"big": torch.zeros(50_000), "small": torch.tensor(index), "set": {1, 2}}

    loader = loader_class(Leaves(), num_workers=1, batch_size=None, collate_fn=identity)
    iterator = iter(loader)
    assert len(list(iterator)) == 8
    taken = ringloader.report(iterator)
    assert isinstance(taken.reason, str)
    assert set(taken.counters) >= {"batches", "in_place", "copied", "pickled", "oversize"}
    assert taken.counters["batches"] == 8
    assert taken.counters["copied"] >= 8
    assert taken.counters["pickled"] >= 8
    assert taken.counters["oversize"] == 0


@pytest.mark.rings_only
def test_collated_batches_are_written_in_place(loader_class):
    """`default_collate` in the worker writes into the slot: nothing is copied there."""
    import ringloader

    loader = loader_class(Blocks(40, 50_000), num_workers=1, batch_size=4)
    iterator = iter(loader)
    assert len(list(iterator)) == 10
    assert ringloader.report(iterator).counters["in_place"] >= 10
