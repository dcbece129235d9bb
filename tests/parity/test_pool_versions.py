"""A dataset that the main process changes: all workers of an epoch have it in the same state."""

from __future__ import annotations

import copy
import functools
import gc
import multiprocessing
import os
import weakref
from multiprocessing import reduction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import ringloader
from faults.proc import descriptors
from ringloader import DataLoader, WorkerPool

pytestmark = [pytest.mark.rings_only, pytest.mark.limit(300)]

METHODS = ["fork", pytest.param("forkserver", marks=pytest.mark.slow)]


class Added(Dataset):
    """Items that tell in which state the dataset is."""

    def __init__(self, add=0, count=8):
        self.add, self.count = add, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return index + self.add


def values(loader):
    return [batch.tolist() for batch in loader]


def added(number):
    return [[index + number, index + 1 + number] for index in range(0, 8, 2)]


def pids(pool):
    return {process.process.pid for process in pool._crew._processes}


@pytest.mark.parametrize("method", METHODS)
def test_loaders_with_different_numbers_of_workers(method):
    dataset = Added()
    arguments = {"batch_size": 2, "multiprocessing_context": "fork"}
    small, both = (torch.utils.data.DataLoader(dataset, num_workers=n, **arguments) for n in (1, 2))
    first = values(small)
    dataset.add = 100
    theirs = [first, values(both), values(small)]
    assert theirs == [added(0), added(100), added(100)]

    dataset.add = 0
    with WorkerPool(2, method) as pool:
        small, both = (DataLoader(dataset, 2, num_workers=n, worker_pool=pool) for n in (1, 2))
        first = values(small)
        dataset.add = 100
        ours = [first, values(both), values(small)]
        # A loader's state is that of its first iterator, as with torch's persistent workers.
        assert ours == [added(0), added(100), added(0)]


@pytest.mark.parametrize("method", METHODS)
def test_two_iterators_of_one_loader(method):
    dataset = Added()
    with WorkerPool(2, method) as pool:
        loader = DataLoader(dataset, 2, worker_pool=pool)
        one = iter(loader)
        dataset.add = 100
        other = iter(loader)
        assert values(one) == values(other) == added(0)
        del one, other
        gc.collect()
        before = pids(pool)
        assert values(loader) == added(0)
        pairs = list(zip(loader, loader, strict=True))
        assert [one.tolist() for one, _ in pairs] == [other.tolist() for _, other in pairs] == added(0)
        assert pids(pool) == before, "no process is started any more"


@pytest.mark.parametrize("method", METHODS)
def test_more_loaders_than_processes(method):
    with WorkerPool(2, method) as pool:
        loaders = [DataLoader(Added(1000 * n), 2, num_workers=1 + n % 2, worker_pool=pool) for n in range(5)]
        seen = set()
        for _ in range(3):
            for number, loader in enumerate(loaders):
                assert values(loader) == added(1000 * number)
            seen |= pids(pool)
        assert len(seen) == 2


class Unsent(Added):
    """After its first pickle it cannot be pickled any more."""

    def __getstate__(self):
        state = dict(vars(self))
        self.file = (number for number in ())
        return state


@pytest.mark.parametrize("method", METHODS)
def test_a_dataset_that_cannot_be_pickled_again(method):
    with WorkerPool(2, method) as pool:
        loader = DataLoader(Unsent(), 2, worker_pool=pool)
        one = iter(loader)
        other = iter(loader)
        assert len(pids(pool)) == 4
        assert values(one) == values(other) == values(loader) == added(0)


class Function:
    """For `collate_fn` and `worker_init_fn`: has the dataset, and a state of its own."""

    def __init__(self, dataset=None, add=0):
        self.dataset, self.add = dataset, add

    def __call__(self, given):
        if isinstance(given, int):
            info = torch.utils.data.get_worker_info()
            info.dataset.is_mine = info.dataset is self.dataset
            info.dataset.initial = self.add
            return None
        info = torch.utils.data.get_worker_info()
        is_same = [self.dataset is info.dataset, getattr(info.dataset, "collate", self) is self]
        return given, self.add, is_same, getattr(info.dataset, "initial", None), info.dataset.is_mine


