"""Workers that are killed at random moments, and their successors, lose and leave nothing."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from typing import Any

import pytest

from faults.failing_datasets import Numbers
from faults.proc import Snapshot, descriptors, wait_without_children
from faults.restart_parts import firsts
from ringloader import DataLoader

pytestmark = pytest.mark.rings_only


@pytest.fixture
def snapshot() -> Snapshot:
    firsts(DataLoader(Numbers(4), num_workers=1))
    return Snapshot.take()


def kill_now_and_then(iterator: Any, chance: random.Random, stop: threading.Event, kills: list[int]) -> None:
    while not stop.wait(chance.uniform(0.005, 0.08)):
        pid = chance.choice(list(iterator._workers)).pid
        if pid is not None:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            kills.append(pid)


@pytest.mark.limit(300)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("in_order", [True, False])
def test_a_storm_of_kills(seed, in_order, snapshot):
    storm(seed, workers=4, batches=400, in_order=in_order, at_least=5)
    snapshot.assert_nothing_left()


def storm(seed: int, workers: int, batches: int, in_order: bool, at_least: int) -> int:
    """Kills workers at random while batches of all sizes are read and held. Returns how many were killed."""
    chance = random.Random(seed)
    loader = DataLoader(
        Numbers(4 * batches, chance.choice([16, 700, 20_000])),
        batch_size=4,
        num_workers=workers,
        prefetch_factor=chance.choice([1, 2, 6]),
        restart_workers=1 << 30,
        in_order=in_order,
    )
    iterator: Any = iter(loader)
    stop, kills = threading.Event(), []
    killer = threading.Thread(target=kill_now_and_then, args=(iterator, chance, stop, kills))
    killer.start()
    found, held = [], []
    try:
        for batch in iterator:
            assert bool((batch == batch[:, :1]).all())
            found += [int(number) for number in batch[:, 0]]
            held.append((found[-4:], batch))
            if len(held) > 20:
                numbers, old = held.pop(chance.randrange(len(held)))
                assert [int(number) for number in old[:, 0]] == numbers
                assert bool((old == old[:, :1]).all())
            if len(kills) < at_least:
                time.sleep(0.001)
    finally:
        stop.set()
        killer.join()
    assert (found if in_order else sorted(found)) == list(range(4 * batches))
    assert len(kills) >= at_least
    return len(kills)


@pytest.mark.slow
@pytest.mark.limit(float(os.environ.get("STORM_SECONDS", "10")) + 120)
def test_a_long_storm():
    seconds = float(os.environ.get("STORM_SECONDS", "10"))
    until, seed, batches, kills = time.monotonic() + seconds, 100, 0, 0
    while time.monotonic() < until:
        kills += storm(seed, workers=8, batches=1000, in_order=seed % 4 != 3, at_least=5)
        batches += 1000
        seed += 1
    sys.stdout.write(f"{batches} batches, {kills} kills, each batch once\n")


def test_restarts_leave_nothing_behind(snapshot):
    loader = DataLoader(Numbers(100_000, 16), num_workers=2, restart_workers=100)
    iterator: Any = iter(loader)
    series = []
    for count in range(60):
        os.kill(iterator._workers[count % 2].pid, signal.SIGKILL)
        pid = iterator._workers[count % 2].pid
        while iterator._workers[count % 2].pid == pid:
            next(iterator)
        series.append((len(descriptors()), len(os.listdir("/proc/self/task"))))  # noqa: PTH208
    sys.stdout.write(f"descriptors and threads: {series[::10]}\n")
    # The first restarts may load what is kept.
    assert max(series[20:]) == min(series[20:])
    del iterator
    loader.shutdown()
    assert wait_without_children(10) == {}
    snapshot.assert_nothing_left()
