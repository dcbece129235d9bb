"""`device=` while copies are late: right bytes on every stream and thread, nothing lost, early or left."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import ringloader
from accelerator import pretend
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
from faults.proc import wait_until
from ringloader._placement import device, device_copy

pytestmark = [pytest.mark.rings_only, pytest.mark.usefixtures("registrar")]

__all__ = ["path", "registrar"]

# Three are small: they cross together. Words and bytes.
SIZES = (100, 1000, 33, LARGE)


def streams(count, device=DEVICE):
    """Returns new streams. torch hands out 32 in turn, of which one is that of the copies.

    What a user allocates on that one may be memory of a batch that another stream still reads, if nothing
    shows the batch's tensors.
    """
    found = []
    while len(found) < count:
        stream = torch.Stream(device=device)
        if stream not in device_copy._streams.values():
            found.append(stream)
    return found


class Kept:
    """Copies of batches, made on streams that are late, of batches that are gone by then."""

    def __init__(self):
        self._kept = []

    def keep(self, batch, number):
        copies = {name: torch.empty_like(tensor) for name, tensor in batch.items()}
        for name, tensor in batch.items():
            copies[name].copy_(tensor, non_blocking=True)
            # Memory that this test has allocated is its own matter.
            copies[name].record_stream(torch.accelerator.current_stream())
        self._kept.append((copies, number))

    def check(self):
        pretend.synchronize()
        for batch, number in self._kept:
            assert_numbered(batch, number)


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


# -- The end while copies are under way


class Held:
    """A transform that says when it runs and waits; `then` is called before it returns."""

    def __init__(self, then=lambda: None):
        self.begun, self.released, self.then = threading.Event(), threading.Event(), then
        self.calls = 0

    def __call__(self, batch):
        self.calls += 1
        self.begun.set()
        self.released.wait(30)
        self.then()
        return batch


def with_registered_slots(loader):
    """An iterator whose slots have been used so often that batches are copied out of them."""
    iterator = iter(loader)
    for number in range(16):
        assert_numbered(next(iterator), number)
    assert pretend.counters()["registered_bytes"] > 0
    return iterator


def ended_by(loader, iterator):
    """Returns the outcome in another thread, which runs a transform when the loader is shut down."""
    got = []
    before = pretend.counters()["registered_bytes"]

    def take():
        try:
            got.append(next(iterator))
        except Exception as error:
            got.append(str(error))

    taking = threading.Thread(target=take)
    taking.start()
    yield
    ending = threading.Thread(target=loader.shutdown)
    ending.start()
    # The shutdown has to wait for the transform.
    ending.join(0.3)
    assert pretend.counters()["registered_bytes"] >= before > 0
    yield
    ending.join(20)
    taking.join(20)
    assert not ending.is_alive() and not taking.is_alive()
    yield got


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_shutdown_in_another_thread_waits_for_the_transform_and_the_copies(prefetch):
    pretend.set_poison(True)
    transform = Held()
    transform.released.set()
    loader = loader_on(
        "native",
        Numbered(40, (LARGE,)),
        num_workers=2,
        device_transform=transform,
        device_prefetch=prefetch,
    )
    iterator = with_registered_slots(loader)
    # Behind the batches ahead, whose transform has run, come the others of the four that are asked for.
    ahead = transform.calls - 16
    assert wait_until(lambda: ahead + iterator._transport.engine.committed() == 4, 20)
    transform.begun.clear()
    transform.released.clear()
    pretend.set_delay(LATE_US)
    steps = ended_by(loader, iterator)
    next(steps)
    assert transform.begun.wait(20)
    next(steps)
    transform.released.set()
    (got,) = next(steps)
    assert "ended by DataLoader.shutdown" in got
    pretend.set_delay(0)
    pretend.synchronize()
    assert pretend.violations() == []
    assert pretend.counters()["registered_bytes"] == 0


def test_a_transform_that_shuts_its_loader_down():
    """Below its own call nothing can wait for it: the copies are waited for nevertheless, and noted."""
    pretend.set_poison(True)
    calls = []

    def shut_down():
        calls.append(None)
        if len(calls) == 23:
            # The copies of the next batch, and no others.
            pretend.set_delay(5 * LATE_US)
        if len(calls) == 24:
            pretend.set_delay(0)
            loader.shutdown()
            assert pretend.violations() == []
            assert pretend.counters()["registered_bytes"] == 0

    transform = Held(shut_down)
    transform.released.set()
    loader = loader_on(
        "native", Numbered(40, (LARGE,)), num_workers=2, device_transform=transform, device_prefetch=2
    )
    iterator = with_registered_slots(loader)
    with pytest.raises(RuntimeError, match=r"ended by DataLoader\.shutdown"):
        for _ in range(10):
            next(iterator)
    pretend.synchronize()
    assert pretend.violations() == []


@pytest.mark.parametrize("method", ["abandon", "close"])
def test_an_interrupt_of_the_end_does_not_skip_its_wait(method, monkeypatch):
    pretend.set_poison(True)
    loader = loader_on("native", Numbered(40, (LARGE,)), num_workers=2, prefetch_factor=4, device_prefetch=4)
    iterator = with_registered_slots(loader)
    found, calls = getattr(device.Moving, method), []

    def interrupted(moving):
        calls.append(None)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return found(moving)

    monkeypatch.setattr(device.Moving, method, interrupted)
    time.sleep(0.1)
    with pretend.delayed(LATE_US):
        next(iterator)
        with pytest.raises(KeyboardInterrupt):
            loader.shutdown()
    assert len(calls) == 2
    pretend.synchronize()
    assert pretend.violations() == []
    assert pretend.counters()["registered_bytes"] == 0


# -- The transform


class Scale:
    """Makes floats of bytes, and writes down what it saw."""

    def __init__(self):
        self.streams, self.calls = [], 0

    def __call__(self, batch):
        self.streams.append(torch.accelerator.current_stream())
        self.calls += 1
        return {name: tensor.float() / 2 for name, tensor in batch.items()}


def test_the_transform_runs_once_behind_the_copies(path):
    transform = Scale()
    caller = torch.accelerator.current_stream()
    with pretend.delayed(5000):
        for number, batch in enumerate(loader_on(path, Numbered(8, SIZES), device_transform=transform)):
            for name, tensor in batch.items():
                assert tensor.dtype == torch.float32 and tensor.device == DEVICE
                assert torch.equal(tensor.cpu() * 2, bytes_of(number + int(name), tensor.numel()).float())
    assert transform.calls == 8
    assert caller not in transform.streams and len({one.stream_id for one in transform.streams}) == 1


def test_what_the_transform_makes_is_safe_on_every_stream(path):
    pretend.set_poison(True)
    kept, turns = Kept(), streams(3)
    iterator = iter(loader_on(path, Numbered(20, SIZES), device_transform=dict))
    with pretend.delayed(10_000):
        for number in range(20):
            with pretend.on_stream(turns[number % 3]):
                kept.keep(next(iterator), number)
    kept.check()
    assert pretend.violations() == []


@dataclasses.dataclass
class Sample:
    """No container."""

    tensors: dict[str, torch.Tensor]


class Moves:
    """Moves itself, and says nothing of its memory."""

    __slots__ = ("tensors",)

    def __init__(self, tensors):
        self.tensors = tensors

    def to(self, device, non_blocking=False):
        return Moves({name: one.to(device, non_blocking=non_blocking) for name, one in self.tensors.items()})


class InClosure:
    def __init__(self, tensors):
        self.take = lambda: tensors

    @property
    def tensors(self):
        return self.take()


class Unseen:
    """Python knows not what an array of objects refers to."""

    def __init__(self, tensors):
        self._array = np.empty(1, dtype=object)
        self._array[0] = tensors

    @property
    def tensors(self):
        return self._array[0]


def two_loaders_on_two_streams(path, kind, turns):
    """One stream is far behind when memory of its batches would serve the other's loader.

    A kind that has no ``to`` is made by the transform, the other by the dataset.
    """
    kept = Kept()
    made = Made(kind, 6) if kind is Moves else Numbered(6, SIZES)
    transform = (lambda batch: batch) if kind is Moves else kind
    iterators = [iter(loader_on(path, made, device_transform=transform)) for _ in range(2)]
    for number in range(6):
        for iterator, stream in zip(iterators, turns, strict=True):
            # By then the worker has the next batch, which takes memory that is free.
            time.sleep(0.02)
            with pretend.on_stream(stream):
                batch = next(iterator)
                with pretend.delayed(20_000 if stream is turns[0] else 0):
                    kept.keep(batch.tensors, number)
            del batch
    kept.check()
    assert pretend.violations() == []


class Made(Numbered):
    def __init__(self, kind, count):
        super().__init__(count, SIZES)
        self._kind = kind

    def __getitem__(self, number):
        return self._kind(super().__getitem__(number))


@pytest.mark.parametrize("kind", [Sample, Moves, InClosure])
def test_what_no_container_shows_is_not_used_again_too_early(path, kind):
    pretend.set_poison(True)
    two_loaders_on_two_streams(path, kind, streams(2))


def test_where_memory_is_not_found_the_streams_are_waited_for():
    """Without poison, which comes before any copy could, as in a transform of another thread."""
    two_loaders_on_two_streams("native", Unseen, streams(2))


def test_memory_that_is_seen_is_safe_on_the_copy_stream_itself():
    pretend.set_poison(True)
    two_loaders_on_two_streams("native", Sample, [*streams(1), device_copy.stream_on(DEVICE)])


def test_torch_uses_no_memory_too_early():
    """The code that a user writes with torch's loader: the transform is called on the caller's stream."""
    pretend.set_poison(True)
    kept, turns = Kept(), streams(2)
    iterators = [iter(torch.utils.data.DataLoader(Numbered(6, SIZES), batch_size=None)) for _ in turns]
    for number in range(6):
        for iterator, stream in zip(iterators, turns, strict=True):
            with pretend.on_stream(stream):
                batch = Moves(next(iterator)).to(DEVICE, non_blocking=True)
                with pretend.delayed(20_000 if stream is turns[0] else 0):
                    kept.keep(batch.tensors, number)
            del batch
    kept.check()


def fails_at(number, error):
    asked = []

    def transform(batch):
        asked.append(batch)
        if torch.equal(batch["0"].cpu(), bytes_of(number, 100)):
            raise error
        return batch

    return transform, asked


def test_what_the_transform_raises_is_raised_in_its_turn(path):
    transform, asked = fails_at(2, KeyError("mine"))
    iterator = iter(loader_on(path, Numbered(6, SIZES), device_transform=transform))
    for number in (0, 1):
        assert_numbered(next(iterator), number)
    with pytest.raises(KeyError, match="mine"):
        next(iterator)
    for number in (3, 4, 5):
        assert_numbered(next(iterator), number)
    assert len(asked) == 6
    assert list(iterator) == []


# -- Errors


def drain(iterator, number):
    for batch in iterator:
        assert_numbered(batch, number)
        number += 1
    return number


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


# -- Processes


def test_a_forked_child_touches_nothing():
    iterator = iter(loader_on("native", Numbered(12, SIZES), num_workers=2, prefetch_factor=4))
    assert_numbered(next(iterator), 0)
    time.sleep(0.2)
    assert_numbered(next(iterator), 1)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with contextlib.suppress(AssertionError):
                next(iterator)
                os._exit(2)
            del iterator
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert drain(iterator, 2) == 12
    assert pretend.violations() == []


@pytest.mark.parametrize(
    "ending", ["", pytest.param("del loader", marks=pytest.mark.slow), "keep = [iterator, loader]"]
)
@pytest.mark.parametrize("persistent", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_interpreter_that_exits_with_batches_under_way(ending, persistent):
    script = f"""
        import sys
        from accelerator import pretend
        pretend.load()
        from accelerator.moved import Numbered, Registrar, loader_on
        from ringloader._placement import registration
        registration.registrars[pretend.NAME] = Registrar()
        options = dict(num_workers=2, persistent_workers={persistent})
        loader = loader_on("native", Numbered(40, (100, 300000)), **options)
        list(loader)
        iterator = iter(loader)
        pretend.set_delay(50000)
        first, second = next(iterator), next(iterator)
        {ending}
    """
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": tests},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


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
