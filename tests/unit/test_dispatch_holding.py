"""`Dispatch` in order, whose workers take items at different rates: none waits without end for an item."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time

import numpy as np
import pytest
import torch
import torch.utils.data

from faults.proc import Snapshot
from ringloader import DataLoader, Dispatch

pytestmark = pytest.mark.rings_only


class Items:
    """Numbers; large ones are arrays of them."""

    def __init__(self, n, elements=1, seconds=0.0):
        self.n = n
        self.elements = elements
        self.seconds = seconds

    def __iter__(self):
        for number in range(self.n):
            time.sleep(self.seconds)
            yield torch.full((self.elements,), number)


class Keeps:
    """A filter: of these workers' items, one in so many; all of the others'."""

    def __init__(self, workers, one_in, dropping):
        self.workers = workers
        self.one_in = one_in
        self.dropping = dropping

    def __call__(self, item):
        number = int(item[0])
        if number % self.workers not in self.dropping:
            return True
        return self.one_in > 0 and number // self.workers % self.one_in == self.one_in - 1


class Strided(torch.utils.data.IterableDataset):
    """The items that each worker of a Dispatch gets, for torch's own loader."""

    def __init__(self, items, keeps):
        self.items = items
        self.keeps = keeps

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        return filter(self.keeps, itertools.islice(self.items, info.id, None, info.num_workers))


def firsts(loader):
    """The number of each item of each batch, whose elements must all be that number."""
    found = []
    for batch in loader:
        assert (batch == batch[..., :1]).all()
        found.append(batch[..., 0].tolist())
    return found


@pytest.fixture
def snapshot():
    return Snapshot.take()


