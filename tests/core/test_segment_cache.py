"""The memory of one epoch, warm for the next, if workers end with their epoch."""

from __future__ import annotations

import gc
import os
import random
import re
import resource
import threading

import pytest
import torch

import ringloader
from faults.failing_datasets import Numbers
from faults.proc import descriptors, mappings
from faults.script import run_script
from parity import harness
from parity.harness import PATHS, assert_path, taking
from ringloader import DataLoader
from ringloader._transport import segment_cache

KIBI = 1 << 10
MEBI = 1 << 20


@pytest.fixture(params=PATHS, autouse=True)
def _path(request):
    with taking(request.param):
        yield


class Epochs(Numbers):
    """Batches that also tell which epoch they are from: told by the main process, before each."""

    epoch = 0

    def __getitem__(self, index):
        return torch.full((self.elements,), 1000 * self.epoch + index)


def segments():
    """The memfds of transports that this process has mapped, each by its inode."""
    gc.collect()
    rings = (line for line in mappings() if "memfd:ringloader" in line)
    return {re.split(r"\s+", line)[4] for line in rings}


def kept_bytes():
    """Memory behind those that are kept for an epoch to come."""
    rings = [fd for fd, target in descriptors().items() if "memfd:ringloader" in target]
    return sum(512 * os.fstat(fd).st_blocks for fd in rings)


def iterate(loader, workers=2):
    iterator = iter(loader)
    assert_path(iterator, workers)
    during = segments()
    numbers = [int(batch.flatten()[-1]) for batch in iterator]
    assert numbers == list(range(len(numbers)))
    return during


def test_the_next_epoch_has_the_same_memory():
    before = segments()
    loader = DataLoader(Numbers(8, 100 * KIBI), num_workers=2, batch_size=None)
    (first,) = iterate(loader) - before
    assert segments() - before == {first}
    assert kept_bytes() >= 100 * KIBI * 8
    for _ in range(3):
        assert iterate(loader) - before == {first}
    del loader
    assert segments() == before


def test_after_half_an_epoch_too():
    before = segments()
    loader = DataLoader(Numbers(30, 10 * KIBI), num_workers=2, batch_size=None)
    for taken in (0, 1, 7):
        iterator = iter(loader)
        assert [int(next(iterator)[0]) for _ in range(taken)] == list(range(taken))
        del iterator
        assert len(segments() - before) == 1
    (same,) = segments() - before
    assert iterate(loader) - before == {same}


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.limit(300)
def test_workers_that_do_not_fork(method):
    before = segments()
    loader = DataLoader(Numbers(8), num_workers=2, batch_size=None, multiprocessing_context=method)
    (first,) = iterate(loader) - before
    assert iterate(loader) - before == {first}


def test_the_switch(monkeypatch):
    monkeypatch.setenv(segment_cache.SWITCH, "0")
    before = segments()
    loader = DataLoader(Numbers(8), num_workers=2, batch_size=None)
    iterate(loader)
    assert segments() == before


def test_batches_that_are_kept_stay_as_they_are():
    """Of any epoch; other threads give them back while workers fill what is free."""
    before = segments()
    dataset = Epochs(24, 20 * KIBI)
    loader = DataLoader(dataset, num_workers=2, batch_size=None, max_shared_bytes=24 * MEBI)
    generator = random.Random(1)
    kept, seen = [], set()
    for dataset.epoch in range(6):
        for index, batch in enumerate(loader):
            seen |= segments() - before if index == 0 else set()
            assert batch.eq(1000 * dataset.epoch + index).all()
            if generator.random() < 0.6:
                kept.append((1000 * dataset.epoch + index, batch))
            del batch
            if len(kept) > 20:
                generator.shuffle(kept)
                given_back = kept[10:]
                del kept[10:]
                thread = threading.Thread(target=given_back.clear)
                thread.start()
                assert all(batch.eq(number).all() for number, batch in kept)
                thread.join()
    assert len(seen) == 1, "new memory, where the old was to be compared with"
    assert all(batch.eq(number).all() for number, batch in kept)
    del loader
    assert all(batch.eq(number).all() for number, batch in kept)


