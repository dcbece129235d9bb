"""Workers of a pool: batches, seeds and worker info are torch's, from one set of processes."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import ringloader
from faults.proc import wait_until
from parity.harness import assert_path
from ringloader import DataLoader, WorkerPool
from small_datasets import Made

pytestmark = [pytest.mark.rings_only, pytest.mark.limit(300)]


class Told(Dataset):
    """Batches that tell by whom they were made, with which random numbers."""

    def __init__(self, first, count, elements=1):
        self.first, self.count, self.elements = first, count, elements
        self.calls = 0

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.calls += 1
        info = get_worker_info()
        return {
            "value": torch.full((self.elements,), self.first + index),
            "draws": torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()]),
            "info": torch.tensor([info.id, info.num_workers, info.seed % 2**62, info.dataset is self]),
            "calls": self.calls,
            "threads": torch.get_num_threads(),
            "pid": os.getpid(),
        }


def pids(batches):
    return {int(pid) for batch in batches for pid in batch["pid"]}


def values(batches):
    return [int(value) for batch in batches for value in batch["value"][:, 0]]


def without_pids(batches):
    return [{name: value.tolist() for name, value in batch.items() if name != "pid"} for batch in batches]


def test_two_loaders_share_the_processes():
    with WorkerPool(2) as pool:
        one = DataLoader(Told(0, 8), batch_size=2, worker_pool=pool)
        other = DataLoader(Told(100, 6), batch_size=3, worker_pool=pool)
        assert pool._crew._processes == [], "none before the first iterator"
        seen = set()
        for _ in range(3):
            batches = list(one)
            assert values(batches) == list(range(8))
            seen |= pids(batches)
            batches = list(other)
            assert values(batches) == list(range(100, 106))
            seen |= pids(batches)
        assert len(seen) == 2
        assert ringloader.report(one).path == "native"


@pytest.mark.parametrize("method", [None, "forkserver", "spawn"])
def test_batches_draws_and_worker_info_are_torchs(method):
    arguments = {"batch_size": 2, "shuffle": True, "worker_init_fn": split, "num_workers": 2}
    torch.manual_seed(7)
    theirs = torch.utils.data.DataLoader(Told(0, 8), **arguments)
    expected = [without_pids(theirs) for _ in range(3)]
    with WorkerPool(2, method) as pool:
        torch.manual_seed(7)
        ours = DataLoader(Told(0, 8), worker_pool=pool, **arguments)
        found, workers = [], set()
        for _ in range(3):
            iterator = iter(ours)
            assert_path(iterator, 2)
            batches = list(iterator)
            workers |= pids(batches)
            found.append(without_pids(batches))
    assert found == expected
    assert len(workers) == 2


def split(worker):
    """Splits a dataset as torch's documentation does."""
    info = get_worker_info()
    assert info.id == worker
    info.dataset.first += 1000


def test_loaders_at_work_at_the_same_time():
    with WorkerPool(2) as pool:
        one = DataLoader(Told(0, 12), batch_size=2, worker_pool=pool)
        other = DataLoader(Told(100, 12), batch_size=2, worker_pool=pool)
        first, second = [], []
        for _ in range(3):
            pairs = list(zip(one, other, strict=True))
            assert values(batch for batch, _ in pairs) == list(range(12))
            assert values(batch for _, batch in pairs) == list(range(100, 112))
            first.append(pids(batch for batch, _ in pairs))
            second.append(pids(batch for _, batch in pairs))
        assert all(not mine & theirs for mine, theirs in zip(first, second, strict=True))
        assert len(set.union(*first, *second)) == 4, "no epoch but the first starts any"


def test_fewer_workers_than_the_pool_has():
    with WorkerPool(2) as pool:
        two = DataLoader(Told(0, 8), batch_size=2, worker_pool=pool)
        one = DataLoader(Told(0, 8), batch_size=2, num_workers=1, worker_pool=pool)
        both = pids(list(two))
        assert pids(list(one)) < both
        assert pids(list(two)) == both


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_loader_that_is_made_later(method):
    """It has the same processes. A lambda goes by cloudpickle."""
    with WorkerPool(2, method) as pool:
        first = DataLoader(Told(0, 4), worker_pool=pool)
        before = pids(list(first))
        dataset = Told(100, 4)
        dataset.function = lambda: None
        later = DataLoader(dataset, worker_pool=pool, collate_fn=lambda batch: dict(batch[0]))
        batches = list(later)
        assert [int(batch["value"]) for batch in batches] == [100, 101, 102, 103]
        assert {batch["pid"] for batch in batches} == pids(list(first)) == before


