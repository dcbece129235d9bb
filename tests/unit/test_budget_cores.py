"""Who waits by looking: only a process with a core that its workers do not need."""

import os

import pytest

from ringloader import _budget


@pytest.mark.parametrize(
    ("cores", "world", "workers", "spare"),
    [(2, None, 1, True), (2, None, 2, False), (16, "8", 1, True), (16, "8", 2, False), (1, None, 1, False)],
)
def test_a_core_to_spare(monkeypatch, cores, world, workers, spare):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cores)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if world is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", world)
    assert _budget.has_core_to_spare(workers) == spare
