"""`Dispatch`: each item once, in the order that is said, whatever starts the workers."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import time
import types

import numpy as np
import pytest
import torch
import torch.utils.data

import ringloader
from faults.proc import Snapshot
from ringloader import DataLoader, Dispatch


class Source:
    """Numbers, as tensors, of a source that counts how often it is begun."""

    def __init__(self, n, fails_at=()):
        self.n = n
        self.fails_at = fails_at
        self.begun = 0

    def __iter__(self):
        self.begun += 1
        return _Numbers(self.n, self.fails_at)


class _Numbers:
    """An iterator that goes on after an error."""

    def __init__(self, n, fails_at):
        self.numbers = iter(range(n))
        self.fails_at = fails_at

    def __iter__(self):
        return self

    def __next__(self):
        number = next(self.numbers)
        if number in self.fails_at:
            raise KeyError(f"item {number}")
        return torch.tensor(number)


class Endless:
    def __iter__(self):
        return map(torch.tensor, itertools.count())


class BadStart:
    def __iter__(self):
        raise OSError("the source is not there")


class Pids:
    """The process that reads, with what it sees."""

    def __iter__(self):
        for number in range(6):
            yield number, os.getpid(), torch.utils.data.get_worker_info() is None


class Draws:
    def __iter__(self):
        for _ in range(4):
            yield torch.rand(2), np.random.rand(2)


def double(item):
    return item * 2


def is_even(item):
    return int(item) % 2 == 0


def add_pid(item):
    return *item, os.getpid()


def fail_at_three(item):
    if int(item) == 3:
        raise ValueError("three")
    return item


def stop_at_three(item):
    if int(item) == 3:
        raise StopIteration
    return item


def numbers(loader):
    return [batch.tolist() for batch in loader]


def same(batch):
    return batch


def in_turn(n, workers, size):
    """The batches of torch's order, if item `k` goes to worker `k % workers`."""
    own = [list(range(worker, n, workers)) for worker in range(workers)]
    batches = [[one[at : at + size] for at in range(0, len(one), size)] for one in own]
    return [batch for row in itertools.zip_longest(*batches) for batch in row if batch is not None]


@pytest.fixture
def snapshot():
    assert len(list(DataLoader(Dispatch(Source(4)), num_workers=1))) == 4
    return Snapshot.take()


@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_each_item_comes_once_in_the_sources_order(start):
    loader = DataLoader(Dispatch(Source(23)), batch_size=None, num_workers=2, multiprocessing_context=start)
    assert [numbers(loader) for _ in range(2)] == [list(range(23))] * 2
    assert ringloader.report(loader).path == "native"


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_batches_are_of_the_items_of_one_worker(workers, persistent, snapshot):
    loader = DataLoader(Dispatch(Source(20)), 3, num_workers=workers, persistent_workers=persistent)
    for _ in range(3):
        assert numbers(loader) == in_turn(20, workers, 3)
    del loader
    snapshot.assert_nothing_left()


@pytest.mark.parametrize("prefetch", [1, 2, 3, 100])
def test_any_number_of_items_may_be_on_their_way(prefetch):
    loader = DataLoader(Dispatch(Source(50), prefetch=prefetch), 4, num_workers=2)
    assert numbers(loader) == in_turn(50, 2, 4)


@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_source_with_fewer_items_than_workers(n, workers):
    loader = DataLoader(Dispatch(Source(n)), 2, num_workers=workers)
    assert [numbers(loader) for _ in range(2)] == [[[0]] * n] * 2


@pytest.mark.parametrize("workers", [0, 2])
def test_map_filter_and_batch_run_in_the_worker_in_their_order(workers):
    made = Dispatch(Source(24)).filter(is_even).map(double).batch(2)
    options = {"num_workers": workers, "in_order": workers == 0, "collate_fn": torch.stack}
    loader = DataLoader(made, batch_size=None, **options)
    even = [2 * number for number in range(0, 24, 2)]
    # With two workers, all even ones are worker 0's.
    assert numbers(loader) == [even[at : at + 2] for at in range(0, 12, 2)]
    where = DataLoader(Dispatch(Pids()).map(add_pid), batch_size=None, num_workers=workers, collate_fn=same)
    found = list(where)
    readers = {reader for _, reader, _, _ in found}
    mappers = {mapper for _, _, _, mapper in found}
    assert [number for number, *_ in found] == list(range(6))
    assert all(outside for _, _, outside, _ in found)
    assert len(readers) == 1
    if workers:
        assert len(mappers) == 2
        assert len(readers | mappers | {os.getpid()}) == 4
    else:
        assert readers == mappers == {os.getpid()}


def test_the_last_batch_of_a_worker_may_be_dropped():
    made = Dispatch(range(7))
    for drop, expected in ((False, [[0, 1, 2], [3, 4, 5], [6]]), (True, [[0, 1, 2], [3, 4, 5]])):
        loader = DataLoader(made.batch(3, drop_last=drop), batch_size=None, num_workers=1, collate_fn=same)
        assert list(loader) == expected