class Counted(Told):
    pickled = 0

    def __getstate__(self):
        Counted.pickled += 1
        return vars(self)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_dataset_is_sent_once(method):
    with WorkerPool(2, method) as pool:
        Counted.pickled = 0
        first = DataLoader(Counted(0, 4), worker_pool=pool)
        before = pids(list(first))
        assert Counted.pickled == 1
        later = DataLoader(Counted(100, 4), worker_pool=pool)
        assert values(later) == [100, 101, 102, 103]
        assert values(first) == [0, 1, 2, 3]
        assert pids(list(later)) == before
        assert Counted.pickled == 2
        object.__setattr__(later, "dataset", Counted(500, 4))
        assert values(later) == [500, 501, 502, 503]
        assert Counted.pickled == 3


class Marked(Told):
    """Bytes that are found in the memory of a process that has it."""

    def __init__(self, mark):
        super().__init__(0, 2)
        self.mark = torch.full((1 << 20,), mark)


class Asks(Told):
    """Tells how many of the others the process has."""

    def __getitem__(self, index):
        gc.collect()
        others = [one for one in gc.get_objects() if type(one) is Marked]
        return {"others": len(others), "pid": os.getpid()}


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_a_loader_had_goes_with_it(method):
    with WorkerPool(1, method) as pool:
        asks = DataLoader(Asks(0, 1), worker_pool=pool)
        marked = DataLoader(Marked(7), worker_pool=pool)
        list(marked)
        # A forked process has the main process's own too.
        forked = int(method == "fork")
        assert [int(batch["others"]) for batch in asks] == [1 + forked]
        gone = weakref.ref(marked)
        del marked
        gc.collect()
        assert gone() is None
        assert [int(batch["others"]) for batch in asks] == [forked]


class Chunks(IterableDataset):
    def __init__(self, first, counts):
        self.first, self.counts = first, counts

    def __iter__(self):
        worker = get_worker_info().id
        yield from (torch.tensor(self.first + 100 * worker + i) for i in range(self.counts[worker]))


def test_iterable_datasets_and_abandoned_epochs():
    """A worker that ends early is still the iterator's until that ends."""
    theirs = [
        [batch.tolist() for batch in torch.utils.data.DataLoader(Chunks(first, (1, 9)), 2, num_workers=2)]
        for first in (0, 1000)
    ]
    with WorkerPool(2) as pool:
        loaders = [DataLoader(Chunks(first, (1, 9)), 2, worker_pool=pool) for first in (0, 1000)]
        for _ in range(2):
            for loader, expected in zip(loaders, theirs, strict=True):
                iterator = iter(loader)
                assert_path(iterator, 2)
                assert [batch.tolist() for batch in iterator] == expected
                iterator = iter(loader)
                assert next(iterator).tolist() == expected[0]
                del iterator
        assert len(pool._crew._processes) == 2


def segments(pid="self"):
    gc.collect()
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {re.split(r"\s+", line)[4] for line in maps if "memfd:ringloader" in line}


def test_the_next_epoch_has_the_same_memory():
    """Bytes of batches that the caller holds stay, though workers live on."""
    before = segments()
    with WorkerPool(2) as pool:
        loader = DataLoader(Told(0, 8, 100_000), batch_size=1, worker_pool=pool)
        iterator = iter(loader)
        (memory,) = segments() - before
        held = [next(iterator) for _ in range(2)]
        del iterator
        assert segments() - before == {memory}
        workers = [process.process.pid for process in pool._crew._processes]
        has_left = lambda: not any(memory in segments(pid) for pid in workers)  # noqa: E731
        assert wait_until(has_left, 30), "the workers have left it"
        for _ in range(3):
            iterator = iter(loader)
            assert segments() - before == {memory}
            assert values(iterator) == list(range(8))
            assert all((batch["value"] == i).all() for i, batch in enumerate(held))
        assert [process.process.pid for process in pool._crew._processes] == workers


KEPT = {}


