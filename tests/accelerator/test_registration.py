"""Large tensors leave the slots in place: the driver has their memory for as long as copies may read it."""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ringloader
from accelerator import moved, pretend
from parity.harness import taking
from ringloader import DataLoader
from ringloader._features.device import registration

pytestmark = pytest.mark.rings_only

KIBI = 1 << 10


@pytest.fixture(autouse=True)
def _driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(registration.registrars, pretend.NAME, moved.Registrar())
    with taking("native"):
        yield
    gc.collect()
    counted = pretend.counters()
    assert (counted["registrations"], counted["registered_bytes"]) == (0, 0), "left registered"
    assert pretend.violations() == []


class Images(torch.utils.data.Dataset[torch.Tensor]):
    """Each full of its number; the size is that of the moment's epoch."""

    def __init__(self, length: int, elements: int = 32 * KIBI) -> None:
        self.length = length
        self.elements = elements

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.elements,), index)


class Growing(Images):
    """Larger ones from sample to sample."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.elements + 2 * KIBI * index,), index)


def make(dataset: Images, **options: Any) -> DataLoader[torch.Tensor]:
    given: dict[str, Any] = {"num_workers": 2, "batch_size": None, "max_shared_bytes": 64 << 20}
    return DataLoader(dataset, device=pretend.NAME, **{**given, **options})


def counters(loader: DataLoader[torch.Tensor]) -> dict[str, int]:
    found = ringloader.report(loader)
    assert found is not None
    return dict(found.counters)


def check(batch: torch.Tensor, number: int) -> None:
    assert batch.device.type == pretend.NAME and batch.cpu().eq(number).all()


def test_little_is_staged_once_slots_are_registered():
    loader = make(Images(60))
    staged, registered = [], []
    for _ in range(3):
        with pretend.delayed(2000):
            for number, batch in enumerate(loader):
                check(batch, number)
                staged.append(counters(loader)["device_staged_bytes"])
                registered.append(pretend.counters()["registered_bytes"])
    batch_bytes = 32 * KIBI * 8
    assert 0 < staged[59] < 30 * batch_bytes
    # Now and then a slot is used that was not before.
    assert staged[119] + staged[179] < 10 * batch_bytes, "the next epochs find them registered"
    assert 0 < registered[59] <= registered[-1]
    del loader


def test_batches_that_grow():
    loader = make(Growing(100))
    for _ in range(2):
        for number, batch in enumerate(loader):
            check(batch, number)
    counted = pretend.counters()
    assert 0 < counted["registrations_ever"] < 60, "not for each batch that is the largest so far"
    del loader


def test_a_refusal_leaves_staging(caplog: pytest.LogCaptureFixture):
    pretend.fail("registration", times=-1)
    loader = make(Images(30))
    for number, batch in enumerate(loader):
        check(batch, number)
    assert counters(loader)["device_staged_bytes"] == 30 * 32 * KIBI * 8
    (record,) = caplog.records
    assert "could not be registered with the driver of pretend devices" in record.message
    del loader


@pytest.mark.limit(300)
def test_epochs_that_end_anyhow():
    """Copies are late, batches are dropped at once or kept; epochs are abandoned, and workers die."""
    chance = random.Random(3)
    dataset = Images(40)
    loader = make(dataset)
    kept: list[tuple[int, torch.Tensor]] = []
    pretend.set_poison(True)
    pretend.set_delay_range(0, 4000, seed=3)
    for epoch in range(30):
        iterator = iter(loader)
        last, kill = chance.choice([0, 3, 20, 100]), chance.random() < 0.2
        try:
            for number, batch in enumerate(iterator):
                if chance.random() < 0.3:
                    kept.append((number, batch))
                if number == last:
                    break
                if kill and number == 10:
                    os.kill(iterator._workers[0].pid, 9)
                if chance.random() < 0.02:
                    time.sleep(0.25)
        except RuntimeError as error:
            assert kill and "exited unexpectedly" in str(error), error
        del iterator
        if epoch % 10 == 9:
            loader = make(dataset, prefetch_factor=chance.choice([1, 4]))
    for number, batch in kept:
        check(batch, number)
    del loader, batch
    kept.clear()


def test_two_loaders():
    loaders = [make(Images(20)), make(Images(20))]
    for _ in range(3):
        for number, pair in enumerate(zip(*loaders, strict=True)):
            for batch in pair:
                check(batch, number)
    assert all(counters(loader)["device_staged_bytes"] < 20 * 32 * KIBI * 8 for loader in loaders)
    del loaders, pair, batch
