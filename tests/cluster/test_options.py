"""Options of the main process and of the worker loop, with workers elsewhere."""

from __future__ import annotations

import asyncio

import pytest
import torch

import ringloader
from cluster.datasets import Told, numbers
from ringloader import DataLoader, StatefulDataLoader

pytestmark = pytest.mark.limit(300)


class Drawn(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        return index, torch.rand(2)


class Bad(Told):
    def __getitem__(self, index):
        if index == 5:
            raise ValueError(f"sample {index}")
        return super().__getitem__(index)


class Waits(Told):
    """Each sample has its number, and how many of its worker are under way."""

    under_way = 0

    async def __getitem__(self, index):
        self.under_way += 1
        found = self.under_way
        await asyncio.sleep(0.05)
        self.under_way -= 1
        return super().__getitem__(index)[0], found


def test_many_samples_of_a_worker_are_under_way(workers):
    loader = DataLoader(Waits(48), batch_size=4, worker_pool=workers, worker_concurrency=8, stats=True)
    batches = list(loader)
    assert numbers(batches) == list(range(48))
    assert max(int(found.max()) for _, found in batches) > 4
    assert ringloader.report(loader).path == "ray"
    assert {worker.under_way for worker in loader.epoch_stats().workers} == {0}, "it is not known"


def drawn(**arguments):
    torch.manual_seed(5)
    loader = DataLoader(Drawn(), batch_size=4, shuffle=True, seeding="sample", seed=7, **arguments)
    return [(indices.tolist(), draws.tolist()) for indices, draws in loader]


def test_seeding_by_samples_is_that_of_local_workers_of_any_number(workers):
    expected = drawn(num_workers=1)
    assert drawn(worker_pool=workers) == expected
    assert drawn(worker_pool=workers, num_workers=2) == expected


def test_an_epoch_is_resumed(workers):
    def make():
        torch.manual_seed(3)
        return StatefulDataLoader(Told(40), batch_size=4, shuffle=True, worker_pool=workers)

    first = make()
    iterator = iter(first)
    for _ in range(3):
        next(iterator)
    state = first.state_dict()
    rest = numbers(iterator)
    second = make()
    second.load_state_dict(state)
    assert numbers(second) == rest
    assert ringloader.report(second).path == "ray"


def test_bad_samples_are_left_out(workers):
    loader = DataLoader(Bad(12), batch_size=4, worker_pool=workers, on_error="skip")
    assert numbers(loader) == [number for number in range(12) if number != 5]


def test_epochs_begin_early(workers):
    loader = DataLoader(Told(24), batch_size=4, worker_pool=workers, prefetch_epochs=True)
    for _ in range(3):
        assert numbers(loader) == list(range(24))


def test_batches_are_decoded_ahead(workers):
    loader = DataLoader(Told(24), batch_size=4, worker_pool=workers, main_prefetch=2, in_order=True)
    assert numbers(loader) == list(range(24))


def test_batches_as_they_come(workers):
    loader = DataLoader(Told(24), batch_size=4, worker_pool=workers, in_order=False)
    assert sorted(numbers(loader)) == list(range(24))


def test_a_device(workers):
    loader = DataLoader(Told(24), batch_size=4, worker_pool=workers, device="cpu")
    assert numbers(loader) == list(range(24))