def outcomes(loader):
    """Batches and errors, in their order."""
    found, iterator = [], iter(loader)
    while True:
        try:
            found.append(next(iterator).tolist())
        except StopIteration:
            return found
        except Exception as error:
            found.append(type(error))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_source_stands_in_place_of_its_item(workers):
    loader = DataLoader(Dispatch(Source(6, fails_at=(0, 3))), batch_size=None, num_workers=workers)
    assert outcomes(loader) == [KeyError, 1, 2, KeyError, 4, 5]
    loader = DataLoader(Dispatch(Source(6)).map(fail_at_three), batch_size=None, num_workers=workers)
    assert outcomes(loader) == [0, 1, 2, ValueError, 4, 5]
    loader = DataLoader(Dispatch(Source(6)).map(stop_at_three), batch_size=None, num_workers=workers)
    assert outcomes(loader) == [0, 1, 2, RuntimeError, 4, 5]


def test_an_error_of_the_source_says_where_it_was():
    with pytest.raises(KeyError, match="in the dispatching process"):
        list(DataLoader(Dispatch(Source(6, fails_at=(3,))), num_workers=2))
    with pytest.raises(OSError, match="the source is not there"):
        list(DataLoader(Dispatch(BadStart()), num_workers=2))


class Unpicklable:
    def __iter__(self):
        yield torch.tensor(0)
        yield types.ModuleType("one")
        yield torch.tensor(2)


def test_an_item_that_cannot_be_sent_is_an_error_in_its_place():
    assert outcomes(DataLoader(Dispatch(Unpicklable()), batch_size=None, num_workers=2)) == [0, TypeError, 2]


@pytest.mark.parametrize("persistent", [False, True])
def test_abandoned_epochs_of_an_endless_source(persistent, snapshot):
    loader = DataLoader(Dispatch(Endless()), 2, num_workers=2, persistent_workers=persistent)
    for taken in (0, 1, 5, 40):
        found = [batch.tolist() for batch in itertools.islice(loader, taken)]
        assert found == in_turn(4 * taken + 8, 2, 2)[:taken]
    del loader
    snapshot.assert_nothing_left()


class Counting:
    """An endless source that tells how far it was read."""

    def __init__(self, counter):
        self.counter = counter

    def __iter__(self):
        for number in itertools.count():
            self.counter[0] = number + 1
            yield torch.tensor(number)


def test_the_source_is_not_read_far_ahead():
    counter = torch.zeros(1, dtype=torch.int64).share_memory_()
    loader = DataLoader(
        Dispatch(Counting(counter), prefetch=4), batch_size=None, num_workers=2, prefetch_factor=2
    )
    iterator = iter(loader)
    for _ in range(10):
        next(iterator)
    # Ten were taken; two batches, and four items, wait in each of two workers.
    most = 10 + 2 * (2 + 4) + 2
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        assert int(counter[0]) <= most
        time.sleep(0.05)
    assert int(counter[0]) > 10


class Large:
    """Large items, over memory that the source fills anew each time."""

    def __iter__(self):
        array = np.zeros(1 << 18)
        for number in range(12):
            array[:] = number
            yield {"array": array, "tensor": torch.full((1 << 18,), number)}


def test_bytes_of_large_items_stay_what_they_were():
    # Twelve items of 4 MB through 6 MB: some travel alone, some wait.
    loader = DataLoader(Dispatch(Large()), batch_size=None, num_workers=2, max_shared_bytes=12 << 20)
    kept = list(loader)
    for number, item in enumerate(kept):
        assert (item["array"] == number).all()
        assert (item["tensor"] == number).all()


def test_random_numbers_of_the_source_follow_from_the_loaders_seed():
    def drawn(seed):
        loader = DataLoader(
            Dispatch(Draws()), None, num_workers=2, generator=torch.Generator().manual_seed(seed)
        )
        return [(a.tolist(), b.tolist()) for a, b in loader]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert len({str(one) for one in drawn(1)}) == 4


class StopsEarly(Dispatch):
    """A source whose first worker takes three items, and no more."""

    def __iter__(self):
        items = super().__iter__()
        info = torch.utils.data.get_worker_info()
        return itertools.islice(items, 3) if info and info.id == 0 else items


@pytest.mark.parametrize("persistent", [False, True])
def test_a_worker_that_ends_early_does_not_stop_the_others(persistent):
    loader = DataLoader(
        StopsEarly(Source(200), prefetch=2), None, num_workers=2, persistent_workers=persistent
    )
    for _ in range(2):
        found = numbers(loader)
        assert [number for number in found if number % 2 == 0][:3] == [0, 2, 4]
        # Items that worker 0 was still sent are lost with it; nothing of what came after that is.
        assert len(found) == len(set(found))
        assert set(range(20, 200)) <= set(found)