@pytest.mark.parametrize("batch_size", [None, pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("dropping", [{0}, {1}, {0, 1}])
def test_a_filter_may_drop_all_items_of_a_worker(batch_size, dropping, snapshot):
    keeps = Keeps(3, 0, dropping)
    loader = DataLoader(Dispatch(Items(600), prefetch=4).filter(keeps), batch_size, num_workers=3, timeout=60)
    expected = torch.utils.data.DataLoader(Strided(Items(600), keeps), batch_size, num_workers=3)
    assert firsts(loader) == firsts(expected)
    del loader
    snapshot.assert_nothing_left()


@pytest.mark.parametrize("seed", range(6))
def test_random_filters_give_what_torch_gives_of_strided_workers(seed):
    chance = random.Random(seed)
    workers = chance.randint(1, 4)
    dropping = {worker for worker in range(workers) if chance.random() < 0.6}
    keeps = Keeps(workers, chance.choice([0, 7, 40]), dropping)
    items = Items(chance.choice([0, 1, 50, 900]), chance.choice([1, 5000]))
    batch_size = chance.choice([None, 1, 3, 16])
    options = {
        "num_workers": workers,
        "prefetch_factor": chance.choice([1, 2, 5]),
        "persistent_workers": chance.random() < 0.5,
        "timeout": 60,
    }
    prefetch = chance.choice([1, 2, 16])
    loader = DataLoader(Dispatch(items, prefetch=prefetch).filter(keeps), batch_size, **options)
    expected = firsts(torch.utils.data.DataLoader(Strided(items, keeps), batch_size, **options))
    for _ in range(2):
        assert firsts(loader) == expected


def test_items_larger_than_the_room_are_held_too():
    """A worker's ring is full by bytes while items are allowed: the source must be read on all the same."""
    keeps = Keeps(2, 0, {0})
    # What one worker gets is less than may be held, but not with the holes that the allocator has between.
    # How much the worker takes meanwhile is a matter of time.
    items = Items(100, 1 << 17)
    loader = DataLoader(
        Dispatch(items).filter(keeps), None, num_workers=2, max_shared_bytes=6 << 20, timeout=60
    )
    assert firsts(loader) == list(range(1, 100, 2))


def test_epochs_that_are_abandoned_while_items_are_held(snapshot):
    keeps = Keeps(2, 100, {0})
    loader = DataLoader(
        Dispatch(Items(2000), prefetch=2).filter(keeps),
        None,
        num_workers=2,
        persistent_workers=True,
        timeout=60,
    )
    expected = torch.utils.data.DataLoader(Strided(Items(2000), keeps), None, num_workers=2)
    for taken in (1, 0, 3):
        iterator = iter(loader)
        for _ in range(taken):
            next(iterator)
    assert firsts(loader) == firsts(expected)
    loader._iterator._shutdown_workers()
    del loader, iterator
    snapshot.assert_nothing_left()


def test_a_slow_source_sends_no_more_messages_than_their_ring_holds():
    """Each item comes after the worker has said that it waits."""
    keeps = Keeps(1, 0, set())
    loader = DataLoader(
        Dispatch(Items(24, seconds=0.15)).filter(keeps), None, num_workers=1, prefetch_factor=1, timeout=60
    )
    assert firsts(loader) == list(range(24))


class Heavy(Items):
    """Objects whose bytes are their own."""

    def __iter__(self):
        for number in range(self.n):
            yield torch.full((1 << 18,), number)


def test_what_cannot_be_held_any_more_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr("ringloader._dispatch.process._LEAST_HELD", 1 << 20)
    dataset = Dispatch(Heavy(10_000), prefetch=2).filter(Keeps(2, 0, {0}))
    loader = DataLoader(dataset, None, num_workers=2, max_shared_bytes=16 << 20, timeout=60)
    with pytest.raises(RuntimeError, match=r"holds \d+ items \(\d+ bytes; at most 8388608\).*in_order=False"):
        list(loader)


def test_a_hungry_worker_that_dies_is_torchs_error(snapshot):
    loader = DataLoader(Dispatch(Items(10**9)).filter(Keeps(2, 0, {0})), None, num_workers=2)
    iterator = iter(loader)
    time.sleep(0.5)
    os.kill(iterator._workers[0].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        next(iterator)
    del iterator, loader
    snapshot.assert_nothing_left()


class FailsAt(Items):
    """A source with an error in the midst, after which it goes on."""

    def __init__(self, n, at):
        super().__init__(n)
        self.at = at

    def __iter__(self):
        return _Failing(super().__iter__(), self.at)


class _Failing:
    def __init__(self, items, at):
        self.items = items
        self.at = at

    def __iter__(self):
        return self

    def __next__(self):
        item = next(self.items)
        if int(item[0]) == self.at:
            raise KeyError(f"item {self.at}")
        return item


def test_an_error_of_the_source_that_is_held_comes_in_its_turn():
    loader = DataLoader(
        Dispatch(FailsAt(400, 301), prefetch=2).filter(Keeps(2, 0, {0})), None, num_workers=2, timeout=60
    )
    iterator, found = iter(loader), []
    while True:
        try:
            found.append(int(next(iterator)[0]))
        except KeyError as error:
            assert "item 301" in str(error)
            found.append(301)
        except StopIteration:
            break
    assert found == list(range(1, 400, 2))


def odd_is_an_error(number):
    if number % 2:
        raise ValueError(f"{number} is odd")
    return number


class Bad:
    """A source that raises at each odd number, and goes on."""

    def __init__(self, n):
        self.n = n
        self.number = -1

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        if self.number >= self.n:
            raise StopIteration
        return odd_is_an_error(self.number)


class StridedErrors(torch.utils.data.IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        return map(odd_is_an_error, range(info.id, self.n, info.num_workers))


def batches_and_errors(loader):
    iterator, found = iter(loader), []
    while True:
        try:
            found.append(next(iterator).tolist())
        except ValueError as error:
            found.append(str(error).split()[-3:])
        except StopIteration:
            return found


@pytest.mark.parametrize("dataset", [Dispatch(range(400)).map(odd_is_an_error), Dispatch(Bad(400))])
def test_all_items_of_a_worker_may_raise(dataset, snapshot):
    loader = DataLoader(dataset, 4, num_workers=2, timeout=60)
    found = batches_and_errors(loader)
    assert found[:2] == [[0, 2, 4, 6], ["1", "is", "odd"]]
    assert found == batches_and_errors(torch.utils.data.DataLoader(StridedErrors(400), 4, num_workers=2))
    assert len(found) == 250
    del loader
    snapshot.assert_nothing_left()


class Refills:
    """Arrays over one memory that is filled anew for each."""

    def __iter__(self):
        array = np.zeros(1 << 12)
        for number in range(400):
            array[:] = number
            yield array


def test_bytes_of_items_that_are_held_stay_what_they_were():
    # The items of one worker are dropped, so those of the other are held.
    dataset = Dispatch(Refills(), prefetch=2).filter(Keeps(2, 0, {1}))
    loader = DataLoader(dataset, batch_size=2, num_workers=2, timeout=60)
    assert firsts(loader) == [[number, number + 2] for number in range(0, 400, 4)]
