"""Tasks go to the worker with the fewest where no sample depends on its worker."""

import time

import pytest
import torch
from torch.utils.data import (
    Dataset,
    get_worker_info,
)

from features.seeding.seeding_parts import WAYS, flat, made
from ringloader import StatefulDataLoader

pytestmark = [pytest.mark.rings_only, pytest.mark.filterwarnings("ignore:This DataLoader will create")]


class ByWorker(Dataset):
    """Worker 0 takes its time. Each sample says who made it."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        worker = get_worker_info().id
        if worker == 0:
            time.sleep(0.02)
        return index, worker


def slowly(loader):
    """Takes the batches one by one, so that a worker that is quick answers meanwhile."""
    for batch in loader:
        time.sleep(0.002)
        yield from batch


class WithState(ByWorker):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("way", ["two", "threads", "persistent"])
def test_tasks_go_to_the_worker_with_the_fewest(way, in_order):
    loader = made(ByWorker(), batch_size=1, in_order=in_order, **WAYS[way])
    for _ in range(2):
        got = list(slowly(loader))
        assert sorted(index for index, _ in got) == list(range(40))
        if in_order:
            assert got == sorted(got)
        assert sum(worker == 0 for _, worker in got) < 16


@pytest.mark.parametrize("way", ["two", "threads"])
@pytest.mark.parametrize(
    ("dataset", "options"),
    [(ByWorker(), {"seeding": "torch", "seed": None}), (WithState(), {"cls": StatefulDataLoader})],
)
def test_else_torchs_turns_stay(dataset, options, way):
    got = flat(made(dataset, batch_size=1, **WAYS[way], **options))
    assert got == [(index, index % 2) for index in range(40)]


def test_one_worker_may_have_all_tasks():
    """More than its part, and large ones, while the other is at its first."""

    class Large(ByWorker):
        def __getitem__(self, index):
            if get_worker_info().id == 0:
                time.sleep(0.05)
            return torch.full((50_000,), index), get_worker_info().id

    loader = made(Large(), batch_size=1, num_workers=2, prefetch_factor=4, max_shared_bytes=4 << 20)
    got = list(slowly(loader))
    assert [int(tensor[7]) for tensor, _ in got] == list(range(40))
    assert sum(worker == 0 for _, worker in got) < 20
