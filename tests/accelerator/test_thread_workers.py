"""Workers that are threads: batches pinned and moved as those of processes are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ringloader
from accelerator import pretend
from accelerator.moved import DEVICE, KIBI, LARGE, Numbered, assert_numbered
from accelerator.pinned import IS_NAMED, PIN
from ringloader import DataLoader

pytestmark = pytest.mark.rings_only


not_pinned = pytest.mark.skipif(IS_NAMED, reason="this torch pins for another device by its own thread only")


def loader(**options: Any) -> Any:
    options = {"num_workers": 2, "batch_size": None, "worker_method": "thread", **options}
    return DataLoader(Numbered(12, (16, 5 * KIBI, LARGE)), **options)


class Fails(Numbered):
    def __getitem__(self, number: int) -> Any:
        if number == 3:
            raise ValueError("third")
        return super().__getitem__(number)


@not_pinned
@pytest.mark.parametrize("persistent", [False, True])
def test_batches_are_pinned(persistent):
    made = loader(**PIN, persistent_workers=persistent)
    for _ in range(2):
        batches = list(made)
        assert ringloader.report(made).path == "threads"
        for number, batch in enumerate(batches):
            assert all(tensor.is_pinned() for tensor in batch.values())
            assert_numbered(batch, number)


@pytest.mark.parametrize("late_us", [0, 20_000])
def test_batches_are_moved(late_us):
    with pretend.delayed(late_us):
        made = loader(device=DEVICE, device_transform=lambda batch: {**batch, "0": batch["0"] + 0})
        for number, batch in enumerate(made):
            assert all(tensor.device == DEVICE for tensor in batch.values())
            assert_numbered(batch, number)
    assert number == 11
    assert ringloader.report(made).counters["device_batches"] == 12
    assert not pretend.violations()


@pytest.mark.parametrize("options", [pytest.param(PIN, marks=not_pinned), {"device": DEVICE}])
def test_an_error_comes_in_its_turn(options):
    iterator = iter(
        DataLoader(Fails(6, (16,)), num_workers=2, batch_size=None, worker_method="thread", **options)
    )
    for number in range(3):
        assert_numbered(next(iterator), number)
    with pytest.raises(ValueError, match="Caught ValueError in DataLoader worker thread 1"):
        next(iterator)
    assert len(list(iterator)) == 2


def test_a_worker_sees_no_device_of_its_loaders():
    """A loader that a dataset has leaves its batches on the CPU, in a thread too."""

    class Nested(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            inner = DataLoader(Numbered(1, (8,)), batch_size=None, device=DEVICE)
            return next(iter(inner))["0"]

    made = DataLoader(Nested(), num_workers=1, batch_size=None, worker_method="thread")
    assert {tensor.device.type for tensor in made} == {"cpu"}
    assert torch.utils.data.get_worker_info() is None
