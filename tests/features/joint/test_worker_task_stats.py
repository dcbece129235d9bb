"""``stats=True`` with ``worker_task="sample"``: the times of runs, whichever worker has sent their batch."""

from __future__ import annotations

import collections
import json
import time
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from features.stats.test_stats import BATCHES, SLEEP, Collating, Measured, assert_close, slept
from ringloader import DataLoader

pytestmark = [pytest.mark.rings_only, pytest.mark.filterwarnings("ignore:This DataLoader will create")]

SIZE = 6
HOW: dict[str, dict[str, Any]] = {
    "processes": {},
    "spawned": {"multiprocessing_context": "spawn"},
    "threads": {"worker_method": "thread"},
    "persistent": {"persistent_workers": True},
    "unordered": {"in_order": False},
    "skipping": {"on_error": "skip"},
}


class Sleeping(Dataset[Any]):
    def __init__(self, measured: Measured) -> None:
        self.measured = measured

    def __len__(self) -> int:
        return SIZE * BATCHES

    def __getitem__(self, index: int) -> Any:
        self.measured.sleep(0)
        return torch.full((4,), float(index))


# It compares two clocks, which a busy machine parts.
@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
def test_times_are_those_that_the_dataset_has_measured(how, tmp_path):
    measured = Measured()
    options = {"num_workers": 3, "worker_task": "sample", "stats": True, **HOW[how]}
    loader = DataLoader(Sleeping(measured), batch_size=SIZE, collate_fn=Collating(measured), **options)
    caller = slept(loader)
    if how == "persistent":
        measured.seconds.zero_()
        caller = slept(loader)
    stats = loader.epoch_stats()
    loader.shutdown()
    assert stats.batches == sum(worker.batches for worker in stats.workers) == BATCHES
    assert_close(stats.caller, caller)
    for worker in stats.workers:
        dataset, collate = measured.seconds[:, worker.id].tolist()
        assert dataset > 0
        assert_close(worker.dataset, dataset)
        assert_close(worker.collate, collate)
        parts = worker.idle + worker.dataset + worker.collate + worker.send + worker.room
        assert parts <= stats.seconds + 0.01
    for one in stats.slowest:
        # Of a run, or of the wait for the other runs of a batch: its samples are all those of the batch.
        assert 0 < len(one.indices) <= SIZE
        assert len(one.indices) == SIZE or one.seconds >= len(one.indices) * SLEEP
        if how != "unordered":
            assert {index // SIZE for index in one.indices} == {one.batch}
    stats.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    made = collections.Counter()
    for event in events:
        if event.get("name") == "dataset":
            made.update(event["args"]["indices"])
    # Each sample in its run. Between the last run of a batch and its collation is an event of them all.
    assert made.keys() == set(range(SIZE * BATCHES))
    assert set(made.values()) <= {1, 2}
    assert sum(event.get("name") == "collate" for event in events) == BATCHES


class Uneven(Dataset[Any]):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.2 if index % 64 == 5 else 0.002)
        return torch.zeros(1)


def test_the_verdict_names_what_the_window_has_waited_for():
    loader = DataLoader(
        Uneven(),
        8,
        num_workers=4,
        worker_task="sample",
        stats=True,
        prefetch_factor=1,
        persistent_workers=True,
    )
    for _ in range(2):
        list(loader)
    stats = loader.epoch_stats()
    loader.shutdown()
    assert stats.verdict.kind == "order"
    assert stats.verdict.change == {"prefetch_factor": 2}
    assert "The window (prefetch_factor=1)" in stats.verdict.text
    # Another program may have had the processor during some other sample.
    assert any(index % 64 == 5 for one in stats.slowest for index in one.indices)
