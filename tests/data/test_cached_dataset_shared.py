"""``CachedDataset``: workers, threads, ranks and forked children share a cache; its memory comes back."""

import copy
import gc
import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cached_parts import Rows
from torch.utils.data import DataLoader as TorchLoader

import ringloader
from ringloader import CachedDataset

pytestmark = pytest.mark.rings_only


FORK, SPAWN, SERVER = (
    {"num_workers": 2, "multiprocessing_context": method} for method in ("fork", "spawn", "forkserver")
)


WAYS = [
    *((ringloader.DataLoader, FORK, has_path) for has_path in (False, True)),
    (ringloader.DataLoader, SERVER | {"persistent_workers": True}, True),
    (ringloader.DataLoader, {"num_workers": 2, "worker_method": "thread"}, False),
    (ringloader.DataLoader, {"num_workers": 0}, True),
    (TorchLoader, FORK, False),
    *(
        pytest.param(loader, SPAWN, has_path, marks=pytest.mark.slow)
        for loader in (ringloader.DataLoader, TorchLoader)
        for has_path in (False, True)
    ),
]


@pytest.mark.parametrize(("loader", "options", "has_path"), WAYS)
def test_workers_of_any_kind_fill_one_cache(loader, options, has_path, tmp_path):
    dataset = Rows(24)
    cached = CachedDataset(dataset, path=tmp_path / "cache" if has_path else None)
    batches = loader(cached, 4, **options)
    for _ in range(2):
        assert [label.tolist() for _, label in batches] == [list(range(at, at + 4)) for at in range(0, 24, 4)]
    assert dataset.asked.tolist() == [1] * 24
    assert cached[7][0].eq(7).all()
    stats = cached.stats()
    assert (stats["items"], stats["misses"], stats["hits"]) == (24, 24, 25)


def test_a_cache_serves_a_pool():
    dataset = Rows(12)
    cached = CachedDataset(dataset)
    with ringloader.WorkerPool(2) as pool:
        for _ in range(2):
            loader = ringloader.DataLoader(cached, 3, worker_pool=pool)
            assert sum(label.sum() for _, label in loader) == 66
    assert dataset.asked.tolist() == [1] * 12


class Slow(Rows):
    """Held until all are asked at once."""

    def __init__(self, length, parties):
        super().__init__(length)
        self.barrier = threading.Barrier(parties)

    def __getitem__(self, index):
        self.barrier.wait(10)
        return super().__getitem__(index)


def test_threads_that_want_one_sample_at_once_all_get_it():
    cached = CachedDataset(Slow(1, 3))
    with ThreadPoolExecutor(3) as pool:
        assert all(label == 0 for _, label in pool.map(cached.__getitem__, [0] * 3))
    stats = cached.stats()
    assert (stats["items"], stats["misses"]) == (1, 3)


class Mirrored(Rows):
    """Reads the cache while it makes a sample for it."""

    cached = None

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return sample if index < 4 else (self.cached[7 - index][0].flip(0), index)