def test_counters_begin_at_zero_again():
    loader = DataLoader(Numbers(8, 100), num_workers=2, batch_size=None)
    for _ in range(2):
        before = segments()
        iterate(loader)
        assert ringloader.report(loader).counters["batches"] == 8
    assert segments() == before, "the second epoch had new memory"


@pytest.mark.parametrize(("name", "value"), [("num_workers", 3), ("prefetch_factor", 4)])
def test_another_plan_has_other_memory(name, value):
    before = segments()
    loader = DataLoader(Numbers(12), num_workers=2, batch_size=None, max_shared_bytes=30 * MEBI)
    (first,) = iterate(loader) - before
    setattr(loader, name, value)
    (second,) = iterate(loader, loader.num_workers) - before
    assert second != first
    assert segments() - before == {second}


def test_a_default_that_has_changed_much_has_other_memory(monkeypatch):
    before = segments()
    available = 1 << 30
    monkeypatch.setattr(ringloader._native, "available_memory", lambda: available)
    loader = DataLoader(Numbers(8), num_workers=2, batch_size=None)
    (first,) = iterate(loader) - before
    available = 600 * MEBI
    assert iterate(loader) - before == {first}
    available = 100 * MEBI
    (second,) = iterate(loader) - before
    assert second != first


def test_what_is_kept_is_available_to_its_loader(monkeypatch):
    """And not taken for memory that another process has."""
    offered = []
    share = ringloader._transport.budget.share_per_worker
    monkeypatch.setattr(ringloader._native, "available_memory", lambda: 100 * MEBI)
    monkeypatch.setattr(
        ringloader._transport.budget, "share_per_worker", lambda *all: offered.append(all[2]) or share(*all)
    )
    loader = DataLoader(Numbers(8, 100 * KIBI), num_workers=2, batch_size=None)
    iterate(loader)
    iterate(loader)
    assert offered[0] == 100 * MEBI
    assert offered[1] >= 100 * MEBI + 100 * KIBI * 8


def test_no_more_is_kept_than_the_bound(monkeypatch):
    before = kept_bytes()
    monkeypatch.setattr(segment_cache, "MOST_BYTES", 8 * MEBI)
    # Each batch is 1 MiB, and all of them are on their way at once.
    loader = DataLoader(Numbers(20, 128 * KIBI), num_workers=2, prefetch_factor=10, batch_size=None)
    assert [int(batch[-1]) for batch in loader] == list(range(20))
    # Beside the structures.
    assert 4 * MEBI < kept_bytes() - before <= 8 * MEBI + 256 * KIBI


def test_what_others_keep_counts(monkeypatch):
    before = kept_bytes()
    monkeypatch.setattr(segment_cache, "MOST_BYTES", 8 * MEBI)
    loaders = [DataLoader(Numbers(12, 128 * KIBI), num_workers=2, batch_size=None) for _ in range(3)]
    for loader in loaders:
        iterate(loader)
    assert 4 * MEBI < kept_bytes() - before <= 8 * MEBI + 3 * 256 * KIBI


def test_no_more_loaders_keep_memory_than_the_bound():
    before = segments()
    loaders = [
        DataLoader(Numbers(4), num_workers=1, batch_size=None) for _ in range(segment_cache.MOST_LOADERS + 2)
    ]
    last = [iterate(loader, 1) for loader in loaders][-1]
    assert len(segments() - before) == segment_cache.MOST_LOADERS
    assert last & segments(), "the oldest go first"
    # One that is there already drives no other out.
    there = segments()
    iterate(loaders[-1], 1)
    assert [int(one[0]) for one, _ in zip(loaders[-1], loaders[-1], strict=True)] == list(range(4))
    assert len(segments()) == len(there)


def test_two_iterators_of_a_loader():
    before = segments()
    loader = DataLoader(Numbers(12, 10 * KIBI), num_workers=1, batch_size=None)
    for _ in range(3):
        pairs = zip(loader, loader, strict=True)
        assert [(int(one[0]), int(two[0])) for one, two in pairs] == [(i, i) for i in range(12)]
        del pairs
        assert len(segments() - before) == 1


