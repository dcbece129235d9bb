"""A sample that crashes its workers: the error names it, and ``on_error`` handles it as a bad sample."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
from typing import Any

import pytest
import torch

import ringloader
from faults.failing_datasets import Numbers
from faults.proc import Snapshot
from faults.restart_parts import METHODS, firsts
from ringloader import DataLoader, Retry

pytestmark = pytest.mark.rings_only


class Corrupt(torch.utils.data.Dataset[Any]):
    """Numbers; a decoder dies of some of them."""

    def __init__(self, bad: list[int], how: str = "segfault", length: int = 40) -> None:
        self.bad = bad
        self.how = how
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.bad:
            if self.how == "segfault":
                ctypes.string_at(0)
            elif self.how == "kill":
                # As the system does when memory is short.
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                os._exit(0)
        return torch.tensor(index)


class Whole(Corrupt):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


HOW = {
    "segfault": "was killed by signal 11 (Segmentation fault)",
    "kill": "was killed by signal 9 (Killed)",
    "exit": "exited unexpectedly with exit code 0",
}


def batches(left_out: list[int], size: int = 8, length: int = 40) -> list[list[int]]:
    all_ = [list(range(first, min(first + size, length))) for first in range(0, length, size)]
    return [[number for number in batch if number not in left_out] for batch in all_]


def numbers(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


def made(dataset: Any, **options: Any) -> DataLoader[Any]:
    options = {"batch_size": 8, "num_workers": 2, "restart_workers": 3, "on_error": "skip", **options}
    return DataLoader(dataset, **options)


def assert_skipped(loader: Any, index: int, how: str = "segfault") -> None:
    (bad,) = [bad for bad in loader.errors if bad.handling != "retried"]
    assert (bad.index, bad.handling) == (index, "skipped")
    assert isinstance(bad.error, RuntimeError)
    assert f"{HOW[how]} in the sample at index {index}" in str(bad.error)


@pytest.mark.limit(300)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("method", METHODS)
def test_it_is_left_out_and_the_epoch_goes_on(method: str, how: str) -> None:
    firsts(DataLoader(Numbers(4), num_workers=1, multiprocessing_context=method))
    snapshot = Snapshot.take()
    loader = made(Corrupt([21], how), multiprocessing_context=method)
    assert numbers(loader) == batches([21])
    assert_skipped(loader, 21, how)
    del loader
    snapshot.assert_nothing_left()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_in_processes_of_a_pool(method: str, how: str) -> None:
    with ringloader.WorkerPool(2, method) as pool:
        loader = made(Corrupt([21], how), worker_pool=pool)
        for _ in range(2):
            assert numbers(loader) == batches([21])
            assert_skipped(loader, 21, how)
        # The process goes on for other loaders, and knows nothing of this one.
        assert numbers(DataLoader(Corrupt([]), 8, num_workers=2, worker_pool=pool)) == batches([])


@pytest.mark.parametrize(
    "options",
    [
        {"worker_task": "sample"},
        {"seeding": "sample"},
        {"persistent_workers": True},
        {"in_order": False},
        {"collate_fn": torch.stack},
        {"prefetch_factor": 5},
        {"sample_timeout": 30},
    ],
    ids=lambda options: next(iter(options)),
)
def test_with_other_options(options: dict[str, Any]) -> None:
    loader = made(Corrupt([21]), **options)
    for _ in range(2):
        found = numbers(loader)
        assert (sorted(found) if "in_order" in options else found) == batches([21])
        assert_skipped(loader, 21)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_without_batches(method: str) -> None:
    loader = made(Corrupt([21]), batch_size=None, multiprocessing_context=method)
    assert numbers(loader) == [number for number in range(40) if number != 21]
    assert_skipped(loader, 21)


def test_several_in_an_epoch_and_in_a_batch() -> None:
    loader = made(Corrupt([0, 18, 21, 39]), restart_workers=8)
    assert numbers(loader) == batches([0, 18, 21, 39])
    assert [bad.index for bad in loader.errors] == [0, 18, 21, 39]


def test_samples_that_come_several_at_a_time_are_asked_for_alone() -> None:
    loader = made(Whole([21]))
    assert numbers(loader) == batches([21])
    assert_skipped(loader, 21)


def instead(index: int, error: Exception) -> torch.Tensor:
    assert "Segmentation fault" in str(error)
    return torch.tensor(-index)


def test_a_function_replaces_it() -> None:
    expected = batches([])
    expected[2][5] = -21
    assert numbers(made(Corrupt([21]), on_error=instead)) == expected


def test_retries_ask_again_and_max_errors_counts() -> None:
    again = Retry(1, backoff=0, then="skip")
    assert numbers(made(Corrupt([21]), on_error=again)) == batches([21])
    with pytest.raises(RuntimeError, match="in the sample at index 30"):
        numbers(made(Corrupt([21, 30]), max_errors=1, restart_workers=9))


def test_without_on_error_the_error_names_it(caplog: pytest.LogCaptureFixture) -> None:
    loader = made(Corrupt([21]), on_error="raise", restart_workers=2)
    with (
        caplog.at_level(logging.WARNING, "ringloader"),
        pytest.raises(RuntimeError, match="exited unexpectedly") as raised,
    ):
        list(loader)
    assert raised.value.__notes__ == [
        f"it was in batch 2 of the epoch: dataset indices {list(range(16, 24))}",
        "it died in the sample at index 21",
        "restart_workers=2: all restarts of this epoch are used",
    ]
    # The first worker notes no samples.
    first, second = (record.getMessage() for record in caplog.records)
    assert "the sample at index" not in first
    assert "where it died in the sample at index 21; another worker makes its batches" in second


class CrashesInCollation:
    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        if samples[0] == 16:
            ctypes.string_at(0)
        return torch.stack(samples)


def test_a_collate_fn_that_crashes_loses_its_batch() -> None:
    loader = made(Corrupt([]), collate_fn=CrashesInCollation())
    expected = batches([])
    del expected[2]
    assert numbers(loader) == expected
    (bad,) = loader.errors
    assert bad.index == list(range(16, 24)) and "in collate_fn" in str(bad.error)


class CrashesOnce(Corrupt):
    """Each number kills one worker, as a system that is short of memory may."""

    def __init__(self, bad: list[int], marks: Any) -> None:
        super().__init__(bad, "kill")
        self.marks = marks

    def __getitem__(self, index: int) -> torch.Tensor:
        mark = self.marks / str(index)
        if index in self.bad and not mark.exists():
            mark.touch()
            return super().__getitem__(index)
        return torch.tensor(index)


def test_a_crash_that_does_not_come_again_loses_nothing(tmp_path: Any) -> None:
    # The second one is in another batch of the same worker, whose successor notes samples.
    loader = made(CrashesOnce([3, 21], tmp_path), num_workers=1)
    assert numbers(loader) == batches([]) and loader.errors == []


def test_an_epoch_that_was_given_up_leaves_nothing_to_the_next() -> None:
    loader = made(Corrupt([9, 21]), persistent_workers=True, num_workers=1, restart_workers=9)
    for _ in range(3):
        next(iter(loader))
    assert numbers(loader) == batches([9, 21])
    assert [bad.index for bad in loader.errors] == [9, 21]


class Noted(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        # Nothing of ours between torch's fetcher and the dataset.
        import sys

        return int("ringloader/_features/losses" in sys._getframe(1).f_code.co_filename)


def test_a_worker_that_succeeds_no_other_one_notes_nothing() -> None:
    assert numbers(DataLoader(Noted(), num_workers=1, restart_workers=3)) == [[0], [0]]
    assert numbers(DataLoader(Noted(), num_workers=1, sample_timeout=9)) == [[1], [1]]
