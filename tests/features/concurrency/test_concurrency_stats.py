"""``worker_concurrency`` in the figures of an epoch."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

from ringloader import DataLoader

pytestmark = pytest.mark.rings_only

KINDS: dict[str, dict[str, Any]] = {
    "processes": {"num_workers": 2},
    "threads": {"num_workers": 2, "worker_method": "thread"},
    "here": {},
}


class Waiting(Dataset[int]):
    """Each sample waits."""

    def __len__(self) -> int:
        return 64

    async def __getitem__(self, index: int) -> int:
        await asyncio.sleep(0.03)
        return index


@pytest.mark.parametrize("kind", KINDS)
def test_the_most_samples_under_way_are_counted(kind: str) -> None:
    loader = DataLoader(Waiting(), batch_size=16, worker_concurrency=5, stats=True, **KINDS[kind])
    for _ in range(2):
        assert len(list(loader)) == 4
        stats = loader.epoch_stats()
        assert [worker.under_way for worker in stats.workers] == [5] * len(stats.workers)
        assert stats.to_dict()["workers"][0]["under_way"] == 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_has_each_batch(kind: str, tmp_path: Path) -> None:
    loader = DataLoader(Waiting(), batch_size=16, worker_concurrency=5, stats=True, **KINDS[kind])
    assert len(list(loader)) == 4
    loader.epoch_stats().save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    waits = [event["dur"] for event in events if event["ph"] == "X" and event["name"] == "dataset"]
    assert len(waits) == 4
    assert all(microseconds >= 30_000 for microseconds in waits)