@pytest.mark.parametrize("kind", ["persistent", "temporary"])
def test_loaders_that_keep_nothing(kind):
    before = segments()
    loader = DataLoader(Numbers(8), num_workers=2, batch_size=None, persistent_workers=kind == "persistent")
    iterator = iter(loader)
    if kind == "temporary":
        del loader
    assert [int(batch[0]) for batch in iterator] == list(range(8))
    loader = iterator = None
    assert segments() == before


class Incomparable(DataLoader):
    __hash__ = None

    def __eq__(self, other):
        raise NotImplementedError("loaders are not compared")


class Alike(DataLoader):
    def __hash__(self):
        return 1

    def __eq__(self, other):
        return True


@pytest.mark.parametrize("cls", [Incomparable, Alike])
def test_loaders_that_compare_as_they_like(cls):
    """Each has its own memory, and its own path."""
    before = segments()
    loaders = [cls(Numbers(length), num_workers=1, batch_size=None) for length in (4, 8)]
    for loader in loaders:
        iterate(loader, 1)
    both = segments()
    assert len(both - before) == 2
    for loader in loaders:
        iterate(loader, 1)
    assert segments() == both
    assert [ringloader.report(loader).counters["batches"] for loader in loaders] == [4, 8]


@pytest.mark.parametrize(
    ("limit", "soft"),
    [(resource.RLIMIT_NOFILE, 90), (resource.RLIMIT_AS, 1 << 46)],
    ids=["files", "addresses"],
)
def test_nothing_is_kept_where_a_limit_is_tight(tmp_path, limit, soft):
    """In a program of its own: this one may have more open, for torch's loader loses some."""
    body = f"""
        import resource
        from faults.proc import mappings
        from parity import harness

        def segments():
            gc.collect()
            return {{line.split()[4] for line in mappings() if "memfd:ringloader" in line}}

        with harness.taking({harness.expected_path!r}):
            loader = DataLoader(Numbers(8), num_workers=2, batch_size=None)
            allowed = resource.getrlimit({limit})
            resource.setrlimit({limit}, ({soft}, allowed[1]))
            assert len(list(loader)) == 8
            assert not segments()
            resource.setrlimit({limit}, allowed)
            assert len(list(loader)) == 8
            assert segments()
            harness.assert_path(loader, 2)
    """
    ended = run_script("ringloader", body, tmp_path)
    assert (ended.code, ended.err) == (0, "")


def test_little_is_kept_where_little_memory_is_left(monkeypatch):
    before = kept_bytes()
    loader = DataLoader(Numbers(20, 128 * KIBI), num_workers=2, batch_size=None, max_shared_bytes=64 * MEBI)
    iterator = iter(loader)
    monkeypatch.setattr(ringloader._native, "available_memory", lambda: 8 * MEBI)
    assert [int(batch[-1]) for batch in iterator] == list(range(20))
    assert kept_bytes() - before <= 2 * MEBI + 256 * KIBI


def test_batches_that_are_kept_leave_the_next_epochs_alone():
    """One memory has one bound for what the user keeps: with much of that used up, the next has another."""
    loader = DataLoader(Numbers(100), num_workers=1, batch_size=None)
    kept = list(loader)
    iterate(loader, 1)
    assert ringloader.report(loader).counters["copied_out"] == 0
    assert all(batch.eq(index).all() for index, batch in enumerate(kept))


def test_memory_that_another_thread_takes_meanwhile():
    """A count of it finds nothing, and no error."""
    loader = DataLoader(Numbers(8), num_workers=1, batch_size=None)
    iterate(loader, 1)
    (_, segment, _) = segment_cache._warm.get(loader)
    assert segment.resident > 0
    engine = segment.take()
    assert segment.resident == 0
    with pytest.raises(RuntimeError, match="another engine"):
        segment.take()
    engine.close()


def test_a_forked_child_has_memory_of_its_own():
    loader = DataLoader(Epochs(8, 10 * KIBI), num_workers=1, batch_size=None)
    held = list(loader)[-1]
    there = segments()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            loader.dataset.epoch = 1
            iterator = iter(loader)
            used = {berth for berth in segments() if berth not in there}
            right = [int(batch[0]) for batch in iterator] == list(range(1000, 1008))
            status = 0 if used and right else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert held.eq(7).all()
    assert segments() == there
    assert [int(batch[0]) for batch in loader] == list(range(8))
    assert held.eq(7).all()
