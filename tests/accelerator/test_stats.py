"""``stats=True`` with batches that are pinned or moved: the main process's work has its times."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from ringloader import DataLoader
from small_datasets import Made


def samples(index: int) -> torch.Tensor:
    return torch.full((1000,), float(index))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", [{"pin_memory": True}, {"device": "auto"}])
def test_batches_that_are_placed(workers: int, options: dict[str, Any]) -> None:
    loader = DataLoader(Made(samples, 24), batch_size=2, num_workers=workers, stats=True, **options)
    batches = []
    for batch in loader:
        batches.append(batch[:, 0].cpu())
        time.sleep(0.001)
    assert torch.cat(batches).tolist() == list(range(24))
    stats = loader.epoch_stats()
    assert stats.batches == sum(worker.batches for worker in stats.workers) == 12
    assert 0 < stats.main["place"] <= stats.startup + stats.waiting
    assert "a device works on behind it" in stats.verdict.text


def slowly(batch: torch.Tensor) -> torch.Tensor:
    time.sleep(0.005)
    return batch


@pytest.mark.parametrize("switch", ["on", "off"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_transform_on_a_device_counts_once(
    workers: int, switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGLOADER", switch)
    loader = DataLoader(
        Made(samples, 24),
        batch_size=2,
        num_workers=workers,
        device="auto",
        device_transform=slowly,
        stats=True,
    )
    list(loader)
    assert 12 * 0.005 <= loader.epoch_stats().main["place"] < 2 * 12 * 0.005 + 0.05
