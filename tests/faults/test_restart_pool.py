"""Successors of lost workers whose processes are a pool's."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import ringloader
from faults.failing_datasets import Numbers
from faults.proc import Snapshot, wait_without_children
from faults.restart_parts import METHODS, DiesOnce, firsts
from ringloader import DataLoader

pytestmark = pytest.mark.rings_only


@pytest.fixture
def snapshot() -> Snapshot:
    firsts(DataLoader(Numbers(4), num_workers=1))
    return Snapshot.take()


@pytest.mark.limit(300)
@pytest.mark.parametrize("method", METHODS)
def test_workers_of_a_pool(method, tmp_path):
    """Two loaders, both under way; a process that was lost is another's successor in neither."""
    marks = [tmp_path / "first", tmp_path / "second"]
    for folder in marks:
        folder.mkdir()
    # Started once, so that parts that a start method needs are there then.
    firsts(DataLoader(Numbers(4), num_workers=1, multiprocessing_context=method))
    snapshot = Snapshot.take()
    with ringloader.WorkerPool(2, method) as pool:
        loaders = [
            DataLoader(
                DiesOnce(40, ends, folder, 20_000),
                batch_size=2,
                num_workers=2,
                worker_pool=pool,
                restart_workers=4,
            )
            for ends, folder in zip(
                [{0: "kill", 9: "exit", 30: "segfault"}, {1: "kill", 22: "exit 0"}], marks, strict=True
            )
        ]
        for _ in range(3):
            both = [list(batches) for batches in zip(*zip(*loaders, strict=True), strict=True)]
            assert [firsts(batches) for batches in both] == [list(range(40))] * 2
        assert [len(list(folder.iterdir())) for folder in marks] == [3, 2]
        del both
    del loaders, pool
    assert not wait_without_children(10)
    # Memory that a child forked in mid-epoch might have had is looked for when memory is made.
    firsts(DataLoader(Numbers(4), num_workers=1))
    snapshot.assert_nothing_left()


def test_a_pool_keeps_a_successor(tmp_path):
    def processes() -> set[int]:
        return {process.process.pid for process in pool._crew._processes}

    with ringloader.WorkerPool(1, "fork") as pool:
        loader = DataLoader(
            DiesOnce(10, {5: "kill"}, tmp_path), num_workers=1, worker_pool=pool, restart_workers=1
        )
        batches = iter(loader)
        before = processes()
        assert firsts(batches) == list(range(10))
        del batches
        gc.collect()
        after = processes()
        assert len(after) == 1 and not before & after, "the one that was lost"
        assert firsts(loader) == list(range(10)) and processes() == after


class DiesWhenAsked(Dataset[Any]):
    """Has the epoch that it was told last, as its only sample values. Ends its worker where a file is."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark
        self.epoch = -1

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 5 and self.mark.exists():
            self.mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_a_successor_of_a_pool_has_the_epoch_that_the_workers_were_told_last(tmp_path):
    """Its dataset is as it was pickled, at the first iterator."""
    mark = tmp_path / "mark"
    with ringloader.WorkerPool(2) as pool:
        loader = DataLoader(
            DiesWhenAsked(mark), batch_size=2, restart_workers=1, worker_pool=pool, prefetch_epochs=True
        )
        for epoch in (3, 4):
            loader.set_epoch(epoch)
            assert torch.cat(list(loader)).tolist() == [epoch] * 8
        for _ in range(2):
            assert torch.cat(list(loader)).tolist() == [4] * 8
        mark.touch()
        # The epoch that comes may have been begun before.
        for _ in range(2):
            assert torch.cat(list(loader)).tolist() == [4] * 8
        assert not mark.exists()
        loader.shutdown()


def test_a_successor_does_not_have_the_next_epoch(tmp_path):
    """Its dataset is as it is in the main process, where the next epoch may be named already."""
    mark = tmp_path / "mark"
    loader = DataLoader(
        DiesWhenAsked(mark), batch_size=2, restart_workers=1, num_workers=2, persistent_workers=True
    )
    loader.set_epoch(4)
    list(loader)
    loader.set_epoch(5)
    list(loader)
    mark.touch()
    iterator = iter(loader)
    loader.set_epoch(9)
    assert torch.cat(list(iterator)).tolist() == [5] * 8
    assert not mark.exists()
    assert torch.cat(list(loader)).tolist() == [9] * 8


def test_an_iterator_keeps_its_loader_and_its_pool(tmp_path):
    options: Any = {"worker_pool": ringloader.WorkerPool(1), "restart_workers": 1}
    batches = iter(DataLoader(DiesOnce(10, {5: "kill"}, tmp_path), **options))
    del options
    gc.collect()
    assert firsts(batches) == list(range(10))
    del batches
    assert not wait_without_children(10)