def test_a_dataset_may_read_its_own_cache():
    dataset = Mirrored(8)
    dataset.cached = cached = CachedDataset(dataset)
    loader = ringloader.DataLoader(cached, 2, num_workers=2)
    assert [label.tolist() for _, label in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert cached.stats()["items"] == 8


def test_a_child_that_is_forked_while_threads_make_samples_goes_on():
    dataset = Rows(400, (200,))
    cached = CachedDataset(dataset)
    stop = threading.Event()

    def fill(first):
        while not stop.is_set():
            for index in range(first, 400, 2):
                cached[index]
            cached.clear()

    def look():
        for index in range(400):
            assert cached[index][0].eq(index).all()

    threads = [threading.Thread(target=fill, args=(first,)) for first in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            child = multiprocessing.get_context("fork").Process(target=look)
            child.start()
            child.join(30)
            assert child.exitcode == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_clearing_while_others_read_gives_whole_samples(tmp_path):
    dataset = Rows(20, (5000,))
    for path in (None, tmp_path / "cache"):
        cached = CachedDataset(dataset, path=path)
        stop = threading.Event()

        def read(first, cached=cached, stop=stop):
            while not stop.is_set():
                for index in range(first, 20, 3):
                    image, label = cached[index]
                    assert label == index and image.eq(index).all()

        with ThreadPoolExecutor(3) as pool:
            reads = [pool.submit(read, first) for first in range(3)]
            for _ in range(100):
                cached.clear()
            stop.set()
            for one in reads:
                one.result()
        cached.clear()
        assert cached.stats()["items"] == cached.stats()["bytes"] == 0


def taken(cached):
    return os.fstat(cached._samples.filenos()[-1]).st_blocks * 512


def names_mapped():
    """Returns the mappings of this process that have a name in /dev/shm; other tests make names there too."""
    return {line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line}


def test_memory_is_taken_as_it_fills_and_given_back():
    dataset = Rows(100, (25_000,))
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    named = names_mapped()
    cached = CachedDataset(dataset)
    empty = taken(cached)
    assert empty < 64 << 10
    for index in range(100):
        cached[index]
    assert 10_000_000 < taken(cached) - empty < 11_000_000
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors + 1
    assert names_mapped() == named
    cached.clear()
    assert taken(cached) <= empty + (64 << 10)
    assert cached[3][1] == 3
    del cached
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_ranks_of_one_machine_divide_what_is_left(monkeypatch):
    alone = CachedDataset(Rows(2)).stats()["max_bytes"]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert 0.15 < CachedDataset(Rows(2)).stats()["max_bytes"] / alone < 0.35


def blocks(cached):
    return os.fstat(cached._samples.filenos()[-1]).st_blocks * 512


def test_what_is_cleared_leaves_nothing():
    cached = CachedDataset(Rows(50, (100,)))
    sizes = []
    for _ in range(20):
        assert all(cached[index][1] == index for index in range(50))
        cached.clear()
        sizes.append(blocks(cached))
    assert max(sizes[1:]) <= sizes[1] + 4096


def in_child(work):
    """Runs ``work`` in a forked child. Returns the text that it returns."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = work()
        except BaseException as error:
            text = repr(error)
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    os.waitpid(child, 0)
    return text


class Shifted(Rows):
    def __init__(self, length, by):
        super().__init__(length, (30,))
        self.by = by

    def __getitem__(self, index):
        return super().__getitem__(index)[0] + self.by


@pytest.mark.parametrize("has_path", [False, True])
@pytest.mark.parametrize("has_mapped", [False, True])
def test_a_descriptor_that_other_code_has_closed_is_no_other_caches(tmp_path, has_path, has_mapped):
    def made(by):
        return CachedDataset(Shifted(10, by), path=tmp_path / f"cache{by}" if has_path else None)

    def read(cached):
        return [int(cached[index][0]) for index in range(10)]

    first = made(100)
    expected = read(first)
    if not has_mapped:
        first = copy.copy(first)
        first._samples = reopened(first)

    def child():
        fd = first._samples.filenos()[-1]
        second = made(200)
        read(second)
        # As where a daemon closes all descriptors, and its next file gets the number.
        os.dup2(second._samples.filenos()[-1], fd)
        found = read(first), read(second)
        del first.__dict__["_samples"]
        gc.collect()
        return repr((*found, os.path.samestat(os.fstat(fd), os.fstat(second._samples.filenos()[-1]))))

    assert in_child(child) == repr((expected, [index + 200 for index in range(10)], True))
    # In the parent nothing is lost, and so nothing is made again.
    asked = first.dataset.asked.clone()
    assert (read(first), first.stats()["items"]) == (expected, 10)
    assert torch.equal(first.dataset.asked, asked)


def reopened(cached):
    """Returns the same samples, of which none was read by this object."""
    return ringloader._native.SampleCache.attach(cached._samples.filenos(), cached._samples.terms)
