"""Random programs see with ``prefetch_epochs`` what they see without it."""

import contextlib
import itertools
import random

import pytest
import torch
from prefetch_epochs_parts import (
    kill,
    made,
    worker_pid,
)
from torch.utils.data import (
    Dataset,
)
from torch.utils.data.distributed import DistributedSampler

from ringloader import StatefulDataLoader

pytestmark = pytest.mark.rings_only


@pytest.fixture(autouse=True, params=["batch", pytest.param("sample", marks=pytest.mark.slow)])
def task(request, monkeypatch):
    monkeypatch.setattr("prefetch_epochs_parts.TASK", request.param)
    return request.param


class Told(Dataset):
    """Each sample says its index, its epoch and a number drawn for it; some raise."""

    epoch = -1

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index % 11 == 5:
            raise ValueError(index)
        return index, self.epoch, torch.rand(()).item()

    def set_epoch(self, epoch):
        self.epoch = epoch


def program(seed, prefetch):
    """Returns what a random program sees."""
    dice = random.Random(seed)
    dataset, generator = Told(dice.randrange(1, 40)), torch.Generator().manual_seed(seed)
    options = {
        "batch_size": dice.randrange(1, 7),
        "num_workers": dice.randrange(1, 4),
        "prefetch_factor": dice.randrange(1, 5),
        "last_batch": dice.choice(["keep", "discard", "rollover"]),
        "on_error": "skip",
        "generator": generator,
        "seeding": "sample",
        "main_prefetch": dice.choice([0, 2]),
        "restart_workers": dice.choice([0, 5]),
    }
    sampler = None
    if dice.random() < 0.5:
        sampler = DistributedSampler(dataset, num_replicas=2, rank=dice.randrange(2))
        options["sampler"] = sampler
    else:
        options["shuffle"] = True
    loader = made(prefetch, dataset, StatefulDataLoader, seed=3, **options)
    seen, state, is_missed = [], None, False
    with loader:
        for epoch in range(8):
            act = dice.random()
            if act < 0.4:
                loader.set_epoch(epoch + dice.choice([0, 0, 0, 2]))
            elif act < 0.5 and sampler is not None:
                sampler.set_epoch(epoch)
            elif act < 0.55 and epoch > 0 and not is_missed:
                loader.call_workers(worker_pid)
            elif act < 0.65 and state is not None:
                loader.load_state_dict(state)
            elif act < 0.75 and options["restart_workers"] and epoch > 0:
                # An epoch that needs no batch of it starts no successor.
                is_missed = True
                with contextlib.suppress(ProcessLookupError):
                    kill(loader, 0)
            most = dice.choice([None, None, None, 1, 3])
            for batch in itertools.islice(loader, most):
                seen.append([column.tolist() for column in batch])
                if dice.random() < 0.1:
                    state = loader.state_dict()
            seen.append((loader.state_dict(), loader.fingerprint(), [bad.index for bad in loader.errors]))
            seen.append(len(loader))
    return seen


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_see_what_they_see_without_it(seed):
    assert program(seed, True) == program(seed, False)