def test_out_of_order_a_filter_may_drop_all_items_of_a_worker():
    loader = DataLoader(Dispatch(Source(200)).filter(is_even), batch_size=4, num_workers=2, in_order=False)
    assert list(itertools.chain.from_iterable(numbers(loader))) == list(range(0, 200, 2))


class FailsInAnEpoch(Dispatch):
    """In worker 0, these epochs do not begin."""

    def set_epoch(self, epoch):
        info = torch.utils.data.get_worker_info()
        if info is not None and info.id == 0 and epoch % 3:
            raise ValueError(f"no epoch {epoch}")


@pytest.mark.parametrize("abandons", [False, True])
def test_an_epoch_that_cannot_begin_in_a_worker_does_not_stop_the_others(abandons):
    # A small `prefetch`: many ends of epochs have no room that no one takes them from.
    loader = DataLoader(
        FailsInAnEpoch(Source(10), prefetch=1), batch_size=None, num_workers=2, persistent_workers=True
    )
    for epoch in range(13):
        loader.set_epoch(epoch)
        if abandons and epoch % 3 == 0:
            next(iter(loader))
        elif epoch % 3:
            # The other worker is sent all items.
            assert outcomes(loader) == [ValueError, *range(10)]
        else:
            assert outcomes(loader) == list(range(10))


def fail_in_worker_one(worker):
    if worker == 1:
        raise ValueError("no start")


@pytest.mark.parametrize("batch_size", [None, 8])
def test_a_worker_that_cannot_start_does_not_stop_the_others(batch_size):
    loader = DataLoader(
        Dispatch(Source(100), prefetch=2), batch_size, num_workers=2, worker_init_fn=fail_in_worker_one
    )
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(ValueError, match="no start"):
        next(iterator)
    found = []
    for _ in range(6):
        try:
            found.append(next(iterator))
        except UnboundLocalError:
            # torch's loop has no fetcher.
            continue
    assert len(found) >= 3


def test_torchs_own_loader_raises_with_workers_and_works_without():
    made = Dispatch(Source(5))
    with pytest.raises(RuntimeError, match="has no dispatching process"):
        list(torch.utils.data.DataLoader(made, num_workers=1))
    assert numbers(torch.utils.data.DataLoader(made, None)) == list(range(5))
    with ringloader.installed():
        assert numbers(torch.utils.data.DataLoader(made, None, num_workers=2)) == list(range(5))
    converted = ringloader.convert(torch.utils.data.DataLoader(made, None, num_workers=2))
    assert numbers(converted) == list(range(5))


def test_one_inside_another_dataset_is_an_error():
    chained = torch.utils.data.ChainDataset([Dispatch(Source(3)), Dispatch(Source(3))])
    with pytest.raises(RuntimeError, match="must be the dataset"):
        list(DataLoader(chained, num_workers=1))
    assert len(list(DataLoader(chained))) == 6


def test_two_loaders_at_once_and_copies():
    made = Dispatch(Source(9))
    loaders = [
        DataLoader(one, None, num_workers=2)
        for one in (made, made, copy.deepcopy(made), pickle.loads(pickle.dumps(made)))
    ]
    assert [tuple(map(int, row)) for row in zip(*loaders, strict=True)] == [(k,) * 4 for k in range(9)]


def test_the_source_is_not_sent_to_workers():
    class Counted(list):
        pickled = 0

        def __reduce__(self):
            type(self).pickled += 1
            return list, (), None, iter(self)

    globals()["Counted"] = Counted
    loader = DataLoader(
        Dispatch(Counted(range(5))), None, num_workers=2, multiprocessing_context="forkserver"
    )
    assert list(loader) == list(range(5))
    assert Counted.pickled == 1


def test_the_number_of_items_is_the_sources():
    assert len(Dispatch([1, 2, 3]).map(double)) == 3
    assert len(DataLoader(Dispatch([1, 2, 3]), 2)) == 2
    for unknown in (Dispatch([1]).filter(is_even), Dispatch([1]).batch(1), Dispatch(Endless())):
        with pytest.raises(TypeError):
            len(unknown)


def test_threads_as_workers_are_refused():
    with pytest.raises(ValueError, match="worker_method='thread' and a Dispatch as dataset do not go"):
        DataLoader(Dispatch([1]), num_workers=1, worker_method="thread")
    assert len(list(DataLoader(Dispatch([1]), worker_method="thread"))) == 1


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match="needs an iterable, not an object of type int"):
        Dispatch(3)
    for made in (lambda: Dispatch([], prefetch=0), lambda: Dispatch([]).batch(0)):
        with pytest.raises(ValueError, match="must be at least 1, not 0"):
            made()
    for made in (lambda: Dispatch([], prefetch=1.5), lambda: Dispatch([]).batch(True)):
        with pytest.raises(TypeError, match="must be an int, not"):
            made()
    for made in (Dispatch([]).map, Dispatch([]).filter):
        with pytest.raises(TypeError, match="3 cannot be called"):
            made(3)
