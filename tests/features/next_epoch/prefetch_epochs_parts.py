"""Datasets that count what they are asked, and loaders over them with ``prefetch_epochs``."""

import multiprocessing
import os
import signal
import time

import torch
from torch.utils.data import (
    Dataset,
    Sampler,
)

from ringloader import DataLoader
from ringloader._features.next_epoch.next_epoch import NextEpoch

LENGTH = 20


def next_epoch_of(iterator):
    """Returns the feature that begins the next epoch of an iterator."""
    (found,) = (feature for feature in iterator._features if isinstance(feature, NextEpoch))
    return found


# The way in which workers share the work, in all tests here.
TASK = "batch"


class Asked(Dataset):
    """Counts, over all workers, how often it is asked for a sample, and draws for each."""

    def __init__(self, length=LENGTH):
        self.length = length
        self.epoch = None
        self.asked = multiprocessing.Value("q", 0)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        with self.asked:
            self.asked.value += 1
        return index, torch.rand(()).item()

    def wait_for(self, asked):
        """Waits until it was asked so often, no more."""
        deadline = time.monotonic() + 30
        while self.asked.value < asked:
            assert time.monotonic() < deadline, f"{self.asked.value} of {asked} samples"
            time.sleep(0.001)
        assert self.asked.value == asked


class ToldAsked(Asked):
    """Says with each sample which epoch it was told."""

    def __getitem__(self, index):
        super().__getitem__(index)
        return index, -1 if self.epoch is None else self.epoch

    def set_epoch(self, epoch):
        self.epoch = epoch


def made(prefetch=True, dataset=None, cls=DataLoader, **options):
    options = {"batch_size": 2, "num_workers": 2, "persistent_workers": True, "worker_task": TASK} | options
    if options.get("batch_sampler") is not None:
        del options["batch_size"]
    return cls(Asked() if dataset is None else dataset, prefetch_epochs=prefetch, **options)


def lists(batches):
    return [[column.tolist() for column in batch] for batch in batches]


class Counting(Sampler):
    """Counts its epochs itself."""

    def __init__(self, source):
        self.source = source
        self.epoch = 0

    def __len__(self):
        return len(self.source)

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        yield from torch.randperm(len(self.source), generator=generator).tolist()
        self.epoch += 1

    def set_epoch(self, epoch):
        self.epoch = epoch


class Drawing(Sampler):
    """Draws from the program's generator as it goes."""

    def __len__(self):
        return LENGTH

    def __iter__(self):
        for _ in range(LENGTH):
            yield int(torch.randint(LENGTH, ()))


def worker_pid(_dataset):
    return os.getpid()


def kill(loader, worker):
    process = loader._iterator._workers[worker]
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
