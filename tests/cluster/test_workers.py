"""`Workers` as a pool: processes that stay, options, `max_bytes`, and errors."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import ringloader
import ringloader.ray
from cluster.conftest import with_settings
from cluster.datasets import Told, numbers
from ringloader import DataLoader

pytestmark = pytest.mark.limit(300)


def pids(batches):
    return {int(pid) for _, made in batches for pid in made}


def test_actors_stay_between_iterators_and_loaders(workers):
    one = DataLoader(Told(24), batch_size=2, worker_pool=workers)
    other = DataLoader(Told(12), batch_size=2, worker_pool=workers)
    seen = set()
    for _ in range(3):
        batches = list(one)
        assert numbers(batches) == list(range(24))
        seen |= pids(batches) | pids(list(other))
    # Of the actors that other tests have left.
    assert len(seen) <= 6
    assert ringloader.report(one).path == "ray"
    assert ringloader.report(one).counters["batches"] == 12
    assert ringloader.report(one).counters["received_bytes"] > 0


def test_two_iterators_at_once_have_actors_of_their_own(workers):
    one = DataLoader(Told(24), batch_size=2, worker_pool=workers)
    other = DataLoader(Told(24), batch_size=2, worker_pool=workers)
    pairs = list(zip(one, other, strict=True))
    mine, theirs = pids(batch for batch, _ in pairs), pids(batch for _, batch in pairs)
    assert not mine & theirs


def test_batches_are_the_callers(workers):
    loader = DataLoader(Told(16, elements=10_000), batch_size=4, worker_pool=workers)
    held = []
    for values, _ in loader:
        values += 1000
        held.append(values)
    assert [int(value) for values in held for value in values[:, -1]] == list(range(1000, 1016))


class Views(Told):
    def __getitem__(self, index):
        whole = torch.full((10_000,), float(index))
        return whole, whole[5000:], np.full(10_000, index)


def test_views_of_one_storage_stay_so(workers):
    for whole, half, array in DataLoader(Views(6), batch_size=None, worker_pool=workers):
        whole.zero_()
        assert not half.any()
        array += 1


def test_functions_of_any_kind_travel(workers):
    factor = 3

    class Local(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return index * factor

    loader = DataLoader(Local(), batch_size=4, worker_pool=workers, collate_fn=lambda batch: sum(batch))
    assert list(loader) == [18, 66]


def test_a_shared_list_goes_by_value(workers):
    class Listed(torch.utils.data.Dataset):
        items = ringloader.SharedList(range(100, 108))

        def __len__(self):
            return 8

        def __getitem__(self, index):
            return self.items[index]

    loader = DataLoader(Listed(), batch_size=8, worker_pool=workers)
    assert next(iter(loader)).tolist() == list(range(100, 108))


def test_a_timeout_names_the_batch(workers):
    loader = DataLoader(Told(4, 2.0), batch_size=1, worker_pool=workers, timeout=0.5, num_workers=1)
    with pytest.raises(RuntimeError, match=r"timed out after 0\.5") as caught:
        list(loader)
    assert any("dataset indices [0]" in note for note in caught.value.__notes__)


def test_stats_are_of_this_machines_clock(workers):
    loader = DataLoader(Told(12, 0.02), batch_size=2, worker_pool=workers, stats=True)
    list(loader)
    stats = ringloader.epoch_stats(loader)
    assert stats.batches == 6
    # Two samples of 20 ms each.
    assert all(worker.dataset / worker.batches > 0.03 for worker in stats.workers)


def test_the_cores_of_this_machine_are_no_limit(workers, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert numbers(DataLoader(Told(12), batch_size=4, worker_pool=workers)) == list(range(12))


def test_max_bytes(workers):
    # Two batches of 4 times 400 KB, and their tables.
    two = with_settings(workers, max_bytes=3_400_000)
    loader = DataLoader(Told(64, elements=100_000), batch_size=4, worker_pool=two, prefetch_factor=4)
    iterator = iter(loader)
    batches = [next(iterator)]
    engine = iterator._transport.engine
    for _ in range(5):
        threading.Event().wait(0.1)
        assert engine.committed() <= 2
        batches.append(next(iterator))
    batches.extend(iterator)
    assert numbers(batches) == list(range(64))


def test_a_window_for_less_than_a_batch(workers):
    one = with_settings(workers, max_bytes=1)
    loader = DataLoader(Told(40), batch_size=4, worker_pool=one)
    for _ in range(2):
        assert numbers(loader) == list(range(40))
    stream = torch.utils.data.ChainDataset([Stream(5), Stream(3)])
    for persistent in (False, True):
        loader = DataLoader(stream, worker_pool=one, persistent_workers=persistent, num_workers=2)
        for _ in range(2):
            assert len(list(loader)) == 16


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


def test_batches_larger_than_a_slot(workers):
    loader = DataLoader(
        Told(24, elements=200_000), batch_size=4, worker_pool=workers, max_shared_bytes=3 << 20
    )
    assert numbers(loader) == list(range(24))
    assert ringloader.report(loader).counters["oversize"] > 0


def test_values_that_cannot_be():
    for arguments in ({"num_workers": 0}, {"retries": -1}, {"max_bytes": 0}, {"start_timeout": 0}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            ringloader.ray.Workers(**{"num_workers": 1, **arguments})
    with pytest.raises(TypeError, match="num_workers"):
        ringloader.ray.Workers(1.5)
    with pytest.raises(ValueError, match="max_restarts"):
        ringloader.ray.Workers(1, max_restarts=3)


def test_what_does_not_go_together(workers):
    for arguments in (
        {"num_workers": 4},
        {"multiprocessing_context": "fork"},
        {"worker_method": "thread"},
        {"restart_workers": 1},
        {"sample_timeout": 1.0},
        {"dataset": ringloader.Dispatch(Stream(3))},
    ):
        with pytest.raises(ValueError, match=r"worker_pool|num_workers"):
            DataLoader(**{"dataset": Told(4), "num_workers": 2, "worker_pool": workers, **arguments})


def test_no_room(cluster):
    assert cluster.address
    with (
        ringloader.ray.Workers(2, resources={"nowhere": 1}, start_timeout=1) as workers,
        pytest.raises(
            RuntimeError, match=r"asks for {'num_cpus': 1, 'resources': {'nowhere': 1}}; `ray status` shows"
        ),
    ):
        iter(DataLoader(Told(4), worker_pool=workers))


def test_an_address_that_cannot_be_listened_at(cluster):
    assert cluster.address
    with (
        ringloader.ray.Workers(1, host="203.0.113.1") as workers,
        pytest.raises(RuntimeError, match=r"cannot listen for workers at 203\.0\.113\.1 .*host="),
    ):
        iter(DataLoader(Told(4), worker_pool=workers))


def test_an_address_that_actors_cannot_reach(workers, monkeypatch):
    from ringloader._ray import transport

    made = transport.Assignment
    # Nobody listens at port 1.
    monkeypatch.setattr(transport, "Assignment", lambda host, _, *others: made(host, 1, *others))
    with pytest.raises(RuntimeError, match=r"cannot reach the main process at .*:1 \(.*\); pass host= to"):
        iter(DataLoader(Told(4), worker_pool=workers, num_workers=1))


def test_ray_client(cluster, monkeypatch):
    from ray.util.client import ray as client

    assert cluster.address
    monkeypatch.setattr(client, "is_connected", lambda: True)
    with (
        ringloader.ray.Workers(1) as workers,
        pytest.raises(
            RuntimeError, match=r"cannot be used over Ray Client \(ray://\).*run it in the cluster"
        ),
    ):
        iter(DataLoader(Told(4), worker_pool=workers))


def test_what_cannot_be_pickled(workers):
    dataset = Told(4)
    dataset.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"dataset cannot be pickled .*lock"):
        iter(DataLoader(dataset, worker_pool=workers))


def test_other_versions(cluster, monkeypatch):
    assert cluster.address
    from ringloader._ray import crew

    monkeypatch.setattr(crew, "versions", lambda: {"torch": "1.0.0"})
    with (
        ringloader.ray.Workers(1) as workers,
        pytest.raises(RuntimeError, match=r"has torch .*, and the main process 1\.0\.0"),
    ):
        iter(DataLoader(Told(4), worker_pool=workers))


def test_after_shutdown(cluster):
    assert cluster.address
    workers = ringloader.ray.Workers(1)
    loader = DataLoader(Told(400, 0.01), worker_pool=workers)
    iterator = iter(loader)
    next(iterator)
    workers.shutdown()
    workers.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        for _ in range(400):
            next(iterator)
    with pytest.raises(RuntimeError, match="shut down"):
        iter(loader)
    del iterator
    gc.collect()


class HoldsAFile(Told):
    def __init__(self, count):
        super().__init__(count)
        self.file = Path(__file__).open(encoding="utf-8")  # noqa: SIM115


def test_an_open_file_does_not_travel_as_text(workers):
    with pytest.raises(TypeError, match=r"dataset cannot be pickled .*TextIOWrapper"):
        iter(DataLoader(HoldsAFile(4), worker_pool=workers))


def test_an_iterator_keeps_its_workers():
    iterator = iter(DataLoader(Told(24), batch_size=2, worker_pool=ringloader.ray.Workers(1, num_cpus=0.5)))
    gc.collect()
    assert numbers(list(iterator)) == list(range(24))
