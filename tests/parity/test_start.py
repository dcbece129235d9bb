"""A start that fails half-way: torch's error, no second draw, nothing left, and no noise from `__del__`."""

from __future__ import annotations

import errno
import gc
import os

import pytest
import torch

from faults.failing_datasets import Unpicklable
from parity import harness
from parity.datasets import Samples
from parity.side_by_side import assert_same

WORKERS = 3


@pytest.fixture
def fails_at(monkeypatch):
    """Has the fork of a worker with this number fail, in every loader from now on."""
    fork = os.fork
    state = {"at": -1, "count": 0}

    def failing():
        state["count"] += 1
        if state["count"] - 1 == state["at"]:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", failing)

    def begin(at):
        state.update(at=at, count=0)

    return begin


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("at", range(WORKERS))
def test_a_fork_fails(loader_class, fails_at, at, persistent):
    def scenario(kind, told):
        loader = kind(Samples(7), shuffle=True, num_workers=WORKERS, persistent_workers=persistent)
        fails_at(at)
        told.step("iter", lambda: iter(loader))
        gc.collect()
        fails_at(-1)
        told.iterate(loader)

    steps = assert_same(scenario, loader_class)
    assert "BlockingIOError" in str(steps[0][1])


@pytest.mark.limit(300)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_the_dataset_cannot_be_pickled(loader_class, method):
    def scenario(kind, told):
        loader = kind(Unpicklable(7), shuffle=True, num_workers=2, multiprocessing_context=method)
        for _ in range(2):
            told.step("iter", lambda: iter(loader))
            gc.collect()

    steps = assert_same(scenario, loader_class)
    assert steps[0][1][0] == "error"


@harness.needs_new_words
@pytest.mark.parametrize("factor", [0, -1, "two"])
def test_a_prefetch_factor_that_was_broken_later(loader_class, factor):
    """torch's constructor refuses it after it has drawn."""

    def scenario(kind, told):
        loader = kind(Samples(7), shuffle=True, num_workers=1)
        loader.prefetch_factor = factor
        told.step("iter", lambda: iter(loader))
        gc.collect()
        loader.prefetch_factor = 2
        told.iterate(loader)

    assert_same(scenario, loader_class)


class RefusesIter:
    """A sampler whose n-th `iter` fails: torch calls it twice for the first epoch."""

    def __init__(self, at):
        self.at = at
        self.asked = 0

    def __len__(self):
        return 3

    def __iter__(self):
        self.asked += 1
        if self.asked == self.at:
            raise LookupError(f"iter number {self.at}")
        return iter([2, 0, 1])


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_iter_of_the_sampler_fails(loader_class, at, persistent):
    def scenario(kind, told):
        loader = kind(
            Samples(3), sampler=RefusesIter(at), batch_size=None, num_workers=2, persistent_workers=persistent
        )
        for _ in range(3):
            told.iterate(loader)
            gc.collect()

    steps = assert_same(scenario, loader_class)
    assert sum("iter number" in str(step[1]) for step in steps) == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_the_process_has_a_method_of_starting_that_fails(loader_class, workers):
    """An error of `Process` goes through, whatever it is; the next iterator starts."""

    def scenario(kind, told):
        loader = kind(Samples(3), num_workers=workers, multiprocessing_context="fork")
        context = loader.multiprocessing_context
        start = context.Process.start

        def refuse(_self):
            raise ZeroDivisionError("start")

        context.Process.start = refuse
        try:
            told.step("iter", lambda: iter(loader))
        finally:
            context.Process.start = start
        told.iterate(loader)

    assert_same(scenario, loader_class)


@pytest.mark.parametrize("workers", [1.0, 2.5, torch.tensor(1.0)])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_number_of_workers_that_is_no_integer(loader_class, workers, persistent):
    """torch draws a seed, and then refuses it."""

    def scenario(kind, told):
        loader = kind(Samples(3), num_workers=workers, persistent_workers=persistent)
        for _ in range(2):
            told.step("iter", lambda: iter(loader))

    assert "TypeError" in str(assert_same(scenario, loader_class)[0][1])
