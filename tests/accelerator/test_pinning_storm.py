"""Pinned batches, sent to the device by copies that are late at random, and dropped at once: every byte."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from accelerator import pretend
from accelerator.pinned import IS_NAMED, PIN
from parity.datasets import identity

# Batches in a run of all tests, and in one that has time.
QUICK, ALL = 100_000, 1_000_000
WORDS = 16


class Numbered(Dataset[Any]):
    """Batch `i` is words that tell `i`, in a few shapes; now and then one that a thread copies."""

    def __init__(self, length: int, large_every: int) -> None:
        self.length = length
        self.large_every = large_every

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index % self.large_every == 0:
            return torch.full((40_000,), index)
        tensor = torch.full((WORDS + index % 3,), index)
        return tensor if index % 4 else {"a": tensor, "b": [tensor + 1]}


def leaves(batch: Any, index: int) -> list[tuple[torch.Tensor, int]]:
    return [(batch["a"], index), (batch["b"][0], index + 1)] if isinstance(batch, dict) else [(batch, index)]


class Consumer:
    """Sends leaves to the device, drops them, and looks at them once they must be there."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.streams = [torch.Stream(device=pretend.NAME) for _ in range(3)]
        self.sent: list[tuple[torch.Tensor, int]] = []
        self.checked = 0

    def take(self, batch: Any, index: int) -> None:
        for leaf, value in leaves(batch, index):
            assert leaf.is_pinned()
            if self.random.random() < 0.1:
                with pretend.on_stream(self.random.choice(self.streams)):
                    self.sent.append((leaf.to(pretend.NAME, non_blocking=True), value))
            elif leaf.numel() > 1000 or self.random.random() < 0.02:
                # Held back, as by a caller who keeps some.
                self.sent.append((leaf, value))
            else:
                assert bool((leaf == value).all()), f"{value}: {leaf[:8].tolist()}"
                self.checked += 1
        if len(self.sent) >= 200:
            self.check()

    def check(self) -> None:
        pretend.synchronize()
        for tensor, value in self.sent:
            here = tensor.cpu()
            assert bool((here == value).all()), f"{value}: {here[:8].tolist()}"
        self.checked += len(self.sent)
        self.sent.clear()


def storm(loader_class: Any, total: int, *, seed: int, workers: int, size: int = 20_000) -> None:
    rng = random.Random(seed)
    done = epoch = 0
    while done < total:
        epoch += 1
        loader = loader_class(
            Numbered(size, large_every=500),
            num_workers=workers,
            batch_size=None,
            collate_fn=identity,
            persistent_workers=True,
            prefetch_factor=rng.choice((2, 8)),
            **PIN,
        )
        consumer = Consumer(rng.random())
        for _ in range(2):
            stop = rng.choice((None, None, rng.randrange(size)))
            for index, batch in enumerate(loader):
                if index % 2000 == 0:
                    pretend.set_delay_range(0, rng.choice((0, 20, 200, 2000)), seed=rng.randrange(1 << 30))
                consumer.take(batch, index)
                done += 1
                if index == stop:
                    break
        consumer.check()
        assert consumer.checked >= 1
        del loader
    assert not pretend.violations()
    assert pretend.counters()["snapshots"] == 0


@pytest.mark.limit(300)
def test_storm(loader_class):
    pretend.set_poison(True)
    storm(loader_class, QUICK if not IS_NAMED else QUICK // 20, seed=os.getpid(), workers=2)


def test_a_planted_fault_is_found(loader_class):
    pretend.set_poison(True)
    pretend.set_unguarded(True)
    with pytest.raises(AssertionError):
        storm(loader_class, QUICK, seed=1, workers=2)


@pytest.mark.slow
@pytest.mark.limit(1800)
@pytest.mark.skipif(IS_NAMED, reason="torch's own thread pins")
def test_storm_of_a_million(loader_class):
    pretend.set_poison(True)
    storm(loader_class, ALL, seed=os.getpid(), workers=2)


@pytest.mark.limit(300)
def test_storm_in_threads(loader_class):
    """A loader each, all on one device."""
    pretend.set_poison(True)
    failed: list[BaseException] = []

    def walk(seed: int) -> None:
        try:
            storm(loader_class, 3000, seed=seed, workers=1, size=1000)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=walk, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


@pytest.mark.limit(300)
def test_storm_with_deaths(loader_class):
    """A worker is killed at any time: an error in its turn, right bytes before it, nothing left behind."""
    pretend.set_poison(True)
    pretend.set_delay_range(0, 2000)
    rng = random.Random(os.getpid())
    killed = 0
    for _ in range(15):
        loader = loader_class(
            Numbered(200_000, large_every=20), num_workers=2, batch_size=None, collate_fn=identity, **PIN
        )
        iterator = iter(loader)
        victim = rng.choice(iterator._workers).pid
        timer = threading.Timer(rng.random() * 0.3, os.kill, (victim, signal.SIGKILL))
        timer.start()
        consumer = Consumer(rng.random())
        begun = time.monotonic()
        try:
            for index, batch in enumerate(iterator):
                consumer.take(batch, index)
                assert time.monotonic() - begun < 30
        except RuntimeError as error:
            assert "DataLoader worker (pid" in str(error)
            killed += 1
        timer.join()
        consumer.check()
        del iterator, loader
    assert killed == 15
    assert not pretend.violations()
