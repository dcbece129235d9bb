"""Batches that are prepared before their turn: none is lost, none early, no more are ahead than may be."""

import gc
import threading
import time
import weakref

import pytest
import torch
from torch.utils.data import IterableDataset, Sampler

from ringloader import DataLoader
from ringloader._core.with_workers import WorkersIterator

pytestmark = pytest.mark.rings_only


class Placement:
    """Multiplies by ten, and writes down what it is asked for. ``failing``: what the n-th call raises."""

    def __init__(self, depth=2, prepare_fails=None, result_fails=None):
        self.depth = depth
        self.told = []
        self._prepare_fails = prepare_fails or {}
        self._result_fails = result_fails or {}
        self.alive = weakref.WeakSet()

    def prepare(self, arrival):
        number = int(arrival.unpack()[0])
        self.told.append(("prepare", number))
        error = self._prepare_fails.pop(number, None)
        if error is not None:
            raise error
        prepared = Prepared(self, number)
        self.alive.add(prepared)
        return prepared

    def asked(self, number):
        self.told.append(("result", number))
        error = self._result_fails.pop(number, None)
        if error is not None:
            raise error
        return number * 10

    def stop(self):
        pass

    def abandon(self):
        pass

    def close(self):
        self.told.append(("close", None))


class Prepared:
    def __init__(self, placement, number):
        self._placement, self._number = placement, number

    def result(self):
        return self._placement.asked(self._number)


@pytest.fixture
def placed(monkeypatch):
    def put(**options):
        placement = Placement(**options)
        monkeypatch.setattr(WorkersIterator, "_placement", placement)
        return placement

    return put


def numbers(count):
    return [torch.full((2,), number) for number in range(count)]


def ready(iterator, count):
    """Waits until so many results are committed and not taken."""
    deadline = time.monotonic() + 10
    while iterator._transport.engine.committed() < count:
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_no_more_are_ahead_than_the_depth(placed, depth):
    placement = placed(depth=depth)
    iterator = iter(DataLoader(numbers(12), batch_size=None, num_workers=2, prefetch_factor=3))
    ready(iterator, 6)
    assert next(iterator) == 0
    assert placement.told == [("prepare", number) for number in range(depth + 1)] + [("result", 0)]
    assert list(iterator) == [number * 10 for number in range(1, 12)]


def test_an_interrupted_preparation_is_done_again_in_its_turn(placed):
    placement = placed(prepare_fails={0: KeyboardInterrupt(), 2: KeyboardInterrupt()})
    iterator = iter(DataLoader(numbers(6), batch_size=None, num_workers=2, prefetch_factor=3))
    got = []
    for _ in range(8):
        try:
            got.append(next(iterator))
        except KeyboardInterrupt:
            got.append(None)
    assert [number for number in got if number is not None] == [0, 10, 20, 30, 40, 50]
    assert got.count(None) == 2 and got[0] is None
    assert placement.told.count(("prepare", 2)) == 2
    assert next(iterator, "end") == "end"


def test_a_batch_whose_result_fails_is_asked_again(placed):
    placed(result_fails={1: MemoryError("full")})
    iterator = iter(DataLoader(numbers(4), batch_size=None, num_workers=1))
    assert next(iterator) == 0
    with pytest.raises(MemoryError, match="full"):
        next(iterator)
    assert iterator._rcvd_idx == 1
    assert list(iterator) == [10, 20, 30]


def test_positions_are_those_of_what_was_handed_out(placed):
    placed(depth=3)
    iterator = iter(DataLoader(numbers(12), batch_size=None, num_workers=2, prefetch_factor=3))
    for number in range(6):
        ready(iterator, 2)
        assert next(iterator) == number * 10
        assert (iterator._rcvd_idx, iterator._send_idx) == (number + 1, number + 7)
        assert iterator._tasks_outstanding == 6


def test_threads_get_a_batch_each(placed):
    placed()
    iterator = iter(DataLoader(numbers(400), batch_size=None, num_workers=2))
    got = [[] for _ in range(4)]

    def take(into):
        into.extend(iterator)

    threads = [threading.Thread(target=take, args=(into,)) for into in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(number for into in got for number in into) == [number * 10 for number in range(400)]
    assert all(into == sorted(into) for into in got)


class Slow(Sampler):
    """Says at each index how many batches were handed out before it was read."""

    def __init__(self, handed_out, count):
        self._handed_out, self._count = handed_out, count
        self.read = []

    def __iter__(self):
        for number in range(self._count):
            self.read.append(len(self._handed_out))
            yield number

    def __len__(self):
        return self._count


def test_the_sampler_is_read_when_a_batch_is_handed_out(placed):
    placed(depth=5)
    handed_out = []
    sampler = Slow(handed_out, 12)
    iterator = iter(
        DataLoader(numbers(12), batch_size=None, sampler=sampler, num_workers=2, prefetch_factor=2)
    )
    for _ in range(8):
        ready(iterator, 1)
        handed_out.append(next(iterator))
    handed_out.extend(iterator)
    assert sampler.read == [0, 0, 0, 0, *range(8)]


class Parts(IterableDataset):
    def __iter__(self):
        worker = torch.utils.data.get_worker_info().id
        return iter(numbers(10)[: 2 + 6 * worker])


@pytest.mark.parametrize("persistent", [False, True])
def test_the_end_of_a_worker_waits_for_its_turn(placed, persistent):
    placed(depth=6)
    arguments = {
        "batch_size": None,
        "num_workers": 2,
        "prefetch_factor": 4,
        "persistent_workers": persistent,
    }
    loader = DataLoader(Parts(), **arguments)
    torchs = [int(batch[0]) * 10 for batch in torch.utils.data.DataLoader(Parts(), **arguments)]
    for _ in range(2):
        iterator = iter(loader)
        ready(iterator, 6)
        assert list(iterator) == torchs


@pytest.mark.parametrize("persistent", [False, True])
def test_what_is_ahead_goes_with_its_epoch(placed, persistent):
    placement = placed(depth=4)
    loader = DataLoader(
        numbers(12), batch_size=None, num_workers=2, prefetch_factor=3, persistent_workers=persistent
    )
    for epoch in range(3):
        iterator = iter(loader)
        ready(iterator, 6)
        assert next(iterator) == 0
        if epoch and persistent:
            # Committed batches may be of the epoch before.
            assert len(placement.alive) <= 4
        else:
            assert len(placement.alive) == 4
    if persistent:
        assert list(iter(loader)) == [number * 10 for number in range(12)]
    del iterator, loader
    gc.collect()
    assert not placement.alive
    assert placement.told.count(("close", None)) == (1 if persistent else 3)


def test_a_shutdown_meanwhile_is_an_error(placed, monkeypatch):
    placement = placed()
    iterator = iter(DataLoader(numbers(6), batch_size=None, num_workers=1))
    asked = placement.asked

    def shuts_down(number):
        if number == 1:
            iterator._shutdown_workers()
        return asked(number)

    monkeypatch.setattr(placement, "asked", shuts_down)
    assert next(iterator) == 0
    with pytest.raises(AssertionError, match="shut down"):
        next(iterator)
