"""Loaders whose batches are moved to the pretend accelerator, on every path, and their bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerator import pretend
from ringloader import DataLoader
from ringloader._features.device import registration
from ringloader._torch import select_path

DEVICE = torch.device(pretend.NAME, 0)
OTHER = torch.device(pretend.NAME, 1)
two_devices = pytest.mark.skipif(pretend.DEVICES < 2, reason="there is one device")
LATE_US = 200_000

KIBI = 1 << 10
# Above what is packed with others.
LARGE = 80 * KIBI

PATHS = ("native", "torch", "no workers")


class Registrar:
    """The driver of the pretend accelerator."""

    @staticmethod
    def register(address: int, nbytes: int) -> None:
        pretend.host_register(address, nbytes)

    @staticmethod
    def unregister(address: int) -> None:
        pretend.host_unregister(address)


@pytest.fixture
def registrar(monkeypatch):
    """Slots are registered, as those of a device whose driver does that."""
    monkeypatch.setitem(registration.registrars, pretend.NAME, Registrar())


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    """The path of loaders that :func:`loader_on` makes."""
    if request.param == "torch":
        reason = select_path.Reason("the test wants it")
        monkeypatch.setattr(select_path, "reason_for_torch", lambda *_: reason)
    return request.param


def loader_on(path: str, dataset: Any, **options: Any) -> Any:
    """A loader over whole batches, unless a batch size is given, whose batches are moved."""
    options.setdefault("batch_size", None)
    workers = 0 if path == "no workers" else options.pop("num_workers", 1)
    if not workers:
        for name in ("persistent_workers", "prefetch_factor", "num_workers"):
            options.pop(name, None)
    return DataLoader(dataset, num_workers=workers, **{"device": DEVICE, **options})


def bytes_of(number: int, size: int) -> torch.Tensor:
    """Returns the content of a numbered batch. Numbers that are close have nothing in common."""
    return (torch.arange(size, dtype=torch.int64) * 31 + number * 7919).remainder(251).to(torch.uint8)


class Numbered(torch.utils.data.Dataset[Any]):
    """Batches with tensors of some sizes, told by their numbers."""

    def __init__(self, count: int, sizes: tuple[int, ...]) -> None:
        self._count = count
        self._sizes = sizes

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {f"{at}": bytes_of(number + at, size) for at, size in enumerate(self._sizes)}


def assert_numbered(batch: dict[str, torch.Tensor], number: int) -> None:
    """That every byte of a batch is what it should be, as the current stream sees it."""
    for name, tensor in batch.items():
        expected = bytes_of(number + int(name), tensor.numel())
        found = tensor.cpu()
        assert torch.equal(found, expected), f"batch {number}, tensor {name}: wrong bytes"
