"""`device=` while copies are late: right bytes on every stream and thread, nothing lost, early or left."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

import ringloader
from accelerator import pretend
from accelerator.copies import SIZES, Kept, streams
from accelerator.moved import (
    DEVICE,
    LARGE,
    LATE_US,
    OTHER,
    Numbered,
    assert_numbered,
    bytes_of,
    loader_on,
    path,
    registrar,
    two_devices,
)
from ringloader._features.device import device_copy

pytestmark = [pytest.mark.rings_only, pytest.mark.usefixtures("registrar")]

__all__ = ["path", "registrar"]


def test_late_copies_are_waited_for(path):
    with pretend.delayed(LATE_US // 4):
        for number, batch in enumerate(loader_on(path, Numbered(8, SIZES))):
            assert_numbered(batch, number)


def test_what_the_streams_hold_up_is_waited_for(path):
    """The caller's stream is behind as well, with copies out of batches that were dropped at once."""
    pretend.set_poison(True)
    kept = Kept()
    with pretend.delayed(20_000):
        for number, batch in enumerate(loader_on(path, Numbered(12, SIZES))):
            kept.keep(batch, number)
            del batch
    kept.check()
    assert pretend.violations() == []


@pytest.mark.parametrize("prefetch", [0, 2])
def test_handed_out_on_another_stream_than_it_was_begun_on(path, prefetch):
    pretend.set_poison(True)
    kept, turns = Kept(), streams(3)
    iterator = iter(loader_on(path, Numbered(20, SIZES), device_prefetch=prefetch))
    with pretend.delayed(20_000):
        for number in range(20):
            with pretend.on_stream(turns[number % 3]):
                kept.keep(next(iterator), number)
    kept.check()
    assert pretend.violations() == []


