"""The number that ``num_workers="auto"`` finds, over many seeds of noisy workloads in simulated time.

The counting of ``_features.auto.auto_workers`` and the decisions of ``_features.auto`` are the real ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from simulated_loader import Batch, SimulatedLoader, Workload, simulated

from ringloader._features.auto import controller as controller_module
from ringloader._features.auto import measuring
from ringloader._features.auto.controller import Controller

pytestmark = pytest.mark.rings_only

SEEDS = 10
SECONDS = 20.0


def varied(rng: random.Random, seconds: float, deviation: float) -> float:
    """Returns a lognormal time of this mean, with a deviation that is a part of it."""
    sigma = math.sqrt(math.log(1 + deviation**2))
    return seconds * rng.lognormvariate(-(sigma**2) / 2, sigma)


def coming_and_going(processes: int, on: float, off: float, each: float = 0.5) -> Callable[..., int]:
    """Returns other programs that run for some seconds and are gone for others, on average."""

    def others(rng: random.Random, now: float) -> int:
        if now == 0:
            others.running = False  # type: ignore[attr-defined]
        if rng.random() < each / (on if others.running else off):  # type: ignore[attr-defined]
            others.running = not others.running  # type: ignore[attr-defined]
        return processes * others.running  # type: ignore[attr-defined]

    return others


def sleeping(deviation: float, **options: Any) -> Workload:
    return Workload(lambda rng, _: Batch(wait=varied(rng, 0.16, deviation), cpu=0.002), **options)


def computing(deviation: float, seconds: float = 0.05, **options: Any) -> Workload:
    return Workload(
        lambda rng, _: Batch(cpu=varied(rng, seconds, deviation)), **{"main": seconds / 25, **options}
    )


# Each with the best number, and the least number that is right.
WORKLOADS: dict[str, tuple[Workload, int, int]] = {
    "samples that sleep": (sleeping(0.1), 8, 8),
    "samples that sleep, all alike": (sleeping(0.0), 8, 8),
    "samples that sleep, varied": (sleeping(0.3), 8, 7),
    "samples that sleep, with programs that come and go": (
        sleeping(0.1, others=coming_and_going(3, 3.0, 3.0), others_each=0.5),
        8,
        8,
    ),
    "samples that sleep, and evaluations": (
        sleeping(0.1, step=lambda _, batch: 1.5 if batch % 40 == 39 else 0.0),
        8,
        7,
    ),
    "two processors": (computing(0.3), 2, 2),
    "two processors, small batches": (computing(0.3, 0.01), 2, 2),
    "two processors, very varied": (computing(0.6), 2, 2),
    "two processors, with a program that comes and goes": (
        computing(0.3, others=coming_and_going(1, 1.0, 3.0), others_each=0.5),
        2,
        2,
    ),
    "eight processors": (computing(0.3, 0.1, cores=8), 7, 7),
}


def found(monkeypatch: pytest.MonkeyPatch, workload: Workload, seed: int) -> SimulatedLoader:
    """Returns an epoch's loader with ``num_workers="auto"``."""
    bound = 2 if workload.cores == 2 else 7
    loader = simulated(monkeypatch, workload, seed, Controller(bound, 4 * bound))
    loader.run(SECONDS)
    return loader


def parts_of_best(monkeypatch: pytest.MonkeyPatch, name: str, seeds: int = SEEDS) -> list[tuple[float, int]]:
    """Returns, for each seed, the rate as a part of the best fixed number's, and the last number."""
    workload, best, _ = WORKLOADS[name]
    parts = []
    for seed in range(seeds):
        fixed = simulated(monkeypatch, workload, seed, None, best)
        fixed.run(SECONDS)
        loader = found(monkeypatch, workload, seed)
        parts.append((loader.returned / loader.now / (fixed.returned / fixed.now), loader.used))
    return parts


def is_good(parts: list[tuple[float, int]], least: int) -> bool:
    good = sum(part >= 0.9 and number >= least for part, number in parts)
    return good >= 0.95 * len(parts)


@pytest.mark.parametrize("name", WORKLOADS)
def test_an_epoch_is_nearly_as_fast_as_with_the_best_number(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = parts_of_best(monkeypatch, name)
    assert is_good(parts, WORKLOADS[name][2]), sorted(parts)


def is_refused_wrongly(monkeypatch: pytest.MonkeyPatch) -> bool:
    """Returns true if one worker is left after a minute of a very noisy workload, for one of the seeds."""
    for seed in range(SEEDS):
        loader = found(monkeypatch, computing(1.0), seed)
        loader.run(40.0)
        if loader.used < 2:
            return True
    return False


def test_a_refusal_that_noise_made_is_not_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_refused_wrongly(monkeypatch)
    monkeypatch.setattr(controller_module, "_AFTER_DOUBT", 1e9)
    assert is_refused_wrongly(monkeypatch)


def test_what_the_first_sample_says_is_wrong_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_module, "_STAYS", 0.0)
    monkeypatch.setattr(controller_module, "_GOES", 0.0)
    monkeypatch.setattr(measuring, "_SAMPLES", 1)
    monkeypatch.setattr(measuring, "_BATCHES", 1)
    assert not is_good(parts_of_best(monkeypatch, "samples that sleep, varied"), 7)


@pytest.mark.parametrize(
    ("step", "needed"), [(0.05, 1), (0.02, 1)], ids=["a step of 50 ms", "a step of 20 ms"]
)
def test_a_caller_that_is_the_limit_gets_no_more_than_it_needs(
    step: float, needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = Workload(
        lambda rng, _: Batch(wait=varied(rng, 0.012, 0.3), cpu=0.001),
        step=lambda rng, _: varied(rng, step, 0.1),
    )
    for seed in range(SEEDS):
        loader = found(monkeypatch, workload, seed)
        assert loader.used <= needed + 1
        assert loader.returned / loader.now >= 0.9 / (step + 0.001)


def test_a_step_that_three_workers_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload(lambda rng, _: Batch(wait=varied(rng, 0.14, 0.3), cpu=0.001), step=lambda _, __: 0.05)
    numbers = []
    for seed in range(SEEDS):
        loader = found(monkeypatch, workload, seed)
        assert loader.returned / loader.now >= 0.9 * 20
        numbers.append(loader.used)
    assert set(numbers) <= {3, 4}


def test_workers_that_bring_nothing_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need a lock that one of them holds nearly always."""
    workload = Workload(
        lambda rng, _: Batch(wait=varied(rng, 0.005, 0.3), shared=varied(rng, 0.095, 0.3), cpu=0.001)
    )
    numbers = []
    for seed in range(SEEDS):
        loader = found(monkeypatch, workload, seed)
        loader.run(40.0)
        numbers.append(loader.used)
    assert max(numbers) < 8, numbers
    assert sum(numbers) <= 4.5 * SEEDS, numbers


@pytest.mark.parametrize("options", [{"others": lambda _, __: 2}, {"quota": 0.5}], ids=["hogs", "quota"])
def test_it_does_not_grow_without_processors(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(SEEDS):
        loader = found(monkeypatch, computing(0.3, 0.02, **options), seed)
        assert loader.history == [(0.0, 1)]
