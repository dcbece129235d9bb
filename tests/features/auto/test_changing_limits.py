"""``num_workers="auto"``: the number of workers where memory, processors or the dataset set a limit."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from ringloader import DataLoader
from ringloader._features.auto import measuring
from scripted_number import (
    MOST,
    auto,
    both_tasks,
    look_at_each_batch,
)
from small_datasets import Made, Numbers, SharedStream

pytestmark = pytest.mark.rings_only


@pytest.fixture(autouse=True)
def each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    look_at_each_batch(monkeypatch)


def test_memory_for_two_workers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the real decision, over samples that wait."""
    running: list[int] = []

    def has_memory(pids: Any, more: int) -> bool:
        running.append(len(pids) + more)
        return len(pids) + more <= 2

    monkeypatch.setattr(measuring, "has_memory", has_memory)
    loader = DataLoader(Sleeps(60), batch_size=1, num_workers="auto")
    assert len(list(loader)) == 60
    assert loader.num_workers == 2
    assert set(running) == {2, 3}


class Sleeps(Dataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        time.sleep(0.05)
        return index


def burn(index: int) -> int:
    end = time.thread_time() + 0.004
    while time.thread_time() < end:
        pass
    return index


def used_for_batches_that_compute() -> int:
    loader = DataLoader(Made(burn, 130), batch_size=1, num_workers="auto")
    assert torch.cat(list(loader)).tolist() == list(range(130))
    return loader.num_workers


# The number that is found depends on how fast the machine is, and on other programs.
@pytest.mark.slow
def test_it_does_not_grow_where_other_programs_have_all_processors() -> None:
    hog = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    hogs = [subprocess.Popen(hog, stdout=subprocess.PIPE) for _ in range(2 * len(os.sched_getaffinity(0)))]
    try:
        for process in hogs:
            assert process.stdout is not None
            process.stdout.readline()
        # Other tests may leave the processors to it for a moment.
        assert any(used_for_batches_that_compute() == 1 for _ in range(3))
    finally:
        for process in hogs:
            process.kill()
            process.communicate()


@pytest.mark.slow
@both_tasks
def test_samples_that_wait_get_more_workers_than_the_bound(task: Any) -> None:
    loader = DataLoader(Sleeps(200), batch_size=1, num_workers="auto", worker_task=task)
    assert torch.cat(list(loader)).tolist() == list(range(200))
    assert 2 < loader.num_workers <= MOST


def test_iterable_datasets_have_the_bound() -> None:
    loader = DataLoader(SharedStream(range(40)), batch_size=4, num_workers="auto")
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(40))
    assert loader.num_workers == 2


def test_torchs_own_loader_has_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = auto(seeding="torch") if False else DataLoader(Numbers(8), num_workers="auto")
    monkeypatch.setenv("RINGLOADER", "off")
    iterator = iter(loader)
    assert len(iterator._workers) == loader.num_workers == 2
    assert len(list(iterator)) == 8