class Keeps(Dataset):
    """Keeps what it collated, which lies in the slot."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if "batch" not in KEPT:
            KEPT["batch"] = torch.utils.data.default_collate([torch.full((100_000,), 7)] * 2)
        return torch.tensor([index, os.getpid(), int((KEPT["batch"] == 7).all())])


def test_a_dataset_that_keeps_what_was_collated():
    """The worker's process ends with the iterator: the memory goes back, and the dataset would read it."""
    with WorkerPool(1) as pool:
        loader = DataLoader(Keeps(), worker_pool=pool)
        seen = []
        for _ in range(3):
            rows = torch.cat(list(loader))
            assert rows[:, 0].tolist() == list(range(6))
            assert rows[:, 2].tolist() == [1] * 6
            seen += rows[:, 1].unique().tolist()
        assert len(set(seen)) == 3


def test_install_gives_the_pool_to_loaders_with_workers():
    with WorkerPool(2) as pool, ringloader.installed(worker_pool=pool):
        plain = torch.utils.data.DataLoader(Told(0, 4), num_workers=2)
        assert pids(list(plain)) == {process.process.pid for process in pool._crew._processes}
        own = torch.utils.data.DataLoader(Told(0, 4), num_workers=1, persistent_workers=True)
        assert not pids(list(own)) & pids(list(plain))
        del own
        assert [int(one) for one in torch.utils.data.DataLoader(range(3))] == [0, 1, 2]
        converted = ringloader.convert(torch.utils.data.DataLoader(Told(0, 4)), worker_pool=pool)
        assert values(converted) == [0, 1, 2, 3]


def test_a_forked_child_has_a_pool_of_its_own():
    with WorkerPool(1) as pool:
        loader = DataLoader(Told(0, 4), worker_pool=pool)
        before = pids(list(loader))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                mine = pids(list(loader))
                code = 0 if not mine & before and mine == pids(list(loader)) else 2
                pool.shutdown()
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert pids(list(loader)) == before


@pytest.mark.parametrize("kind", ["rows", "arrays", "samples", "padded"])
def test_what_is_collated_goes_into_the_slot_each_time(kind):
    """By each way into it; and no process keeps the memory for that."""
    tensor = torch.arange(4000.0).view(4, 1000)
    dataset = {
        "rows": tensor,
        "arrays": ringloader.ArrayDataset(tensor),
        "samples": [row.clone() for row in tensor],
        "padded": [row.clone() for row in tensor],
    }[kind]
    collate = ringloader.batchify.Pad() if kind == "padded" else None
    with WorkerPool(1) as pool:
        loader = DataLoader(dataset, batch_size=2, worker_pool=pool, collate_fn=collate)
        seen = set()
        for _ in range(3):
            batches = [batch[0] if isinstance(batch, (list, tuple)) else batch for batch in loader]
            assert torch.equal(torch.cat(batches), tensor)
            counters = ringloader.report(loader).counters
            assert (counters["in_place"], counters["copied"]) == (2, 0)
            seen |= {process.process.pid for process in pool._crew._processes}
        assert len(seen) == 1


class Epochs(Dataset):
    """Items that tell which epoch the dataset was told, and what a reset function has put there."""

    def __init__(self, count=4):
        self.count = count
        self.epoch = None
        self.reset = None

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return index, self.epoch, self.reset, random.random()

    def set_epoch(self, epoch):
        self.epoch = epoch


def note_epoch(dataset, _info, seeds):
    dataset.reset = seeds.epoch


def first(batch):
    return batch[0]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_epochs_begin_with_is_of_one_loader(method):
    with WorkerPool(1, method) as pool:
        reset = note_epoch if method == "spawn" else lambda *args: note_epoch(*args)
        options = {"worker_pool": pool, "collate_fn": first}
        told = DataLoader(Epochs(), worker_reset_fn=reset, seeding="epoch", seed=5, **options)
        plain = DataLoader(Epochs(), **options)
        counted, draws = [], []
        for epoch in range(3):
            batches = list(told)
            assert {batch[1:3] for batch in batches} == {(None, epoch)}
            draws.append([batch[3] for batch in batches])
            process = pool._crew._processes[0].process.pid
            assert {batch[1:3] for batch in plain} == {(None, None)}
            counted.append(process)
        assert len(set(counted)) == 1
        assert len({number for drawn in draws for number in drawn}) == 12
        again = DataLoader(Epochs(), worker_reset_fn=note_epoch, seeding="epoch", seed=5, **options)
        assert [batch[3] for batch in again] == draws[0]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_are_told_the_epoch(method):
    with WorkerPool(2, method) as pool:
        loader = DataLoader(Epochs(), worker_pool=pool, collate_fn=first)
        other = DataLoader(Epochs(), worker_pool=pool, collate_fn=first)
        assert [batch[1] for batch in loader] == [None] * 4
        loader.set_epoch(7)
        assert [batch[1] for batch in loader] == [7] * 4
        assert [batch[1] for batch in other] == [None] * 4
        # The epoch stays, as that of a dataset which the next workers get as it is.
        assert [batch[1] for batch in loader] == [7] * 4
        loader.set_epoch(8)
        assert [batch[1] for batch in loader] == [8] * 4


