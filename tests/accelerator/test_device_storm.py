"""Batches moved to the device under copies that are late at random, in every way that an epoch can go."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import threading
import time
from typing import Any

import pytest
import torch

import ringloader
from accelerator import pretend
from accelerator.moved import DEVICE, LARGE, loader_on, registrar
from ringloader._features.device import device_copy

pytestmark = [pytest.mark.rings_only, pytest.mark.usefixtures("registrar")]

__all__ = ["registrar"]

# Batches in a run of all tests, and in one that has time.
QUICK, ALL = 20_000, 1_000_000
LONGEST_EPOCH = 4000


class Told(torch.utils.data.Dataset[Any]):
    """Batches whose every word tells their number; now and then a large one, and one of another shape."""

    def __init__(self, count: int, large_every: int) -> None:
        self._count = count
        self._large_every = large_every

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Any:
        if number % self._large_every == 0:
            large = torch.full((LARGE // 8 + number % 2,), number)
            return {"x": large, "y": torch.full((7,), number), "z": torch.tensor(number)}
        if number % 50 == 17:
            return [torch.full((number % 9, 4), number), number]
        # As int16 some of it is no words.
        small = torch.full((3,), number, dtype=torch.int16)
        return {"x": torch.full((16,), number), "y": torch.full((7,), number), "z": small}


def tensors_of(batch: Any) -> list[torch.Tensor]:
    items = batch.values() if isinstance(batch, dict) else batch[:1]
    return [item for item in items if item.numel()]


def tells(tensor: torch.Tensor, number: int | None) -> int | None:
    """The number that every word of a tensor tells, which should be ``number``."""
    low, high = (int(value) for value in tensor.aminmax())
    assert low == high and number in (None, low), f"batch {number}: words from {low} to {high}"
    return low


class Consumer:
    """Takes batches on streams of its own, copies out of some and drops them, keeps others for a while."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._streams = [torch.Stream(device=DEVICE) for _ in range(2)]
        self._held: list[list[torch.Tensor]] = []
        self.numbers: list[int] = []

    def take(self, iterator: Any) -> bool:
        """Takes a batch. Returns whether there was one."""
        with pretend.on_stream(self._random.choice(self._streams)):
            try:
                batch = next(iterator)
            except StopIteration:
                return False
            found = tensors_of(batch)
            del batch
            if self._random.random() < 0.2:
                # Later than what they are copies of, which is dropped at once.
                copies = [torch.empty_like(tensor) for tensor in found]
                for copied, tensor in zip(copies, found, strict=True):
                    copied.copy_(tensor, non_blocking=True)
                    tensor.record_stream(torch.accelerator.current_stream())
                found = copies
                torch.accelerator.current_stream().synchronize()
            self._held.append(found)
        if len(self._held) > self._random.choice((0, 3, 20)):
            self.look()
        return True

    def look(self) -> None:
        """At every byte of what is held, in the order in which it came."""
        # The tensors were handed out on streams of this thread.
        for stream in self._streams:
            stream.synchronize()
        for tensors in self._held:
            number = None
            for tensor in tensors:
                number = tells(tensor.cpu(), number)
            if number is not None:
                self.numbers.append(number)
        self._held.clear()


