"""Errors with `device=`: each is raised in its turn, and no batch is lost."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time

import pytest
import torch

import ringloader
from accelerator import pretend
from accelerator.copies import SIZES, drain
from accelerator.moved import (
    DEVICE,
    Numbered,
    assert_numbered,
    loader_on,
    path,
    registrar,
)

pytestmark = [pytest.mark.rings_only, pytest.mark.usefixtures("registrar")]

__all__ = ["path", "registrar"]


FAULTS = {
    "allocation": (torch.OutOfMemoryError, "out of memory"),
    "pinning": (RuntimeError, ""),
    "copy": (RuntimeError, ""),
}


@pytest.mark.parametrize("what", FAULTS)
@pytest.mark.parametrize("nth", range(1, 8))
def test_an_error_ahead_waits_and_goes_away(what, nth):
    iterator = iter(loader_on("native", Numbered(12, SIZES), num_workers=2, prefetch_factor=4))
    assert_numbered(next(iterator), 0)
    time.sleep(0.2)
    pretend.fail(what, nth)
    number, raised, batches = 1, 0, []
    while number < 12:
        try:
            batches.append(next(iterator))
        except FAULTS[what][0] as error:
            # Only where the batch itself failed in its turn.
            raised += 1
            assert any(f"ringloader was moving a batch to '{DEVICE}'" in note for note in error.__notes__)
            continue
        number += 1
    assert raised <= 1
    # Behind the fault, which a copy to the host would have had too.
    for number, batch in enumerate(batches, 1):
        assert_numbered(batch, number)
    assert list(iterator) == []
    assert pretend.violations() == []


@pytest.mark.parametrize("what", FAULTS)
def test_an_error_in_its_turn_is_raised_and_the_batch_is_kept(path, what):
    error, text = FAULTS[what]
    iterator = iter(loader_on(path, Numbered(6, SIZES), device_prefetch=0))
    assert_numbered(next(iterator), 0)
    # A native one is tried again in its turn.
    pretend.fail(what, times=2 if path == "native" else 1)
    with pytest.raises(error, match=text or None) as raised:
        next(iterator)
    assert any(f"ringloader was moving a batch to '{DEVICE}'" in note for note in raised.value.__notes__)
    del raised
    assert drain(iterator, 1) == 6
    del iterator
    gc.collect()
    pretend.synchronize()
    assert pretend.counters()["device_bytes"] == 0
    assert pretend.violations() == []


def test_while_memory_is_short_nothing_more_is_begun_ahead():
    iterator = iter(loader_on("native", Numbered(12, SIZES), num_workers=2, prefetch_factor=4))
    assert_numbered(next(iterator), 0)
    time.sleep(0.2)
    pretend.fail("allocation", times=-1)
    for _ in range(3):
        # Batches that are on the device are handed out first.
        with contextlib.suppress(torch.OutOfMemoryError):
            next(iterator)
    pretend.fail("allocation", times=0)
    remaining = list(iterator)
    assert_numbered(remaining[-1], 11)
    numbers = range(12 - len(remaining), 12)
    for number, batch in zip(numbers, remaining, strict=True):
        assert_numbered(batch, number)


def test_a_worker_that_fails_is_told_in_its_turn(path):
    class Failing(Numbered):
        def __getitem__(self, number):
            if number == 3:
                raise KeyError("the dataset's")
            return super().__getitem__(number)

    iterator = iter(loader_on(path, Failing(8, SIZES)))
    for number in range(3):
        assert_numbered(next(iterator), number)
    with pytest.raises(KeyError, match="the dataset's"):
        next(iterator)
    if path != "no workers":
        assert drain(iterator, 4) == 8


def test_a_worker_that_dies_is_told_behind_what_it_has_committed():
    class Dying(Numbered):
        def __getitem__(self, number):
            if number == 5:
                time.sleep(0.3)
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(number)

    for _ in range(3):
        iterator = iter(loader_on("native", Dying(12, SIZES), num_workers=1))
        for number in range(5):
            assert_numbered(next(iterator), number)
        with pytest.raises(RuntimeError, match="exited unexpectedly"):
            next(iterator)
        del iterator
    gc.collect()
    pretend.synchronize()
    assert pretend.counters()["device_bytes"] == pretend.counters()["registered_bytes"] == 0


def test_the_sampler_is_read_at_torchs_moments(path):
    class Recording(torch.utils.data.Sampler):
        def __init__(self, told):
            self._told = told

        def __iter__(self):
            for number in range(20):
                self._told.append(number)
                yield number

    def told_by(loader_class, **options):
        told, seen = [], []
        workers = 0 if path == "no workers" else 2
        loader = loader_class(
            Numbered(20, SIZES), batch_size=None, sampler=Recording(told), num_workers=workers, **options
        )
        for _ in loader:
            seen.append(len(told))
            time.sleep(0.01)
        return seen

    theirs = told_by(torch.utils.data.DataLoader)
    assert told_by(ringloader.DataLoader, device=DEVICE, device_prefetch=4) == theirs
