"""``worker_concurrency``: samples at once, in torch's batches and order."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, get_worker_info

import ringloader
from faults.proc import wait_until
from ringloader import CachedDataset, DataLoader, WorkerPool
from ringloader._features.concurrency import reading
from small_datasets import Made, Numbers

pytestmark = pytest.mark.rings_only

SECONDS = 0.02
# The ways to have workers, or none.
KINDS: dict[str, dict[str, Any]] = {
    "processes": {"num_workers": 2},
    "threads": {"num_workers": 2, "worker_method": "thread"},
    "here": {},
}


class Waiting(Dataset[torch.Tensor]):
    """Sample ``i`` is a tensor full of ``i``, after a pause, which an event loop may use."""

    def __init__(self, length: int = 48, seconds: float = SECONDS) -> None:
        self.length, self.seconds = length, seconds

    def __len__(self) -> int:
        return self.length

    async def __getitem__(self, index: int) -> torch.Tensor:
        # Later samples of a batch come before earlier ones.
        await asyncio.sleep(self.seconds * (1 + index % 3))
        return torch.full((5,), index)


class Sleeping(Waiting):
    """The same with a plain method."""

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        time.sleep(self.seconds * (1 + index % 3))
        return torch.full((5,), index)


class Wrapped(Dataset[Any]):
    """A wrapper of somebody's, whose method is plain."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


class Together(Waiting):
    """Gives all samples of a batch at once, by a coroutine."""

    async def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        await asyncio.sleep(self.seconds)
        return [torch.full((5,), index) for index in indices]


