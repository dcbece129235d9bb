"""Options of ours do with ``worker_concurrency`` what they do over plain samples without it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from typing import Any

import pytest
import torch
from parity_programs import WAYS, Coroutines, Plain, Threads, program, row, run, step, tensor, without_workers
from torch.utils.data import get_worker_info

import ringloader
from parity.describe import describe
from ringloader import CachedDataset, DataLoader, Retry, StatefulDataLoader

pytestmark = pytest.mark.rings_only


def other(index: int, error: Exception) -> Any:
    assert get_worker_info() is not None
    return tensor(index), type(error).__name__


ALONE: dict[str, Any] = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
OPTIONS: dict[str, dict[str, Any]] = {
    "skip": {"on_error": "skip"},
    "replace": {"on_error": other},
    "retry": {"on_error": Retry(2, 0.001, "skip")},
    "at most": {"on_error": "skip", "max_errors": 1},
    "seeds": {"seeding": "epoch", "seed": 3},
    "stats": {"stats": True},
    "restarts": {"restart_workers": 5},
    "timeout": {"sample_timeout": 30.0},
    "no stall": {"prefetch_epochs": True, "persistent_workers": True},
    "main": {"main_prefetch": 2},
    "watchdog": {"watchdog": 30.0},
    "threads": {"worker_method": "thread"},
    "no workers": ALONE,
    "skip without workers": {"on_error": "skip", **ALONE},
    "skip in threads": {"on_error": "skip", "worker_method": "thread"},
    "samples": {"worker_task": "sample"},
    "samples skipped": {"worker_task": "sample", "on_error": "skip"},
    "auto": {"num_workers": "auto", "prefetch_factor": None},
    "resets": {"worker_reset_fn": len},
}


def seen(kind: type[Plain], made: Any, **more: Any) -> Any:
    """Returns what a program sees, and which samples were bad."""
    with DataLoader(made.dataset(kind), **made.arguments(), **more) as loader:
        found = run(loader, made.takes)
        bad = [(bad.index, bad.worker_id, type(bad.error).__name__, bad.handling) for bad in loader.errors]
    return found, bad


# Each case has a program for each way, since all but a few cases are slow.
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", OPTIONS)
def test_programs_see_what_they_see_without_it(name: str, seed: int) -> None:
    for way in WAYS:
        made = program(seed, way, OPTIONS[name])
        waiting, plain = WAYS[way]
        at_once = random.Random(seed).choice([2, 5, 32])
        expected, bad = seen(plain, made)
        found, bad_of_ours = seen(waiting, made, worker_concurrency=at_once)
        if "worker_task" in OPTIONS[name] or "auto" in OPTIONS[name].values():
            # Which worker makes a sample is a matter of time.
            found, expected = map(without_workers, (found, expected))
            bad, bad_of_ours = ([(index, *rest) for index, _, *rest in of] for of in (bad, bad_of_ours))
        assert found == expected, way
        assert bad_of_ours == bad, way


@pytest.mark.parametrize("kind", [Coroutines, Threads])
@pytest.mark.parametrize("seed", range(6))
def test_batches_are_torchs_when_lost_workers_have_successors(seed: int, kind: type[Plain]) -> None:
    dice = random.Random(seed)
    arguments = {
        "batch_size": 4,
        "num_workers": dice.randrange(1, 4),
        "prefetch_factor": dice.randrange(1, 4),
    }
    expected = [step(iterator) for iterator in [iter(DataLoader(Plain(96, row, {}), batch_size=4))] * 25]
    loader: Any = DataLoader(kind(96, row, {}), **arguments, worker_concurrency=8, restart_workers=9)
    iterator: Any = iter(loader)
    found = []
    for number in range(25):
        if number in (3, 11):
            os.kill(iterator._workers[0].pid, signal.SIGKILL)
        found.append(step(iterator))
    assert found == expected


@pytest.mark.parametrize("kind", [Coroutines, Threads])
@pytest.mark.parametrize("seed", range(6))
def test_an_epoch_that_resumes_has_the_rest(seed: int, kind: type[Plain]) -> None:
    dice = random.Random(seed)
    arguments = {"batch_size": 3, "num_workers": dice.randrange(4), "seed": 4, "seeding": "epoch"}
    whole = [batch.tolist() for batch in DataLoader(Plain(40, row, {}), batch_size=3)]
    first: Any = StatefulDataLoader(kind(40, row, {}), **arguments, worker_concurrency=8)
    after = dice.randrange(1, 12)
    iterator = iter(first)
    begun = [next(iterator).tolist() for _ in range(after)]
    state = first.state_dict()
    del iterator
    second: Any = StatefulDataLoader(kind(40, row, {}), **arguments, worker_concurrency=3)
    second.load_state_dict(state)
    assert begun + [batch.tolist() for batch in second] == whole
    first.shutdown()
    second.shutdown()


@pytest.mark.parametrize("kind", [Coroutines, Threads])
@pytest.mark.parametrize("workers", [0, 2])
def test_samples_are_cached(kind: type[Plain], workers: int) -> None:
    expected = [batch.tolist() for batch in DataLoader(Plain(40, row, {}), batch_size=4)]
    cached = CachedDataset(kind(40, row, {}))
    loader: Any = DataLoader(cached, batch_size=4, num_workers=workers, worker_concurrency=8)
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == expected
    loader.shutdown()
    assert cached.stats()["items"] == 40


@pytest.mark.parametrize("kind", [Coroutines, Threads])
def test_a_pool_serves_loaders_of_both_kinds(kind: type[Plain]) -> None:
    with ringloader.WorkerPool(2) as pool:
        for _ in range(2):
            plain: Any = DataLoader(Plain(40, row, {}), batch_size=4, num_workers=2, worker_pool=pool)
            expected = [batch.tolist() for batch in plain]
            loader: Any = DataLoader(
                kind(40, row, {}), batch_size=4, num_workers=2, worker_pool=pool, worker_concurrency=8
            )
            assert [batch.tolist() for batch in loader] == expected


def drawn() -> Any:
    info = get_worker_info()
    assert info is not None
    rng = info.rng
    numbers = torch.rand(2, generator=rng.torch_generator)
    return rng.random_generator.random(), numbers, rng.numpy_generator.random()


class DrawingCoroutines(Plain):
    """Samples with two draws, between which others draw."""

    async def __getitem__(self, index: int) -> Any:
        first = drawn()
        await asyncio.sleep(self.seconds(index))
        return index, first, drawn()


class DrawingThreads(Plain):
    def __getitem__(self, index: int) -> Any:
        first = drawn()
        time.sleep(self.seconds(index))
        return index, first, drawn()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_samples_draw_the_same_numbers_however_they_are_made(seed: int) -> None:
    dice = random.Random(seed)
    length, take = dice.randrange(20, 50), dice.randrange(1, 4)
    places: list[dict[str, Any]] = [
        {"worker_concurrency": 2, "num_workers": 1},
        {"worker_concurrency": 32, "num_workers": 3, "prefetch_factor": 5},
        {"worker_concurrency": 8},
        {"worker_concurrency": 8, "num_workers": 2, "worker_method": "thread"},
        {"worker_concurrency": 8, "num_workers": 2, "worker_task": "sample"},
    ]
    found = []
    for number, more in enumerate(places):
        kind = (DrawingCoroutines, DrawingThreads)[number % 2]
        loader: Any = StatefulDataLoader(
            kind(length, row, {}),
            batch_size=dice.randrange(1, 9),
            collate_fn=list,
            seeding="sample",
            seed=seed,
            **more,
        )
        whole = [sample for batch in loader for sample in batch]
        iterator = iter(loader)
        for _ in range(take):
            next(iterator)
        state, rest = loader.state_dict(), [sample for batch in iterator for sample in batch]
        loader.load_state_dict(state)
        assert describe([sample for batch in loader for sample in batch]) == describe(rest)
        found.append(describe(whole))
        loader.shutdown()
    assert found == [found[0]] * len(places)