@pytest.mark.parametrize("prefetch", [0, 1])
def test_what_a_late_stream_still_reads_is_not_used_again(path, prefetch):
    """A batch that is begun on one stream is handed out on another, which is far behind the loader's."""
    pretend.set_poison(True)
    kept, turns = Kept(), streams(2)
    iterator = iter(loader_on(path, Numbered(12, SIZES), device_prefetch=prefetch))
    for number in range(12):
        # By then the workers have the batch after it, which is begun in this turn.
        time.sleep(0.02)
        with pretend.on_stream(turns[number % 2]):
            batch = next(iterator)
            with pretend.delayed(LATE_US // 4 * (number % 2)):
                kept.keep(batch, number)
        del batch
    kept.check()
    assert pretend.violations() == []


def test_threads_with_a_stream_each():
    pretend.set_poison(True)
    iterator = iter(loader_on("native", Numbered(60, SIZES), num_workers=2))
    found, errors = [], []

    def consume(stream):
        with pretend.on_stream(stream):
            while True:
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                try:
                    first = int(batch["0"].cpu()[0])
                    number = next(one for one in range(60) if int(bytes_of(one, 1)[0]) == first)
                    assert_numbered(batch, number)
                    found.append(number)
                except BaseException as error:
                    errors.append(error)
                    return

    pretend.set_delay_range(0, 3000)
    threads = [threading.Thread(target=consume, args=(stream,)) for stream in streams(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sorted(found) == list(range(60))


def test_slots_are_not_filled_again_under_copies():
    """The copies out of registered slots are so late that the workers would long have gone on."""
    loader = loader_on("native", Numbered(60, (LARGE,)), num_workers=2, persistent_workers=True)
    staged = [0]
    for _ in range(3):
        kept = Kept()
        iterator = iter(loader)
        for number in range(60):
            with pretend.delayed(10_000):
                batch = next(iterator)
            kept.keep(batch, number)
            del batch
        kept.check()
        staged.append(ringloader.report(loader).counters["device_staged_bytes"])
    assert staged[-1] - staged[-2] < 20 * LARGE, "most slots are registered"
    assert pretend.violations() == []


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_no_more_are_ahead_than_is_said(prefetch):
    options = {"num_workers": 2, "prefetch_factor": 4, "device_prefetch": prefetch}
    iterator = iter(loader_on("native", Numbered(12, (1000,)), **options))
    deadline = time.monotonic() + 20
    while iterator._transport.engine.committed() < 8:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for taken in range(1, 3):
        next(iterator)
        assert pretend.counters()["copies_to_device"] == taken + prefetch


def test_memory_on_the_device_is_bounded_and_given_back(path):
    size = 1 << 20
    options = {"num_workers": 2, "prefetch_factor": 8, "persistent_workers": True, "device_prefetch": 3}
    loader = loader_on(path, Numbered(30, (size, 100)), **options)
    for epoch in range(3):
        for number, batch in enumerate(loader):
            assert_numbered(batch, number)
            if epoch == 1 and number == 10:
                break
    # One that is handed out, one that is about to be, and those ahead.
    assert pretend.counters()["device_bytes_peak"] <= (1 + 1 + 3) * (size + 4096) + size
    del batch, loader
    gc.collect()
    pretend.synchronize()
    left = pretend.counters()
    assert (left["device_bytes"], left["pinned_live_bytes"], left["registered_bytes"]) == (0, 0, 0)


@pytest.mark.parametrize("persistent", [False, True])
def test_abandoned_epochs(path, persistent):
    pretend.set_poison(True)
    loader = loader_on(path, Numbered(20, SIZES), num_workers=2, persistent_workers=persistent)
    kept = Kept()
    for epoch in range(6):
        with pretend.delayed(5000):
            for number, batch in enumerate(loader):
                kept.keep(batch, number)
                if number == epoch:
                    break
    kept.check()
    for number, batch in enumerate(loader):
        assert_numbered(batch, number)
    assert pretend.violations() == []


def test_what_is_abandoned_is_not_written_to_later():
    """Memory of batches that were never handed out belongs to others while their copies are under way."""
    size = 4 * LARGE
    options = {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True, "device_prefetch": 4}
    loader = loader_on("native", Numbered(20, (size,)), **options)
    iterator = iter(loader)
    with pretend.delayed(LATE_US):
        next(iterator)
        time.sleep(0.3)
        next(iterator)
        assert iter(loader) is iterator
    mine = [torch.full((size,), 7, dtype=torch.uint8, device=DEVICE) for _ in range(6)]
    time.sleep(2 * LATE_US / 1e6)
    pretend.synchronize()
    assert {int(value) for tensor in mine for value in tensor.cpu().unique()} == {7}


@two_devices
def test_two_loaders_on_two_devices(path):
    loaders = (loader_on(path, Numbered(8, SIZES), device=device) for device in (DEVICE, OTHER))
    with pretend.delayed(3000):
        for number, (one, other) in enumerate(zip(*loaders, strict=True)):
            assert (one["0"].device, other["0"].device) == (DEVICE, OTHER)
            assert_numbered(one, number)
            assert_numbered(other, number)


def test_without_a_record_of_the_stream_the_bytes_would_be_wrong(monkeypatch):
    """That these tests find it."""
    found = device_copy.Moved.result

    def result(self):
        self._memory = []
        return found(self)

    monkeypatch.setattr(device_copy.Moved, "result", result)
    with pytest.raises(AssertionError, match="wrong bytes"):
        test_what_a_late_stream_still_reads_is_not_used_again("native", 1)


def test_without_the_wait_for_what_is_abandoned_that_would_be_wrong(monkeypatch):
    monkeypatch.setattr(device_copy.Moved, "abandon", lambda _: None)
    with pytest.raises(AssertionError):
        test_what_is_abandoned_is_not_written_to_later()


def test_threads_with_loaders_of_their_own_keep_their_streams():
    """Each is within a transform of its own loader at the same moment, and has its own stream afterwards."""
    both = threading.Barrier(2, timeout=30)

    def meet(batch):
        both.wait()
        return batch

    found = {}

    def take(own, iterator):
        torch.accelerator.set_stream(own)
        found[own] = [torch.accelerator.current_stream() for _ in iterator]

    options = {"device_transform": meet, "device_prefetch": 0}
    iterators = [iter(loader_on("native", Numbered(6, (100, 3000)), **options)) for _ in range(2)]
    threads = [threading.Thread(target=take, args=pair) for pair in zip(streams(2), iterators, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 2
    for own, seen in found.items():
        assert seen == [own] * 6
