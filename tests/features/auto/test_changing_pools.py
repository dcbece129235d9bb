"""``num_workers="auto"`` with a pool: processes come from it while an epoch runs, and go back."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from typing import Any

import pytest

import ringloader
from ringloader._features.auto import auto_workers
from scripted_number import (
    Scripted,
    auto,
    auto_of,
    begin_with,
    both_tasks,
    firsts,
    fixed,
    look_at_each_batch,
    put,
    slowly,
)

pytestmark = pytest.mark.rings_only


@pytest.fixture(autouse=True)
def each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    look_at_each_batch(monkeypatch)


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    """A script for a pool of three, which wants more."""
    return put(Scripted({5: 3, 30: 1, 50: 2}), monkeypatch)


def pids_of(pool: Any) -> set[int]:
    return {process.process.pid for process in pool._crew._processes}


@pytest.mark.parametrize(
    ("task", "method"),
    [*itertools.product(["batch", "sample"], ["fork"]), ("batch", "spawn"), ("sample", "forkserver")],
)
def test_processes_come_from_a_pool_and_go_back(task: str, method: str, limited: Scripted) -> None:
    other = fixed()
    with ringloader.WorkerPool(3, start_method=method) as pool:
        loader = auto(task, worker_pool=pool)
        assert loader.num_workers == 2
        pids: set[int] = set()
        for _ in range(2):
            found = []
            for batch in slowly(loader):
                found.append(batch[0].tolist())
                pids |= pids_of(pool)
                # What was given back is idle, for other iterators.
                lent = sum(process.is_lent for process in pool._crew._processes)
                assert lent <= 3 and len(pids) <= 3
            assert found == firsts(other)
            limited.seen = 0
        assert limited.changes[:5] == [2, 3, 2, 1, 2]
        assert pids_of(pool) == pids and len(pids) == 3


def test_a_process_that_was_given_back_serves_another_iterator(limited: Scripted) -> None:
    limited.script = {5: 3, 30: 1}
    with ringloader.WorkerPool(3, start_method="spawn") as pool:
        # As in a loop over a loader that nobody else has.
        iterator = iter(auto(worker_pool=pool))
        found, most = [], 0
        for number, batch in enumerate(slowly(iterator)):
            found.append(batch[0].tolist())
            most = max(most, len(iterator._workers))
            if number == 60:
                before = pids_of(pool)
                other = fixed(worker_pool=pool)
                assert firsts(other) == firsts(fixed())
                assert pids_of(pool) == before, "none was started for it"
        assert found == firsts(fixed())
        assert most == 3


def test_a_pool_is_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    with ringloader.WorkerPool(1) as pool:
        loader = auto(worker_pool=pool)
        assert loader.num_workers == 1
        assert auto_workers.limits(pool) == (1, 1)
        iterator = iter(loader)
        assert next(iterator)[2].tolist() == [1] * 4
        assert auto_of(iterator)._controller.most == 1
        del iterator
    # A loader that has found its number gets a smaller pool, or fewer processors.
    loader = auto()
    begin_with(loader, 4)
    monkeypatch.setattr(auto_workers, "most", lambda: 3)
    iterator = iter(loader)
    assert len(iterator._workers) == 3
    assert firsts(iterator) == firsts(fixed())


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("at", [6, 31, 52])
@both_tasks
def test_a_pools_process_that_is_killed_at_a_change_is_replaced(task: str, at: int) -> None:
    with ringloader.WorkerPool(3, start_method="fork") as pool:
        iterator = iter(auto(task, worker_pool=pool, restart_workers=9))
        found = []
        for number, batch in enumerate(slowly(iterator)):
            found.append(batch[0].tolist())
            if number in (at, at + 1):
                with contextlib.suppress(ProcessLookupError, TypeError):
                    os.kill(iterator._workers[-1].pid, signal.SIGKILL)
        assert found == firsts(fixed())
        del iterator, batch
        # The pool is as before.
        assert firsts(fixed(worker_pool=pool)) == firsts(fixed())
