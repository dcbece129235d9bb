"""``worker_task="sample"`` with pinned memory and devices: every byte, whichever workers made the batch."""

from __future__ import annotations

import collections
import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from accelerator import pretend
from accelerator.moved import DEVICE, Registrar, registrar
from accelerator.pinned import IS_NAMED, PIN
from faults.proc import mappings
from ringloader import DataLoader, report
from ringloader._features.device import registration

__all__ = ["registrar"]

pytestmark = [
    pytest.mark.rings_only,
    pytest.mark.skipif(IS_NAMED, reason="this torch pins for another device by its own thread only"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

N, BATCH = 24, 6
# Small tensors are packed, larger ones are copied alone.
SIZES = [3, 20_000]
WAYS: dict[str, dict[str, Any]] = {
    "processes": {"num_workers": 3},
    "threads": {"num_workers": 3, "worker_method": "thread"},
}


@pytest.fixture(params=["pinned", "moved", "moved late", "registered late"])
def options(request, monkeypatch):
    if request.param == "pinned":
        yield PIN
        return
    if request.param == "registered late":
        monkeypatch.setitem(registration.registrars, pretend.NAME, Registrar())
    with pretend.delayed(5_000 if request.param.endswith("late") else 0):
        yield {"device": DEVICE}
    assert not pretend.violations()


class Rows(Dataset[Any]):
    """Rows of random numbers, that take long enough for batches to be cut; one may kill its worker."""

    def __init__(self, size: int, died: Path | None = None, length: int = N) -> None:
        self.size, self.died, self.length = size, died, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        if self.died is not None and index % 10 == 3 and not (self.died / str(index)).exists():
            (self.died / str(index)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        row = torch.arange(self.size, dtype=torch.float64).mul_(index + 1)
        return {"row": row, "number": index}


def collated(samples: list[Any]) -> Any:
    return {
        "row": torch.stack([sample["row"] for sample in samples]),
        "number": torch.tensor([sample["number"] for sample in samples]),
    }


def assert_whole(loader: DataLoader[Any], size: int, options: dict[str, Any]) -> None:
    # All batches are held, so that none may have the memory of another.
    batches = list(loader)
    assert len(batches) == N // BATCH
    for number, batch in enumerate(batches):
        first = number * BATCH
        for tensor in batch.values():
            assert tensor.device == DEVICE if "device" in options else tensor.is_pinned()
        assert batch["number"].tolist() == list(range(first, first + BATCH))
        expected = torch.stack([Rows(size)[index]["row"] for index in range(first, first + BATCH)])
        assert torch.equal(batch["row"].cpu(), expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("collate_fn", [None, collated], ids=["default", "function"])
def test_batches_are_there_whole(collate_fn, size, way, options):
    loader = DataLoader(
        Rows(size),
        BATCH,
        collate_fn=collate_fn,
        worker_task="sample",
        persistent_workers=True,
        **WAYS[way],
        **options,
    )
    with loader:
        for _ in range(2):
            assert_whole(loader, size, options)


@pytest.mark.parametrize("size", SIZES)
def test_batches_are_there_whole_after_deaths(size, tmp_path, options):
    dataset = Rows(size, tmp_path)
    loader = DataLoader(dataset, BATCH, worker_task="sample", num_workers=3, restart_workers=5, **options)
    assert_whole(loader, size, options)
    assert len(list(tmp_path.iterdir())) == 3


class Alone(Rows):
    """The rows without their numbers, which are small."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index)["row"]


def alone(**options: Any) -> DataLoader[torch.Tensor]:
    """Sixteen batches, more than there are windows."""
    dataset = Alone(SIZES[1], length=16 * BATCH)
    return DataLoader(dataset, BATCH, worker_task="sample", num_workers=3, device=DEVICE, **options)


def assert_numbered(loader: DataLoader[torch.Tensor]) -> None:
    for number, batch in enumerate(loader):
        factors = torch.arange(number * BATCH, (number + 1) * BATCH, dtype=torch.float64) + 1
        assert torch.equal(batch.cpu(), factors[:, None] * torch.arange(SIZES[1]))


@pytest.mark.usefixtures("registrar")
def test_a_batch_is_staged_where_its_window_is_used_for_the_first_time(monkeypatch):
    """Copies are late: in a window that was written again too early there would be rows of another batch."""
    uses = collections.defaultdict(list)
    register = registration.Registrations.register

    def noted(registrations: Any, address: int, nbytes: int) -> bool:
        uses[address].append(register(registrations, address, nbytes))
        return uses[address][-1]

    monkeypatch.setattr(registration.Registrations, "register", noted)
    loader, staged = alone(persistent_workers=True), 0
    with loader, pretend.delayed(20_000):
        for _ in range(3):
            assert_numbered(loader)
            staged += report(loader).counters["device_staged_bytes"]
        windows = [line.partition(" ")[0].split("-") for line in mappings() if "ringloader-parts" in line]
        assert any(int(low, 16) <= at < int(high, 16) for low, high in windows for at in uses)
    assert sum(map(len, uses.values())) == 3 * 16 > 2 * len(uses)
    assert all(in_place == [False] + [True] * (len(in_place) - 1) for in_place in uses.values())
    assert staged == len(uses) * BATCH * SIZES[1] * torch.float64.itemsize
    assert not pretend.violations()


@pytest.mark.usefixtures("registrar")
def test_what_is_registered_of_windows_goes_with_their_iterator():
    loader = alone()
    for epoch in range(1, 3):
        assert_numbered(loader)
        gc.collect()
        counted = pretend.counters()
        assert (counted["registrations"], counted["registered_bytes"]) == (0, 0)
        assert counted["registrations_ever"] >= epoch
    assert not pretend.violations()
