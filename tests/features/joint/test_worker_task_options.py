"""``worker_task="sample"`` with other options: they do what they do with ``worker_task="batch"``."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import ringloader
from parity.describe import describe
from ringloader import DataLoader, Retry, WorkerPool

pytestmark = [pytest.mark.rings_only, pytest.mark.filterwarnings("ignore:This DataLoader will create")]

N = 37
SAMPLES = {"worker_task": "sample", "seed": 7}
WAYS: dict[str, dict[str, Any]] = {
    "processes": {"num_workers": 2},
    "spawn": {"num_workers": 2, "multiprocessing_context": "spawn"},
    "threads": {"num_workers": 2, "worker_method": "thread"},
}
way = pytest.mark.parametrize("way", ["processes", "threads", pytest.param("spawn", marks=pytest.mark.slow)])


class Some(Dataset[Any]):
    """Samples of which some raise: always, or the first time that a process is asked."""

    def __init__(self, bad: tuple[int, ...] = (), bad_once: tuple[int, ...] = ()) -> None:
        self.bad, self.bad_once = bad, bad_once
        self.asked: set[int] = set()

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        # Long enough for batches to be cut.
        time.sleep(0.0005)
        if index in self.bad:
            raise LookupError(f"sample {index}")
        if index in self.bad_once and index not in self.asked:
            self.asked.add(index)
            raise LookupError(f"sample {index} is late")
        return torch.full((3,), float(index)), index


def replaced(index: int, error: Exception) -> Any:
    assert isinstance(error, LookupError)
    return torch.zeros(3), -index


def replaced_or_raised(index: int, error: Exception) -> Any:
    if index == 9:
        raise error
    return replaced(index, error)


def of_few(samples: Any) -> Any:
    """Raises for a batch that has the sample 20."""
    indices = [index for _, index in samples]
    if 20 in indices:
        raise LookupError("no batch")
    return indices


# The second batch is all bad.
BAD = (3, *range(8, 16), 30, 31)
ON_ERROR: dict[str, dict[str, Any]] = {
    "skip": {"on_error": "skip"},
    "retry": {"on_error": Retry(2, backoff=0, then="skip")},
    "retry, then raise": {"on_error": "retry"},
    "function": {"on_error": replaced},
    "function that raises": {"on_error": replaced_or_raised},
    "max_errors": {"on_error": "skip", "max_errors": 4},
}


def outcomes(loader: DataLoader[Any]) -> list[Any]:
    """Returns the batches and errors of an epoch, and the bad samples."""
    found: list[Any] = []
    iterator = iter(loader)
    while True:
        try:
            found.append(describe(next(iterator)))
        except StopIteration:
            break
        except LookupError as error:
            # A worker's error has its traceback in front.
            text = str(error).splitlines()[-1].removeprefix("LookupError: ")
            notes = [note for note in getattr(error, "__notes__", ()) if "max_errors" in note]
            found.append((text, notes))
    errors = [(bad.index, type(bad.error), str(bad.error), bad.handling) for bad in loader.errors]
    return [found, errors]


@pytest.mark.parametrize("way", ["processes", "threads"])
@pytest.mark.parametrize("on_error", ON_ERROR)
@pytest.mark.parametrize("collate_fn", [None, of_few], ids=["default", "function"])
def test_bad_samples_are_handled_as_in_whole_batches(way, on_error, collate_fn):
    options: dict[str, Any] = {"batch_size": 8, "collate_fn": collate_fn, "seed": 7, **ON_ERROR[on_error]}
    dataset = Some(BAD, bad_once=(1, 20, 22) if "retry" in on_error else ())
    expected = outcomes(DataLoader(dataset, seeding="sample", **options))
    for workers, value in ((1, "sample"), (3, "sample"), (2, "batch")):
        # A worker process has a copy of the dataset, threads have it itself.
        dataset.asked.clear()
        given = {**WAYS[way], "num_workers": workers, **options}
        assert outcomes(DataLoader(dataset, worker_task=value, seeding="sample", **given)) == expected


class Owned(Dataset[Any]):
    """Samples with the process that has made them."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.001)
        return index, random.random(), os.getpid()


def apart(loader: DataLoader[Any]) -> tuple[list[Any], set[int]]:
    """Returns the batches of an epoch, and apart from them the processes."""
    found, processes = [], set()
    for index, draw, pids in loader:
        found.append((index.tolist(), draw.tolist()))
        processes |= set(pids.tolist())
    return found, processes


def mapped(pid: int) -> list[str]:
    """Returns what a process has of shared tasks."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in lines if "ringloader-parts" in line or "ringloader-claims" in line]


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_loaders_of_both_kinds_share_a_pool(start_method):
    with WorkerPool(2, start_method=start_method) as pool:
        options: dict[str, Any] = {"batch_size": 8, "seed": 7, "worker_pool": pool}
        shared = DataLoader(Owned(), worker_task="sample", **options)
        whole = DataLoader(Owned(), seeding="sample", **options)
        pids = set()
        for epoch in range(2):
            for loader in (whole, shared):
                loader.set_epoch(epoch)
            (expected, some), (found, others) = apart(whole), apart(shared)
            assert found == expected
            pids |= some | others
            # An epoch that is given up.
            next(iter(shared))
        assert len(pids) == 2, "the pool's processes stay"
        assert not [line for pid in pids for line in mapped(pid)]


def process_of(_dataset: Any) -> int:
    return os.getpid()


@way
def test_iterators_pause_have_limits_and_call_their_workers_in_the_middle_of_an_epoch(way):
    options: dict[str, Any] = {"batch_size": 4, "collate_fn": list, "seed": 7}
    expected = list(DataLoader(Owned(), seeding="sample", **options))
    loader = DataLoader(Owned(), worker_task="sample", persistent_workers=True, **options, **WAYS[way])
    iterator = iter(loader)
    found = [next(iterator)]
    iterator.pause()
    assert len(loader.call_workers(process_of)) == 2
    iterator.resume()
    iterator.limit(2)
    found += list(iterator)
    assert len(found) == 3
    iterator.limit(None)
    iterator.resume()
    found += list(iterator)
    loader.shutdown()
    # In threads, samples draw from generators that nobody seeds.
    drawn = slice(0, 1) if way == "threads" else slice(0, 2)
    assert [[sample[drawn] for sample in batch] for batch in found] == [
        [sample[drawn] for sample in batch] for batch in expected
    ]


def test_a_thread_that_ends_while_it_collates_leaves_its_batch_to_the_others() -> None:
    """It has taken the samples of the others, which are made again."""
    ended: list[int] = []

    def collate(samples: list[int]) -> list[int]:
        if samples[0] == 4 and not ended:
            ended.append(4)
            raise SystemExit
        return samples

    loader = DataLoader(
        range(24), batch_size=4, num_workers=2, worker_method="thread", collate_fn=collate, **SAMPLES
    )
    iterator = iter(loader)
    found: list[list[int]] = []
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        found.extend(iterator)
    assert [*found, *iterator] == [list(range(first, first + 4)) for first in range(0, 24, 4)]


@pytest.mark.parametrize(("prefetch_factor", "expected"), [(None, 4), (3, 3)])
def test_a_converted_loader_has_the_default_of_its_own(prefetch_factor: int | None, expected: int) -> None:
    theirs = torch.utils.data.DataLoader(range(80), 4, num_workers=2, prefetch_factor=prefetch_factor)
    loader = ringloader.convert(theirs, worker_task="sample")
    assert loader.prefetch_factor == expected
    iterator = iter(loader)
    assert iterator._tasks_outstanding == expected
    assert len(list(iterator)) == 20
