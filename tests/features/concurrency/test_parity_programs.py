"""Random programs see with ``worker_concurrency`` what torch's loader shows them over plain samples."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import pytest
import torch
from parity_programs import WAYS, Coroutines, Plain, Threads, as_came, program, row, run, step

from ringloader import DataLoader

pytestmark = pytest.mark.rings_only

AT_ONCE = (2, 3, 8, 32, 100)


def compare(seed: int, way: str) -> None:
    """Runs the program of a seed with both loaders."""
    made = program(seed, way)
    waiting, plain = WAYS[way]
    expected = run(torch.utils.data.DataLoader(made.dataset(plain), **made.arguments()), made.takes)
    at_once = random.Random(seed).choice(AT_ONCE)
    loader: Any = DataLoader(made.dataset(waiting), **made.arguments(), worker_concurrency=at_once)
    found = run(loader, made.takes)
    if not made.is_ordered:
        expected, found = as_came(expected), as_came(found)
    assert found == expected, f"seed {seed}, {way}"


# Each case has a program for each way, since all but a few cases are slow.
@pytest.mark.parametrize("seed", range(30))
def test_programs_see_what_torch_shows_them(seed: int) -> None:
    for way in WAYS:
        compare(seed, way)


@pytest.mark.parametrize("kind", [Coroutines, Threads])
@pytest.mark.parametrize("seed", range(6))
def test_batches_before_a_killed_worker_are_torchs(seed: int, kind: type[Plain]) -> None:
    dice = random.Random(seed)
    # More batches than can be ready when the workers are killed.
    torchs = iter(torch.utils.data.DataLoader(Plain(96, row, {}), 4))
    whole = [step(torchs) for _ in range(24)]
    workers, prefetch, after = dice.randrange(1, 4), dice.randrange(1, 4), dice.randrange(10)
    loader: Any = DataLoader(
        kind(96, row, {}), 4, num_workers=workers, prefetch_factor=prefetch, worker_concurrency=8
    )
    iterator: Any = iter(loader)
    steps = [step(iterator) for _ in range(after)]
    for worker in iterator._workers:
        os.kill(worker.pid, signal.SIGKILL)
    while not steps or steps[-1][0] == "batch":
        steps.append(step(iterator))
    del iterator
    *batches, error = steps
    assert error[:2] == ("error", "RuntimeError")
    # How many batches were ready is a matter of time.
    assert after <= len(batches) < len(whole)
    assert batches == whole[: len(batches)]


class Stopping(Coroutines):
    async def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise StopIteration
        return await super().__getitem__(index)


def test_python_does_not_let_a_coroutine_raise_stop_iteration() -> None:
    iterator = iter(DataLoader(Stopping(12, row, {}), batch_size=4, num_workers=1, worker_concurrency=8))
    kinds = [step(iterator)[:2] for _ in range(3)]
    assert [kind[0] for kind in kinds] == ["batch", "error", "batch"]
    assert kinds[1][1] == "RuntimeError"