def consume(iterator: Any, consumers: list[Consumer], most: int) -> None:
    """Takes ``most`` batches, by a thread for each consumer.

    Raises:
        BaseException: What one of them has raised first.
    """
    errors: list[BaseException] = []
    left = threading.Semaphore(most)

    def run(consumer: Consumer) -> None:
        try:
            while not errors and left.acquire(blocking=False) and consumer.take(iterator):
                pass
            consumer.look()
        except BaseException as error:
            errors.append(error)

    if len(consumers) == 1:
        run(consumers[0])
    else:
        threads = [threading.Thread(target=run, args=(consumer,)) for consumer in consumers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def kill_one(iterator: Any, chance: random.Random) -> None:
    process = chance.choice(iterator._workers)
    time.sleep(chance.random() * 0.02)
    os.kill(process.pid, signal.SIGKILL)


def storm(total: int, seed: int) -> dict[str, int]:
    chance = random.Random(seed)
    pretend.set_poison(True)
    done = dict.fromkeys(("batches", "epochs", "abandoned", "killed", "short"), 0)
    loader = None
    while done["batches"] < total:
        if loader is None or chance.random() < 0.4:
            options = {
                "num_workers": chance.choice((1, 2)),
                "prefetch_factor": chance.choice((2, 5)),
                "persistent_workers": chance.random() < 0.5,
                "device_prefetch": chance.choice((0, 1, 2, 6)),
                "device_transform": chance.choice((None, None, lambda batch: batch)),
                "max_shared_bytes": chance.choice((None, 16 << 20)),
            }
            count = chance.randrange(200, LONGEST_EPOCH)
            loader = loader_on("native", Told(count, chance.choice((7, 100, 1000))), **options)
        pretend.set_delay_range(0, chance.choice((0, 20, 300)), seed=chance.randrange(1 << 30))
        iterator = iter(loader)
        consumers = [Consumer(chance.randrange(1 << 30)) for _ in range(chance.choice((1, 1, 3)))]
        most = count if chance.random() < 0.6 else chance.randrange(count)
        how = chance.random()
        killer = None
        if how < 0.15:
            killer = threading.Thread(target=kill_one, args=(iterator, random.Random(seed + done["epochs"])))
            killer.start()
        elif how < 0.3:
            pretend.fail("allocation", chance.randrange(1, 300), times=chance.choice((1, 3)))
        expected: type[BaseException] = RuntimeError if killer else torch.OutOfMemoryError
        is_over = False
        with contextlib.suppress(expected):
            consume(iterator, consumers, most)
            is_over = True
        if killer is not None:
            killer.join()
            done["killed"] += 1
        elif not is_over:
            # The batch is there again.
            done["short"] += 1
            pretend.fail("allocation", times=0)
            with contextlib.suppress(torch.OutOfMemoryError):
                consume(iterator, consumers, max(0, most - sum(len(one.numbers) for one in consumers)))
        pretend.fail("allocation", times=0)
        numbers = [number for consumer in consumers for number in consumer.numbers]
        assert len(numbers) == len(set(numbers)), "a batch twice"
        if is_over and killer is None and len(consumers) == 1:
            shown = [number for number in range(most) if number % 50 != 17 or number % 9]
            assert [number for number in numbers if number in set(shown)] == shown[: len(numbers)]
        done["batches"] += len(numbers)
        done["epochs"] += 1
        done["abandoned"] += most < count
        assert pretend.violations() == [], (seed, done)
        if killer is not None:
            iterator = loader = None
            gc.collect()
    report = {} if loader is None else ringloader.report(loader).counters
    iterator = loader = None
    del consumers
    gc.collect()
    pretend.synchronize()
    # This call looks at the memory that was withheld for streams.
    torch.pretend.empty_cache()
    left = pretend.counters()
    assert (left["device_bytes"], left["registered_bytes"], left["violations"]) == (0, 0, 0)
    return {**done, **report}


@pytest.mark.limit(500)
def test_storm(record_property):
    record_property("storm", storm(QUICK, seed=1))


@pytest.mark.slow
@pytest.mark.limit(3600)
@pytest.mark.parametrize("seed", range(4))
def test_a_long_storm(seed, record_property):
    record_property("storm", storm(ALL // 4, seed=seed + 100))


# -- What the storm finds


def _no_wait(monkeypatch):
    """The caller's stream does not wait for the copies."""
    monkeypatch.setattr(device_copy.Moved, "result", lambda self: self._data)


def _no_fence(monkeypatch):
    """Copies do not wait for what uses their memory still."""
    monkeypatch.setattr(device_copy.CopyStream, "_wait_for", lambda _self, _stream: None)


def _sources_dropped(monkeypatch):
    """Slots go back under the copies out of them."""

    begin = device_copy.CopyStream.begin

    def begin_without(self, after, _sources, _nbytes, memory):
        return begin(self, after, [], 0, memory)

    monkeypatch.setattr(device_copy.CopyStream, "begin", begin_without)


@pytest.mark.parametrize("plant", [_no_wait, _no_fence, _sources_dropped])
@pytest.mark.limit(300)
def test_a_planted_fault_is_found(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        storm(10 * QUICK, seed=3)