class PlainTogether(Waiting):
    """The same with a plain method."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        time.sleep(self.seconds)
        return [torch.full((5,), index) for index in indices]


PLAIN = Numbers(48, 5)
BACKWARDS = list(range(47, -1, -1))
# Datasets that wait, and the same ones without.
DATASETS: dict[str, tuple[Any, Any]] = {
    "coroutines": (Waiting(), PLAIN),
    "plain": (Sleeping(), PLAIN),
    "subset": (Subset(Waiting(), BACKWARDS), Subset(PLAIN, BACKWARDS)),
    "subset of plain": (Subset(Sleeping(), BACKWARDS), Subset(PLAIN, BACKWARDS)),
    "both, one behind the other": (ConcatDataset([Waiting(), Sleeping()]), ConcatDataset([PLAIN, PLAIN])),
    "stacked": (StackDataset(Waiting(), Sleeping()), StackDataset(PLAIN, PLAIN)),
    "stacked by name": (
        StackDataset(a=Waiting(), b=Subset(Waiting(), BACKWARDS)),
        StackDataset(a=PLAIN, b=Subset(PLAIN, BACKWARDS)),
    ),
    # Made by the test: it maps memory that other tests would find.
    "cached": (lambda: CachedDataset(Waiting()), PLAIN),
    "wrapped": (Wrapped(Waiting()), PLAIN),
    "together": (Together(), PLAIN),
    "plain together": (PlainTogether(), PLAIN),
    "subset of together": (Subset(Together(), BACKWARDS), Subset(PLAIN, BACKWARDS)),
}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DATASETS)
def test_batches_are_torchs(name: str, kind: str) -> None:
    waiting, plain = DATASETS[name]
    expected = list(torch.utils.data.DataLoader(plain, batch_size=7))
    dataset = waiting() if name == "cached" else waiting
    loader = DataLoader(dataset, batch_size=7, worker_concurrency=8, **KINDS[kind])
    for _ in range(2):
        found = list(loader)
        assert len(found) == len(expected)
        assert all(map(equal, found, expected))
    loader.shutdown()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_size", [None, 1])
def test_single_samples_are_torchs(kind: str, batch_size: int | None) -> None:
    expected = list(torch.utils.data.DataLoader(PLAIN, batch_size=batch_size))
    found = list(DataLoader(Waiting(), batch_size=batch_size, worker_concurrency=8, **KINDS[kind]))
    assert all(map(equal, found, expected))
    assert len(found) == len(expected)


class Counting(Dataset[int]):
    """A sample is the most samples that were under way when it began, in its worker."""

    def __init__(self, length: int, seconds: float) -> None:
        self.length, self.seconds = length, seconds
        self.under_way = 0

    def __len__(self) -> int:
        return self.length

    async def __getitem__(self, _index: int) -> int:
        self.under_way += 1
        found = self.under_way
        await asyncio.sleep(self.seconds)
        self.under_way -= 1
        return found


class PlainCounting(Counting):
    """The same with a plain method."""

    def __init__(self, length: int, seconds: float) -> None:
        super().__init__(length, seconds)
        self.lock: Any = None

    def __getitem__(self, _index: int) -> int:  # type: ignore[override]
        self.lock = self.lock or threading.Lock()
        with self.lock:
            self.under_way += 1
            found = self.under_way
        time.sleep(self.seconds)
        with self.lock:
            self.under_way -= 1
        return found


@pytest.mark.parametrize("cls", [Counting, PlainCounting])
@pytest.mark.parametrize("workers", [0, 1])
def test_no_more_samples_are_under_way_than_said(cls: Any, workers: int) -> None:
    loader = DataLoader(cls(32, 0.02), batch_size=16, num_workers=workers, worker_concurrency=5)
    assert max(max(batch.tolist()) for batch in loader) == 5


@pytest.mark.parametrize("cls", [Counting, PlainCounting])
def test_samples_of_the_next_batches_are_under_way_too(cls: Any) -> None:
    loader = DataLoader(cls(96, 0.5), batch_size=4, num_workers=1, worker_concurrency=32, prefetch_factor=8)
    assert max(max(batch.tolist()) for batch in loader) >= 30


class Slowest(Waiting):
    """Every eighth sample takes long."""

    async def __getitem__(self, index: int) -> torch.Tensor:
        await asyncio.sleep(1.0 if index % 8 == 7 else 0.001)
        return torch.full((5,), index)


def test_a_slow_sample_leaves_no_line_idle() -> None:
    loader = DataLoader(Slowest(64), batch_size=8, num_workers=1, worker_concurrency=16, prefetch_factor=8)
    next(iter(loader))
    begun = time.perf_counter()
    assert len(list(loader)) == 8
    # One after the other they take 8 s.
    assert time.perf_counter() - begun < 6


class Told(Dataset[int]):
    """Notes in files which samples have begun. Two of them wait for a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        return 6

    async def __getitem__(self, index: int) -> int:
        (self.path / str(index)).touch()
        waits_for = {1: "3", 2: "go"}.get(index)
        while waits_for is not None and not (self.path / waits_for).exists():
            await asyncio.sleep(0.005)
        return index


def test_a_worker_that_waits_begins_a_task_that_comes_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only a worker that is woken looks for tasks in time.
    monkeypatch.setattr(reading, "LOOK_SECONDS", 60.0)
    loader = DataLoader(
        Told(tmp_path),
        batch_size=1,
        num_workers=1,
        worker_concurrency=2,
        prefetch_factor=3,
        multiprocessing_context="fork",
    )
    iterator = iter(loader)
    assert wait_until((tmp_path / "2").exists, 30)
    # The worker waits for sample 1 by now, and sample 2 has taken the last room.
    time.sleep(0.3)
    begun = time.perf_counter()
    (tmp_path / "go").touch()
    assert torch.cat(list(iterator)).tolist() == list(range(6))
    assert time.perf_counter() - begun < 30


def test_it_is_off_by_default_and_an_awaitable_goes_to_collate_fn() -> None:
    async def run(batch: list[Any]) -> list[Any]:
        return [await one for one in batch]

    def collate(batch: list[Any]) -> list[Any]:
        assert all(asyncio.iscoroutine(one) for one in batch)
        return asyncio.run(run(batch))

    loader = DataLoader(Waiting(4, 0.0), batch_size=2, collate_fn=collate)
    assert [[int(one[0]) for one in batch] for batch in loader] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_keeps_what_coroutines_return(kind: str) -> None:
    dataset = CachedDataset(Waiting(16, 0.001), then=torch.neg)
    loader = DataLoader(dataset, batch_size=4, worker_concurrency=4, **KINDS[kind])
    for _ in range(2):
        assert torch.equal(torch.cat(list(loader))[:, 0], -torch.arange(16))
    stats = dataset.stats()
    assert (stats["items"], stats["misses"]) == (16, 16)
    assert stats["hits"] >= 16


