"""Loaders with ``num_workers="auto"`` whose number follows a script, and others to compare them with."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from ringloader import DataLoader
from ringloader._features.auto import auto_workers
from ringloader._features.auto.controller import Controller, Decision

MOST = 5
both_tasks = pytest.mark.parametrize("task", ["batch", "sample"])
UP_AND_DOWN = {5: 3, 30: 1, 50: 4, 70: 2, 90: 5}


class Noisy(Dataset[Any]):
    """Sample ``i`` is random; with it come the number of its worker and the count of workers."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        info = get_worker_info()
        assert info is not None
        return torch.cat([torch.rand(400), torch.full((1,), index)]), info.id, info.num_workers


class Scripted(Controller):
    """Changes the number by one at each look, until it is the one of the script.

    Args:
        script: The number from a count of batches on.
        first: The number at the beginning.
    """

    def __init__(self, script: dict[int, int], first: int = 1) -> None:
        super().__init__(MOST, MOST)
        self.script = script
        self.number = first
        self.seen = 0
        self.changes: list[int] = []

    def is_due(self, batches: int, seconds: float) -> bool:  # noqa: ARG002
        return True

    def decide(self, look: Any, has_memory: Any = lambda _: True) -> Decision:  # noqa: ARG002
        self.seen += look.batches
        wanted = next((self.script[at] for at in sorted(self.script, reverse=True) if at <= self.seen), 1)
        change = (wanted > self.number) - (wanted < self.number)
        self.number += change
        if change:
            self.changes.append(self.number)
        return Decision(change, "it is said so")

    def decide_more(self, look: Any, has_memory: Any = None) -> Decision:  # noqa: ARG002
        return Decision(0)


def look_at_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the number change at any batch, up to :data:`MOST`."""
    monkeypatch.setattr(auto_workers, "_MOST_BETWEEN", 1)
    monkeypatch.setattr(auto_workers, "bound", lambda: 2)
    monkeypatch.setattr(auto_workers, "most", lambda: MOST)


def begin_with(loader: Any, number: int) -> None:
    """Makes the next iterator of a loader begin with a number of workers."""
    controller = Controller(*auto_workers.limits(None))
    controller.number = number
    auto_workers._controllers.put(loader, controller)


def put(script: Scripted, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    """Makes loaders follow a script."""
    monkeypatch.setattr(auto_workers, "controller_of", lambda *_: script)
    return script


def slowly(batches: Any) -> Iterator[Any]:
    """Gives workers the time to answer, and waits for the ends of those that were told."""
    iterator = iter(batches)
    for batch in iterator:
        time.sleep(0.003)
        for number, worker in enumerate(iterator._workers):
            if iterator._transport.has_been_ended(number):
                worker.join(20)
        yield batch


def auto_of(iterator: Any) -> Any:
    """Returns what changes the number of an iterator's workers, if it changes."""
    found = (one for one in iterator._features if isinstance(one, auto_workers.AutoWorkers))
    return next(found, None)


def firsts(batches: Any) -> list[list[float]]:
    return [batch[0].tolist() for batch in batches]


def made(cls: Any = DataLoader, length: int = 480, **options: Any) -> Any:
    order = torch.Generator().manual_seed(5)
    dataset = options.pop("dataset", None) or Noisy(length)
    return cls(dataset, batch_size=4, shuffle=True, seed=3, generator=order, **options)


def fixed(**options: Any) -> Any:
    return made(**{"num_workers": 2, "seeding": "sample", **options})


def auto(task: str = "batch", **options: Any) -> Any:
    return made(num_workers="auto", worker_task=task, **options)
