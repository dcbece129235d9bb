"""Datasets that draw, loaders over them with ``seeding=``, and the numbers that the documents promise."""

import itertools
import random

import numpy as np
import torch
from torch.utils.data import (
    Dataset,
    IterableDataset,
    get_worker_info,
)

from ringloader import DataLoader

N = 23
SEED = 1234
WAYS = {
    "none": {},
    "one": {"num_workers": 1},
    "two": {"num_workers": 2},
    "three": {"num_workers": 3},
    "prefetch": {"num_workers": 2, "prefetch_factor": 5},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "decoded": {"num_workers": 2, "main_prefetch": 2},
    "watched": {"num_workers": 2, "watchdog": 100.0},
    "skipping": {"num_workers": 2, "on_error": "skip"},
    "restarting": {"num_workers": 2, "restart_workers": 1},
    "forkserver": {"num_workers": 2, "multiprocessing_context": "forkserver"},
    "spawn": {"num_workers": 2, "multiprocessing_context": "spawn"},
    "threads": {"num_workers": 2, "worker_method": "thread"},
    "three threads": {"num_workers": 3, "worker_method": "thread", "on_error": "skip", "watchdog": 100.0},
}


def key_of(seed, epoch, rank, worker, place):
    """The formula of docs/seeds.md."""
    key = 0
    for part in (seed, epoch, rank, worker, place):
        z = (key + (part + 1) * 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        key = z ^ (z >> 31)
    return key


def drawn(draws=1):
    """Draws from the generators that a dataset may use here: from python's, torch's, numpy's."""
    info = get_worker_info()
    if getattr(info, "worker_method", None) == "thread":
        rng = info.rng
        return [
            (
                rng.random_generator.random(),
                torch.rand(1, generator=rng.torch_generator).item(),
                rng.numpy_generator.random(),
            )
            for _ in range(draws)
        ]
    return [(random.random(), torch.rand(1).item(), np.random.random()) for _ in range(draws)]


def expected(key, draws=1, is_thread=False):
    python, torchs = random.Random(key), torch.Generator().manual_seed(key)
    numpys = np.random.default_rng(key) if is_thread else np.random.RandomState(key >> 32)
    return [(python.random(), torch.rand(1, generator=torchs).item(), numpys.random()) for _ in range(draws)]


class Drawing(Dataset):
    """Gives each index with numbers that are drawn for it."""

    def __init__(self, length=N):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index, *drawn()[0]


class Stream(IterableDataset):
    """Each worker's own samples, with numbers that are drawn for them."""

    def __init__(self, length=7):
        self.length = length

    def __iter__(self):
        info = get_worker_info()
        for number in range(self.length):
            yield (0 if info is None else info.id), number, *drawn()[0]


def made(dataset=None, cls=DataLoader, **options):
    options = {"collate_fn": list, "batch_size": 4, "seeding": "sample", "seed": SEED, **options}
    return cls(Drawing() if dataset is None else dataset, **options)


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


def samples(order, epoch=0, rank=0, places=None, is_thread=False):
    """The samples of an epoch with this order."""
    places = range(len(order)) if places is None else places
    return [
        (index, *expected(key_of(SEED, epoch, rank, 0, place), is_thread=is_thread)[0])
        for place, index in zip(places, order, strict=True)
    ]


class Several(Drawing):
    def __getitems__(self, indices):
        assert type(indices) is list
        return [self[index] for index in indices]


class Following:
    """A ``collate_fn`` that draws."""

    def __call__(self, batch):
        return batch, drawn(2)


def key_of_batch(place):
    """The key of the batch whose first sample has this place."""
    z = (key_of(SEED, 0, 0, 0, place) + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)
