"""Memory is not kept for the next epoch where a process might still write to it, or something went wrong."""

from __future__ import annotations

import os
import signal
import time

import pytest

from faults.failing_datasets import Dies, Numbers, Raises
from parity.harness import PATHS, taking
from ringloader import DataLoader
from ringloader._transport import segment_cache


@pytest.fixture(params=PATHS, autouse=True)
def _path(request):
    with taking(request.param):
        yield


def keeps(loader):
    return segment_cache._warm.get(loader) is not None


@pytest.mark.parametrize("how", ["exit", "exit 0", "kill"])
def test_a_worker_died(how):
    loader = DataLoader(Dies(20, 7, how), num_workers=2, batch_size=None)
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(loader)
    assert not keeps(loader)
    loader.dataset.at = -1
    for _ in range(2):
        assert [int(batch[0]) for batch in loader] == list(range(20))
        assert keeps(loader)


def test_a_worker_was_killed_and_nobody_asked_it():
    """The worker's results had all been taken."""
    loader = DataLoader(Numbers(8), num_workers=2, batch_size=None)
    iterator = iter(loader)
    for _ in range(7):
        next(iterator)
    os.kill(iterator._workers[0].pid, signal.SIGKILL)
    iterator._workers[0].join()
    del iterator
    assert not keeps(loader)


def test_the_dataset_raised():
    """The workers live on after it, and end as they should."""
    loader = DataLoader(Raises(20, 7), num_workers=2, batch_size=None)
    with pytest.raises(KeyError):
        list(loader)
    loader.dataset.at = -1
    assert [int(batch[0]) for batch in loader] == list(range(20))


class LeavesAChild(Numbers):
    """Each worker forks a child, which has its memory and outlives it. Batches are the children's numbers."""

    def __getitem__(self, index):
        child = os.fork()
        if child == 0:
            while True:
                time.sleep(60)
        return super().__getitem__(index) * 0 + child


def test_a_worker_left_a_child():
    loader = DataLoader(LeavesAChild(1), num_workers=1, batch_size=None)
    (child,) = (int(batch[0]) for batch in loader)
    try:
        assert not keeps(loader)
    finally:
        os.kill(child, signal.SIGKILL)


class Stuck(Numbers):
    stuck = True

    def __getitem__(self, index):
        if index and self.stuck:
            time.sleep(60)
        return super().__getitem__(index)


def test_a_worker_was_terminated():
    """torch terminates a worker that does not end in time. The next one need not do its unanswered tasks."""
    loader = DataLoader(Stuck(4), num_workers=1, batch_size=None)
    iterator = iter(loader)
    held = next(iterator)
    iterator._workers[0].terminate()
    del iterator
    loader.dataset.stuck = False
    assert [int(batch[0]) for batch in loader] == list(range(4))
    assert held.eq(0).all()
