"""Pinned memory and devices with other options: pools, arrays, padding, dispatching, restarts."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import signal
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

import ringloader
from accelerator import pretend
from accelerator.moved import DEVICE
from accelerator.pinned import IS_NAMED, PIN
from ringloader import ArrayDataset, DataLoader, Dispatch, SharedArray, WorkerPool
from ringloader.batchify import Pad
from small_datasets import Made

pytestmark = [
    pytest.mark.rings_only,
    pytest.mark.skipif(IS_NAMED, reason="this torch pins for another device by its own thread only"),
]

# Small tensors are packed, larger ones are copied alone.
SIZES = [3, 70_000]


@pytest.fixture(params=["pinned", "moved", "moved late"])
def options(request):
    if request.param == "pinned":
        yield PIN
        return
    with pretend.delayed(5_000 if request.param == "moved late" else 0):
        yield {"device": DEVICE}
    assert not pretend.violations()


def assert_there(tensor: torch.Tensor, options: dict[str, Any]) -> None:
    if "device" in options:
        assert tensor.device == DEVICE
    else:
        assert tensor.is_pinned()


def numbers(batches: Any, options: dict[str, Any]) -> list[int]:
    """The number of each row, whose elements must all be that number. All batches are held."""
    held = []
    for batch in batches:
        assert_there(batch, options)
        held.append(batch)
    found = []
    for batch in held:
        on_the_cpu = batch.cpu()
        assert bool((on_the_cpu == on_the_cpu[:, :1]).all())
        found += [int(number) for number in on_the_cpu[:, 0]]
    return found


class Rows:
    """An iterable source."""

    def __init__(self, count: int, size: int) -> None:
        self.count = count
        self.size = size

    def __iter__(self) -> Any:
        return (torch.full((self.size,), number) for number in range(self.count))


@pytest.mark.parametrize("size", SIZES)
def test_dispatch(size, options):
    loader = DataLoader(Dispatch(Rows(30, size)), batch_size=3, num_workers=2, **options)
    assert sorted(numbers(loader, options)) == list(range(30))


def test_dispatch_whose_filter_drops_one_workers_items(options):
    dataset = Dispatch(Rows(60, 300)).filter(lambda row: int(row[0]) % 2)
    loader = DataLoader(dataset, batch_size=2, num_workers=2, in_order=False, **options)
    assert sorted(numbers(loader, options)) == list(range(1, 60, 2))


def rows(count: int, size: int) -> torch.Tensor:
    return torch.arange(count).reshape(-1, 1).expand(count, size).contiguous()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["tensor", "array", "shared"])
def test_arrays(kind, size, workers, options):
    made: Any = rows(20, size)
    if kind != "tensor":
        made = made.numpy()
    if kind == "shared":
        made = SharedArray(made)
    loader = DataLoader(ArrayDataset(made), batch_size=4, num_workers=workers, shuffle=True, **options)
    for _ in range(2):
        assert sorted(numbers(loader, options)) == list(range(20))


@pytest.mark.parametrize("size", SIZES)
def test_epochs_that_begin_before_iter(size, options):
    loader = DataLoader(
        rows(24, size),
        batch_size=3,
        num_workers=2,
        shuffle=True,
        persistent_workers=True,
        prefetch_epochs=True,
        **options,
    )
    with loader:
        for taken in (8, 8, 1, 7, 8, 8):
            found = numbers(itertools.islice(loader, taken), options)
            assert len(set(found)) == 3 * taken


class Ragged(Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.size + index,), index)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", SIZES)
def test_padding(size, workers, options):
    loader = DataLoader(
        Ragged(size), batch_size=3, num_workers=workers, collate_fn=Pad(-1, lengths=True), **options
    )
    held = list(loader)
    for first, (batch, lengths) in zip(range(0, 12, 3), held, strict=True):
        assert_there(batch, options)
        for row, index, length in zip(batch.cpu(), range(first, first + 3), lengths.cpu(), strict=True):
            assert int(length) == size + index
            assert bool((row[: size + index] == index).all())
            assert bool((row[size + index :] == -1).all())


@pytest.mark.parametrize("size", SIZES)
def test_a_pool(size, options):
    with WorkerPool(2) as pool:
        data = [rows(12, size), rows(12, size) + 100]
        loaders = [DataLoader(ArrayDataset(one), batch_size=3, worker_pool=pool, **options) for one in data]
        for _ in range(2):
            for batches in zip(*loaders, strict=True):
                for offset, batch in zip((0, 100), batches, strict=True):
                    assert all(offset <= number < offset + 12 for number in numbers([batch], options))
            assert numbers(loaders[1], options) == list(range(100, 112))


class WaitsOnce(Dataset[Any]):
    def __init__(self, released: Path, size: int) -> None:
        self.released = released
        self.size = size

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        while index == 7 and not self.released.exists():
            time.sleep(0.001)
        return torch.full((self.size,), index)


def test_waits_are_said(options, tmp_path, caplog):
    released = tmp_path / "released"
    loader = DataLoader(WaitsOnce(released, 300), batch_size=2, num_workers=2, watchdog=0.2, **options)

    class Releases(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "has waited" in record.getMessage():
                released.touch()

    logger = logging.getLogger("ringloader")
    handler = Releases()
    logger.addHandler(handler)
    try:
        assert numbers(loader, options) == list(range(20))
    finally:
        logger.removeHandler(handler)
    (said,) = [text for text in caplog.messages if "has waited" in text]
    assert "owes batch 3 of the epoch: dataset indices [6, 7]" in said
    assert "in __getitem__" in said


def raises_sometimes(index: int) -> torch.Tensor:
    if index % 7 == 3:
        raise ValueError(index)
    return torch.full((300,), index)


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples(workers, options):
    loader = DataLoader(
        Made(raises_sometimes, 40),
        batch_size=4,
        num_workers=workers,
        on_error="skip",
        max_errors=9,
        **options,
    )
    assert numbers(loader, options) == [index for index in range(40) if index % 7 != 3]
    assert [error.index for error in loader.errors] == [3, 10, 17, 24, 31, 38]


class DiesOnce(Dataset[Any]):
    def __init__(self, mark: Path, size: int) -> None:
        self.mark = mark
        self.size = size

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in (7, 22) and get_worker_info() is not None and not Path(f"{self.mark}{index}").exists():
            Path(f"{self.mark}{index}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((self.size,), index)


@pytest.mark.parametrize("size", SIZES)
def test_lost_workers_are_restarted_under_copies(size, options, tmp_path):
    loader = DataLoader(
        DiesOnce(tmp_path / "mark", size), batch_size=2, num_workers=2, restart_workers=2, **options
    )
    assert numbers(loader, options) == list(range(40))
    assert len(list(tmp_path.iterdir())) == 2


def answer(_dataset: Any) -> int:
    info = get_worker_info()
    assert info is not None
    return info.id


def test_a_call_in_mid_epoch(options):
    """Batches that were taken for it are no arrivals any more, and are pinned and moved all the same."""
    loader = DataLoader(
        ArrayDataset(rows(40, 70_000)),
        batch_size=1,
        num_workers=2,
        prefetch_factor=6,
        max_shared_bytes=4 << 20,
        **options,
    )
    iterator = iter(loader)
    found = numbers([next(iterator)], options)
    assert loader.call_workers(answer) == [0, 1]
    assert found + numbers(iterator, options) == list(range(40))
    assert ringloader.report(loader).path == "native"


def refuses(index: int) -> int:
    if index == 3:
        raise KeyError(index)
    return index


def test_an_error_that_is_dropped_takes_its_iterator_along(options):
    gc.disable()
    try:
        iterator = iter(DataLoader(Made(refuses, 30), num_workers=2, **options))
        gone = weakref.ref(iterator)
        with contextlib.suppress(KeyError):
            for _ in range(30):
                next(iterator)
            pytest.fail("nothing was raised")
        del iterator
        assert gone() is None
    finally:
        gc.enable()