@pytest.mark.parametrize("refers", ["neither", "to the dataset", "to the function", "to each other"])
@pytest.mark.parametrize("method", METHODS)
def test_functions_that_are_held(method, refers):
    """They have the dataset's state, and one object here is one object there."""
    dataset, collate = Added(), Function()
    if refers in ("to the dataset", "to each other"):
        collate.dataset = dataset
    if refers in ("to the function", "to each other"):
        dataset.collate = collate
    initial = Function(dataset)
    with WorkerPool(2, method) as pool:
        options = {"worker_pool": pool, "collate_fn": collate, "worker_init_fn": initial, "batch_size": 2}
        plain = DataLoader(dataset, 2, num_workers=1, worker_pool=pool)
        loader = DataLoader(dataset, **options)
        assert values(plain) == added(0)
        for _ in range(2):
            # Two processes, then four: the last two are sent it after the change.
            for one, other in zip(loader, loader, strict=True):
                assert one == other
                given, add, is_same, of_init, is_mine = one
                assert (given[0] // 100, add, of_init) == (0, 0, 0)
                assert is_same == [collate.dataset is dataset, True]
                assert is_mine is True
            dataset.add = collate.add = initial.add = 100
        del loader
        gc.collect()
        assert values(plain) == added(0)
        changed = DataLoader(dataset, **options)
        assert {(batch[0][0] // 100, batch[1], batch[3]) for batch in changed} == {(1, 100, 100)}


@pytest.mark.parametrize("method", METHODS)
def test_how_to_renew_it(method):
    dataset = Added()
    with WorkerPool(2, method) as pool:
        loader = DataLoader(dataset, 2, worker_pool=pool)
        assert values(loader) == added(0)
        dataset.add = 100
        assert values(loader) == added(0)
        loader = DataLoader(copy.copy(dataset), 2, worker_pool=pool)
        assert values(loader) == added(100)


class Odd:
    """Pickled for each process: its reduction may hold for one only."""


def _reduce_odd(_odd):
    return Odd, ()


@pytest.mark.parametrize("method", METHODS)
def test_what_is_pickled_for_each_is_renewed_for_all(method, monkeypatch):
    monkeypatch.setitem(reduction.ForkingPickler._extra_reducers, Odd, _reduce_odd)
    dataset, collate = Added(), Function()
    dataset.odd = Odd()
    with WorkerPool(2, method) as pool:
        loader = DataLoader(dataset, 2, worker_pool=pool)
        assert values(loader) == added(0)
        dataset.add = 100
        assert values(loader) == added(0), "all hold it"
        pairs = list(zip(loader, loader, strict=True))
        assert [one.tolist() for one, _ in pairs] == added(0)
        assert [other.tolist() for _, other in pairs] == added(100)
        # None of the four that holds the older state serves with one that holds the newer.
        pairs = list(zip(loader, loader, strict=True))
        assert [one.tolist() for one, _ in pairs] == [other.tolist() for _, other in pairs] == added(100)
        other = DataLoader(
            dataset, 2, worker_pool=pool, collate_fn=collate, worker_init_fn=Function(dataset, 5)
        )
        assert {batch[3] for batch in other} == {5}
        assert all(batch[4] for batch in other), "one object"


def kept():
    gc.collect()
    return sorted(target for target in descriptors().values() if "ringloader-arguments" in target)


class Marked(Added):
    def __init__(self):
        super().__init__()
        self.data = torch.zeros(10)
        self.bytes = bytes(1 << 20)


@pytest.mark.parametrize("method", METHODS)
def test_what_was_pickled_goes_with_the_loaders(method):
    """One file for each loader, however many epochs there are; and no object is kept alive by it."""
    before = kept()
    with WorkerPool(2, method) as pool:
        dataset = Marked()
        small, both = (DataLoader(dataset, 2, num_workers=n, worker_pool=pool) for n in (1, 2))
        for _ in range(2):
            values(small), values(both)
            assert len(kept()) == len(before) + 2
        other = DataLoader(Marked(), 2, worker_pool=pool)
        values(other)
        assert len(kept()) == len(before) + 3
        gone = weakref.ref(dataset)
        del dataset, small, both
        gc.collect()
        assert gone() is None
        assert len(kept()) == len(before) + 1
    assert kept() == before


@pytest.mark.parametrize("method", METHODS)
def test_a_function_that_loaders_share_does_not_keep_their_datasets(method):
    before = kept()
    collate = Function()
    with WorkerPool(1, method) as pool:
        for number in range(3):
            dataset = Added(100 * number)
            init = Function(dataset)
            loader = DataLoader(dataset, 2, worker_pool=pool, collate_fn=collate, worker_init_fn=init)
            assert [batch[0] for batch in loader] == added(100 * number)
            assert len(kept()) == len(before) + 1
            gone = weakref.ref(dataset)
            del loader, init, dataset
            gc.collect()
            assert gone() is None
        assert len(kept()) == len(before)
        assert pool._crew.objects.numbers() == set()


def test_a_forked_process_keeps_no_pickle_of_others():
    with WorkerPool(2, "fork") as pool:
        first, second = Marked(), Marked()
        for dataset in (first, second):
            dataset.array = np.zeros(100_000)
        one = DataLoader(first, 2, worker_pool=pool)
        iterator = iter(one)
        other = DataLoader(second, 2, worker_pool=pool)
        assert values(other) == values(iterator) == added(0)
        assert len(pids(pool)) == 4 and len(kept()) == 4
        for pid in pids(pool):
            opened = [str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()]
            # The mapping of the array that it has.
            assert len([target for target in opened if "ringloader-arguments" in target]) == 1


class Locked(Added):
    def __init__(self):
        super().__init__()
        self.lock = multiprocessing.get_context("spawn").Lock()
        self.shared = torch.zeros(3)
        self.reader, self.writer = multiprocessing.Pipe(False)

    def __getitem__(self, index):
        with self.lock:
            assert self.reader.fileno() >= 0
            return super().__getitem__(index) + int(self.shared.sum())


@pytest.mark.parametrize("method", METHODS)
def test_what_was_pickled_outlives_what_the_dataset_had(method):
    """A tensor and a pipe by their descriptors: workers that come later have them too."""
    dataset = Locked()
    with WorkerPool(2, method) as pool:
        loader = DataLoader(dataset, 2, worker_pool=pool)
        one = iter(loader)
        dataset.reader.close()
        dataset.writer.close()
        del dataset.shared, dataset.reader, dataset.writer
        gc.collect()
        other = iter(loader)
        assert len(pids(pool)) == 4
        assert values(one) == values(other) == added(0)


class Epochs(Dataset):
    """Items that tell the epoch; with ``deep``, one that the process keeps between iterators."""

    def __init__(self, deep=False):
        self.deep = deep
        self.state = {"epoch": 0}
        self.epoch = 0

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.state["epoch"] if self.deep else self.epoch

    def set_epoch(self, epoch):
        self.epoch = epoch
        self.state["epoch"] = epoch


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_an_epoch_is_of_one_loader(method, deep):
    dataset = Epochs(deep)
    with WorkerPool(2, method) as pool:
        one, other = (DataLoader(dataset, 8, num_workers=n, worker_pool=pool) for n in (1, 2))

        def seen(loader):
            return {epoch for batch in loader for epoch in batch.tolist()}

        assert seen(one) == {0}
        one.set_epoch(7)
        # Some of its workers are forked only now.
        # One that names no epoch has the dataset as it is, as new workers of torch's would.
        assert (seen(other), seen(one)) == ({7}, {7})
        other.set_epoch(3)
        assert (seen(one), seen(other), seen(one)) == ({7}, {3}, {7})
        pairs = list(zip(one, other, strict=True))
        assert {(first.tolist()[0], second.tolist()[0]) for first, second in pairs} == {(7, 3)}
        # Frameworks make loaders anew: such a one has the epoch that was told last.
        new = DataLoader(dataset, 8, num_workers=2, worker_pool=pool)
        assert seen(new) == {3}
        one.set_epoch(8)
        assert (seen(new), seen(other)) == ({8}, {3})


def test_what_only_the_dataset_was_told_is_a_change_like_any_other():
    dataset = Epochs()
    with WorkerPool(2, "fork") as pool:
        loader = DataLoader(dataset, 8, worker_pool=pool)
        dataset.set_epoch(4)
        assert [batch.tolist() for batch in loader] == [[4] * 8]


def test_a_forked_child_sends_its_own():
    dataset = Added()
    with WorkerPool(1, "forkserver") as pool:
        loader = DataLoader(dataset, 2, worker_pool=pool)
        assert values(loader) == added(0)
        dataset.add = 100
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if values(loader) == added(100) else 2
                pool.shutdown()
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert values(loader) == added(0)


@pytest.mark.parametrize("method", METHODS)
def test_a_successor_has_what_the_others_have(method, tmp_path):
    dataset = DiesOnce(tmp_path / "died")
    with WorkerPool(2, method) as pool:
        loader = DataLoader(dataset, 2, worker_pool=pool, restart_workers=1)
        iterator = iter(loader)
        dataset.add = 100
        assert values(iterator) == added(0)
        assert dataset.mark.exists()


class DiesOnce(Added):
    def __init__(self, mark):
        super().__init__()
        self.mark = mark

    def __getitem__(self, index):
        if index == 5 and not self.mark.exists():
            self.mark.touch()
            os._exit(1)
        return super().__getitem__(index)


def test_an_option_of_install_has_the_epochs_too():
    """A loader of torch's own class is known to the pool from its first iterator on."""
    dataset = Epochs()
    with WorkerPool(1) as pool, ringloader.installed(worker_pool=pool):
        told = ringloader.convert(torch.utils.data.DataLoader(dataset, 8), worker_pool=pool)
        told.set_epoch(5)
        new = torch.utils.data.DataLoader(dataset, 8, num_workers=1)
        converted = ringloader.convert(torch.utils.data.DataLoader(dataset, 8), worker_pool=pool)
        assert [batch.tolist() for batch in new] == [[5] * 8]
        told.set_epoch(6)
        assert [batch.tolist() for batch in new] == [[6] * 8]
        assert [batch.tolist() for batch in converted] == [[6] * 8]
        assert [batch.tolist() for batch in told] == [[6] * 8]


def test_partials_refer_to_the_dataset():
    """The dataset is a list, of which there are no weak references."""
    data = [3, 4, 5]
    with WorkerPool(2, "forkserver") as pool:
        loader = DataLoader(data, worker_pool=pool, collate_fn=functools.partial(_with, data))
        one = iter(loader)
        data[0] = 9
        assert list(one) == list(loader) == [([3], 3), ([4], 3), ([5], 3)]


def _with(data, batch):
    return batch, data[0]