def test_a_loader_that_names_no_epoch_has_its_dataset_as_others_left_it():
    dataset = Epochs()
    with WorkerPool(2) as pool:
        loader, other = (DataLoader(dataset, worker_pool=pool, collate_fn=first) for _ in range(2))
        alone = DataLoader(dataset, num_workers=2, collate_fn=first)
        for epoch in (7, 8):
            loader.set_epoch(epoch)
            for one in (loader, other, alone):
                assert [batch[1] for batch in one] == [epoch] * 4
        # It has an epoch of its own from here on.
        other.set_epoch(3)
        loader.set_epoch(9)
        assert [batch[1] for batch in other] == [3] * 4


def count_and_pid(dataset, more):
    dataset.reset = more
    return dataset.count + more, os.getpid()


def test_functions_are_called_in_the_processes_of_the_loader():
    with WorkerPool(2) as pool:
        loader = DataLoader(Epochs(6), worker_pool=pool, collate_fn=first)
        other = DataLoader(Epochs(5), worker_pool=pool, collate_fn=first)
        with pytest.raises(RuntimeError, match="no living worker"):
            loader.call_workers(count_and_pid, 1)
        iterator, beside = iter(loader), iter(other)
        answers = loader.call_workers(count_and_pid, 1)
        assert [count for count, _ in answers] == [7, 7]
        assert [pid for _, pid in answers] == [process.pid for process in iterator._workers]
        assert len(list(iterator)) == 6
        assert [batch[2] for batch in beside] == [None] * 5
        with pytest.raises(RuntimeError, match="no living worker"):
            loader.call_workers(count_and_pid, 1)
        # Attributes that the function has set have gone with its iterator.
        assert [batch[2] for batch in loader] == [None] * 6


def test_a_loader_that_is_shut_down_leaves_the_others_their_processes():
    with WorkerPool(2) as pool:
        ended = DataLoader(Told(0, 40), worker_pool=pool)
        stays = DataLoader(Told(100, 40), worker_pool=pool)
        first_one, second_one = iter(ended), iter(stays)
        began = [next(first_one), next(second_one)]
        processes = [process.process.pid for process in pool._crew._processes]
        ended.shutdown()
        with pytest.raises(RuntimeError, match=r"shut ?down"):
            next(first_one)
        assert values([began[1], *second_one]) == list(range(100, 140))
        assert values(ended) == list(range(40))
        assert values(stays) == list(range(100, 140))
        assert [process.process.pid for process in pool._crew._processes] == processes
        assert values(began[:1]) == [0]


def state_of_process():
    os.umask(umask := os.umask(0o077))
    blocked = sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    return os.sched_getaffinity(0), umask, os.getpriority(os.PRIO_PROCESS, 0), blocked


def make_state_of_process(_index):
    return state_of_process()


def set_state_of_process(_worker):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.umask(0o007)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})


def raise_niceness(_worker):
    os.nice(3)


@pytest.mark.limit(300)
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_what_worker_init_fn_sets_for_the_process(method):
    ours = state_of_process()
    with WorkerPool(1, method) as pool:

        def loader(init_fn=None):
            options = {"batch_size": None, "collate_fn": list, "worker_init_fn": init_fn}
            return DataLoader(Made(make_state_of_process, 2), worker_pool=pool, **options)

        plain, sets, raises = loader(), loader(set_state_of_process), loader(raise_niceness)
        assert list(plain) == [list(ours)] * 2
        processes = list(pool._crew._processes)
        (cores, *rest), _ = list(sets)
        assert (len(cores), *rest) == (1, 0o007, ours[2], [signal.SIGUSR1])
        assert list(plain) == [list(ours)] * 2
        assert pool._crew._processes == processes
        assert [niceness for _, _, niceness, _ in raises] == [ours[2] + 3] * 2
        assert list(plain) == [list(ours)] * 2
        assert pool._crew._processes != processes, "a niceness cannot be put back"