def test_a_pool_has_the_samples_at_once_and_its_processes_stay() -> None:
    with WorkerPool(2) as pool:
        first = DataLoader(Waiting(), batch_size=8, worker_pool=pool, worker_concurrency=16)
        second = DataLoader(Made(_worker_threads, 4), batch_size=None, worker_pool=pool)
        plain = list(torch.utils.data.DataLoader(PLAIN, batch_size=8))
        assert all(map(equal, first, plain))
        pids = pool.pids() if callable(getattr(pool, "pids", None)) else None
        # Nothing of the loop is left in the pool's processes.
        assert {name for names in second for name in names if name.startswith("ringloader_")} == set()
        assert all(map(equal, first, plain))
        assert pids is None or pool.pids() == pids


def _worker_threads(_index: int) -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def test_a_shared_batch_has_its_samples_at_once() -> None:
    plain = list(torch.utils.data.DataLoader(PLAIN, batch_size=12))
    loader = DataLoader(Waiting(), batch_size=12, num_workers=2, worker_task="sample", worker_concurrency=8)
    for _ in range(2):
        assert all(map(equal, loader, plain))


def loop_of(_index: int = 0) -> int:
    return id(asyncio.get_running_loop())


class Loops(Dataset[tuple[int, int]]):
    """A sample is its worker, and the loop that makes it."""

    def __len__(self) -> int:
        return 16

    async def __getitem__(self, _index: int) -> tuple[int, int]:
        info = get_worker_info()
        assert info is not None
        return info.id, loop_of()


@pytest.mark.parametrize("kind", KINDS)
def test_one_loop_lives_over_all_epochs(kind: str) -> None:
    persistent = {"persistent_workers": True} if kind == "processes" else {}
    with DataLoader(Loops(), batch_size=None, worker_concurrency=4, **KINDS[kind], **persistent) as loader:
        epochs = [dict(loader) for _ in range(3)]
    assert epochs[0] == epochs[1] == epochs[2]
    loops = set(epochs[0].values())
    assert len(loops) == (2 if kind == "processes" else 1) or kind == "processes"


@pytest.mark.parametrize(
    ("value", "error"),
    [(0, ValueError), (-1, ValueError), (2.5, TypeError), ("8", TypeError), (True, TypeError)],
)
def test_another_value_is_an_error(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="worker_concurrency must be"):
        DataLoader(Waiting(), worker_concurrency=value)


def test_other_ways_in_take_it() -> None:
    loader = torch.utils.data.DataLoader(Counting(16, 0.02), batch_size=8, num_workers=1)
    with ringloader.installed(worker_concurrency=4):
        assert max(max(batch.tolist()) for batch in loader) == 4
    converted = ringloader.convert(loader, worker_concurrency=3)
    assert max(max(batch.tolist()) for batch in converted) == 3


PROGRAM = """
import asyncio, torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

class Counting(Dataset):
    under_way = 0

    def __len__(self):
        return 16

    async def __getitem__(self, index):
        self.under_way += 1
        found = self.under_way
        await asyncio.sleep(0.02)
        self.under_way -= 1
        return found

class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))

print(max(int(batch.max()) for batch in DataLoader(Counting(), batch_size=8)))
loader = DataLoader(Stream(), batch_size=2)
print(len(list(loader)))
import ringloader
assert "worker_concurrency=4 and an IterableDataset do not go together" in str(ringloader.report(loader))
"""


def test_the_command_line_takes_it_and_leaves_streams_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    command = [sys.executable, "-m", "ringloader", "run", "--worker-concurrency", "4", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.stdout.split(), done.stderr) == (["4", "2"], "")
