"""Generated programs with ``num_workers="auto"``: their batches are those without workers, whatever changes.

The number of workers changes at random, and workers are killed at random moments.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from parity.describe import describe
from ringloader import DataLoader, WorkerPool
from ringloader._features.auto import auto_workers
from ringloader._features.auto.controller import Controller, Decision

pytestmark = pytest.mark.rings_only

MOST = 5


class AtRandom(Controller):
    """Changes the number at random, at each batch."""

    def __init__(self, draw: random.Random, most: int) -> None:
        super().__init__(most, most)
        self.draw = draw
        self.number = draw.randint(1, most)
        self.changes = 0

    def is_due(self, batches: int, seconds: float) -> bool:  # noqa: ARG002
        return True

    def decide(self, look: Any, has_memory: Any = lambda _: True) -> Decision:  # noqa: ARG002
        change = self.draw.choice([-1, 0, 0, 1, 1])
        if not 1 <= self.number + change <= self.most:
            change = 0
        self.number += change
        self.changes += bool(change)
        return Decision(change, "at random")

    def decide_more(self, look: Any, has_memory: Any = lambda _: True) -> Decision:  # noqa: ARG002
        change = int(self.number < self.most and self.draw.random() < 0.2)
        self.number += change
        return Decision(change, "at random")


class Samples(Dataset[Any]):
    """Random samples, each of which takes another time."""

    def __init__(self, length: int, seconds: float) -> None:
        self.length, self.seconds = length, seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        # No draw: the number may depend on nothing else.
        time.sleep(self.seconds * os.urandom(1)[0] / 256)
        return {"row": torch.rand(30), "index": index, "text": str(index), "ragged": [index] * (index % 2)}


def as_they_are(samples: Any) -> Any:
    return samples


def program(number: int) -> tuple[dict[str, Any], dict[str, Any], bool, bool, int | None]:
    """Returns the arguments of any loader, those of workers, if some are killed, if a pool has them, and the
    batches of the first epoch to take."""
    draw = random.Random(number)
    take = draw.choice([None, None, 5])
    arguments = {
        "dataset": Samples(draw.choice([40, 150, 300]), draw.choice([0, 0.002, 0.006])),
        "batch_size": draw.choice([None, 1, 3, 4]),
        "collate_fn": as_they_are,
        # A sampler that draws does so for an epoch that is given up as far as it was read ahead.
        "shuffle": take is None,
        "seed": number,
    }
    workers: dict[str, Any] = {"worker_task": draw.choice(["sample", "sample", "batch"])}
    is_killed = draw.random() < 0.5
    has_pool = draw.random() < 0.3
    if is_killed:
        workers["restart_workers"] = 60
    if draw.random() < 0.3:
        workers["prefetch_factor"] = draw.choice([1, 2, 5])
    for name, value in (("stats", True), ("sample_timeout", 60.0), ("main_prefetch", 2)):
        if draw.random() < 0.2:
            workers[name] = value
    if draw.random() < 0.3:
        # A pool keeps its processes.
        workers |= {"prefetch_epochs": True, "persistent_workers": not has_pool}
    return arguments, workers, is_killed, has_pool, take


def epochs(loader: Any, take: int | None, kill: random.Random | None = None) -> list[Any]:
    """Returns the batches of two epochs, of which the first may be given up."""
    found: list[Any] = []
    for limit in (take, None):
        iterator = iter(loader)
        for count, batch in enumerate(iterator, start=1):
            found.append(describe(batch))
            if count == limit:
                break
            if kill is not None and kill.random() < 0.1:
                # One that was told to end may have ended.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(kill.choice(iterator._workers).pid, signal.SIGKILL)
        del iterator, batch
    return found


@pytest.mark.parametrize("number", range(40))
def test_program(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_workers, "_MOST_BETWEEN", 1)
    monkeypatch.setattr(auto_workers, "bound", lambda: 2)
    monkeypatch.setattr(auto_workers, "most", lambda: MOST)
    arguments, workers, is_killed, has_pool, take = program(number)

    def order() -> torch.Generator:
        return torch.Generator().manual_seed(number)

    # Workers that are kept draw for the second epoch as torch's do.
    kept = {"num_workers": 1, "persistent_workers": True} if "prefetch_epochs" in workers else {}
    fixed = DataLoader(**arguments, **kept, seeding="sample", generator=order())
    expected = epochs(fixed, take)
    fixed.shutdown()
    draw = random.Random(number)
    size = draw.choice([1, 2, 4]) if has_pool else MOST
    controller = AtRandom(draw, size)
    monkeypatch.setattr(auto_workers, "controller_of", lambda *_: controller)
    with WorkerPool(size) if has_pool else contextlib.nullcontext() as pool:
        loader = DataLoader(**arguments, **workers, num_workers="auto", worker_pool=pool, generator=order())
        assert epochs(loader, take, draw if is_killed else None) == expected
        loader.shutdown()
    # A pool of one has nothing to change.
    assert controller.changes or size == 1 or take
