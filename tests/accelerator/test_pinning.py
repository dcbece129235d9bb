"""`pin_memory=True` beside torch's own loader: sizes, order, modes, errors, epochs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.data

from accelerator import pretend
from accelerator.pinned import IS_NAMED, PIN, Flow, Sized, told
from accelerator.pinning_parts import MIB, Pins, PinsBadly, assert_same, large, on_each_path, ones, whole
from faults.failing_datasets import Dies
from parity.datasets import Order, Samples, SizedStream, Stream, identity
from parity.harness import Case, compare


@pytest.fixture(autouse=True)
def _paths(request: pytest.FixtureRequest, _as_new: None) -> Iterator[None]:
    yield from on_each_path(request)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("parts", [1, 3])
def test_batches_whose_size_changes(loader_class, workers, parts):
    sizes = [1, 3 * MIB, 127 << 10, 128 << 10, 5, 129 << 10, MIB + 1, 0, 4 * MIB, 4 * MIB, 4 * MIB, 2, 64]
    compare(
        loader_class,
        Case(
            lambda: {
                "dataset": Sized(sizes, parts=parts),
                "batch_size": None,
                "collate_fn": identity,
                "num_workers": workers,
                **PIN,
            },
            epochs=2,
        ),
    )


@pytest.mark.parametrize("shared", [MIB, 4 * MIB, 64 * MIB])
def test_oversize_batches(loader_class, shared):
    """Oversize batches come in memory of their own."""
    sizes = [2 * MIB, 10, 3 * MIB, 3 * MIB, 600 << 10, 2 * MIB, 100]

    def scenario(kind, told):
        ours = {"max_shared_bytes": shared} if told.ours else {}
        loader = kind(Sized(sizes), batch_size=None, collate_fn=identity, num_workers=2, **PIN, **ours)
        for _ in range(2):
            told.iterate(loader)

    assert_same(scenario, loader_class)


def test_batches_that_are_kept(loader_class):
    """Nothing writes to a batch that the caller has, for as long as it lives."""
    sizes = [10, MIB, 200 << 10, 5] * 4
    loader = loader_class(Sized(sizes), batch_size=None, collate_fn=identity, num_workers=2, **PIN)
    pretend.set_poison(True)
    kept = [batch for _ in range(3) for batch in loader]
    assert all(
        torch.equal(batch, told(index, sizes[index]))
        for index, batch in zip(list(range(len(sizes))) * 3, kept, strict=True)
    )
    assert all(batch.is_pinned() for batch in kept)


def test_pinned_memory_comes_back(loader_class):
    def live() -> tuple[int, int]:
        counted = pretend.counters()
        return counted["pinned_live_blocks"], counted["pinned_live_bytes"]

    before = live()
    loader = loader_class(
        Sized([MIB] * 8 + [10] * 8), batch_size=None, collate_fn=identity, num_workers=2, **PIN
    )
    reserved = []
    for epoch in range(6):
        iterator = iter(loader)
        for _ in range(3 if epoch % 2 else 16):
            next(iterator)
        reserved.append(pretend.counters()["pinned_bytes"])
    del loader, iterator
    deadline = time.monotonic() + 10
    while live() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert live() == before
    # torch's own keeps as many as were ever on their way.
    assert reserved[-1] <= reserved[1] + 8 * MIB


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("size", [10, 300 << 10])
def test_abandoned_epochs(loader_class, persistent, size):
    def build():
        options = {"batch_size": 2, "shuffle": True, "num_workers": 2, "persistent_workers": persistent}
        return {
            "dataset": Sized([size] * 14),
            "generator": torch.Generator().manual_seed(4),
            **options,
            **PIN,
        }

    compare(loader_class, Case(build, epochs=4, take=2))


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_the_sampler_is_read_at_torchs_moments(loader_class, prefetch):
    def build():
        order = Order([[index] for index in range(12)], after=[[3]])
        return {
            "dataset": Samples(12),
            "batch_sampler": order,
            "num_workers": 2,
            "prefetch_factor": prefetch,
            **PIN,
        }

    compare(loader_class, Case(build, epochs=2, take=5))


@pytest.mark.parametrize("prefetch", [1, 3])
def test_the_sampler_is_read_between_hand_outs(loader_class, prefetch):
    """The moments themselves, and the thread."""

    def scenario(kind, told):
        log: list[Any] = []
        here = threading.get_ident()

        class Recording:
            def __iter__(self):
                for index in range(10):
                    log.append((index, threading.get_ident() == here))
                    yield index

        loader = kind(
            Sized([300 << 10] * 10), sampler=Recording(), num_workers=1, prefetch_factor=prefetch, **PIN
        )
        iterator = told.step("iter", lambda: iter(loader))
        for _ in range(11):
            # So that all that can be ahead is ahead.
            time.sleep(0.05)
            told.step("next", lambda: next(iterator))
            told.step("read", lambda: list(log))

    assert_same(scenario, loader_class)


@pytest.mark.parametrize("fail_at", [0, 3])
def test_a_sampler_that_raises(loader_class, fail_at):
    def build():
        return {
            "dataset": Samples(8),
            "sampler": Order(list(range(8)), fail_at=fail_at),
            "num_workers": 1,
            **PIN,
        }

    compare(loader_class, Case(build))


def test_out_of_order(loader_class):
    def build():
        return {
            "dataset": Sized([10, 300 << 10] * 8),
            "batch_size": None,
            "num_workers": 3,
            "in_order": False,
            **PIN,
        }

    compare(loader_class, Case(build, epochs=2, unordered=True))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    "make",
    [lambda: Stream((5, 2)), lambda: SizedStream((3, 3), declared=2), lambda: Flow([10, 300 << 10] * 5)],
)
def test_streams(loader_class, make, persistent):
    def build():
        return {"dataset": make(), "num_workers": 2, "batch_size": 2, "persistent_workers": persistent, **PIN}

    compare(loader_class, Case(build, epochs=3, take=3, ask_length=True))


@pytest.mark.parametrize("workers", [1, 2])
def test_loaders_side_by_side(loader_class, workers):
    def scenario(kind, told):
        loaders = [kind(Sized([size] * 5), num_workers=workers, batch_size=None, **PIN) for size in (10, MIB)]
        told.step("zip", lambda: list(zip(*loaders, strict=True)))
        iterators = [iter(loaders[0]), iter(loaders[0]), iter(loaders[1])]
        for _ in range(6):
            for iterator in iterators:
                told.step("next", lambda iterator=iterator: next(iterator))

    assert_same(scenario, loader_class)


MODES: dict[str, Any] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "default device": lambda: torch.device(pretend.NAME),
    "default device meta": lambda: torch.device("meta"),
    "default device cpu": lambda: torch.device("cpu"),
}


@pytest.mark.parametrize(
    "kind_of_batch", [lambda: [ones(), large()], lambda: ones().requires_grad_(), lambda: Pins(ones())]
)
@pytest.mark.parametrize("mode", MODES)
def test_modes(loader_class, mode, kind_of_batch):
    def scenario(kind, told):
        loader = kind(**whole(kind_of_batch, length=5))
        iterator = told.step("iter", lambda: iter(loader))
        told.drain(iterator, 2)
        with MODES[mode]():
            told.drain(iterator, 2)
        told.drain(iterator)

    assert_same(scenario, loader_class)


def test_default_dtype(loader_class):
    def scenario(kind, told):
        iterator = told.step("iter", lambda: iter(kind(**whole(large, ones, length=6))))
        torch.set_default_dtype(torch.float64)
        try:
            told.drain(iterator)
        finally:
            torch.set_default_dtype(torch.float32)

    assert_same(scenario, loader_class)


@pytest.mark.skipif(IS_NAMED, reason="pins for the device that is named")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["cuda", pretend.NAME, f"{pretend.NAME}:1", "no such device"])
def test_pin_memory_device_is_warned_about(loader_class, name, workers):
    def build():
        return {"dataset": Samples(3), "num_workers": workers, "pin_memory": True, "pin_memory_device": name}

    expected, _ = compare(loader_class, Case(build, epochs=2))
    assert any("pin_memory_device is deprecated" in str(step.warnings) for step in expected.steps)


@pytest.mark.skipif(pretend.DEVICES < 2, reason="there is one device")
def test_another_current_device(loader_class):
    """Errors name it."""

    def scenario(kind, told):
        torch.accelerator.set_device_index(1)
        try:
            told.iterate(kind(**whole(ones, PinsBadly, length=4)))
        finally:
            torch.accelerator.set_device_index(0)

    steps = assert_same(scenario, loader_class)
    assert "in pin memory thread for device 1" in str(steps)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("size", [10, 300 << 10])
def test_pinning_fails(loader_class, size, workers):
    """Pinned memory ends at the third allocation, and is there again."""

    def scenario(kind, told):
        loader = kind(Sized([size] * 6), num_workers=workers, batch_size=None, **PIN)
        pretend.fail("pinning", 3, 2)
        told.iterate(loader)
        told.iterate(loader)

    steps = assert_same(scenario, loader_class)
    assert str(steps).count("out of page-locked memory") >= 2


@pytest.mark.parametrize("persistent", [False, True])
def test_errors_have_their_turn(loader_class, persistent):
    makes = (
        ones,
        PinsBadly,
        large,
        lambda: 1 / 0,
        lambda: ones().to_sparse(),
        lambda: [large(), PinsBadly()],
        ones,
    )

    def build():
        return whole(*makes, num_workers=2, persistent_workers=persistent)

    expected, _ = compare(loader_class, Case(build, epochs=3, take=4))
    assert "in pin memory thread for device 0" in str(expected.outcomes)
    assert "in DataLoader worker process 1" in str(expected.outcomes)


class Slow(Sized):
    def __getitem__(self, index: int) -> Any:
        if index == 2:
            time.sleep(1.2)
        return super().__getitem__(index)


@pytest.mark.parametrize("size", [10, 300 << 10])
def test_timeout(loader_class, size):
    """Said in its turn; the next call gets what was late."""

    def scenario(kind, told):
        loader = kind(Slow([size] * 4), num_workers=1, batch_size=None, timeout=0.5, **PIN)
        iterator = told.step("iter", lambda: iter(loader))
        for _ in range(3):
            told.step("next", lambda: next(iterator))
        time.sleep(1.2)
        told.drain(iterator)

    steps = assert_same(scenario, loader_class)
    assert "timed out after 0.5 seconds" in str(steps)


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_worker_dies(loader_class, how):
    """The batches from before its death come; then an error, and nothing is left."""
    loader = loader_class(Dies(20, 7, how), num_workers=1, batch_size=None, prefetch_factor=2, **PIN)
    seen = []
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid"):
        for batch in loader:
            assert batch.is_pinned()
            seen.append(int(batch[0]))
    assert seen == list(range(len(seen)))
    assert len(seen) <= 7
    loader = loader_class(Dies(20, 99, how), num_workers=1, batch_size=None, **PIN)
    assert len(list(loader)) == 20


def test_next_in_several_threads(loader_class):
    sizes = [10, 300 << 10] * 30
    iterator = iter(loader_class(Sized(sizes), num_workers=2, batch_size=None, **PIN))
    found: list[torch.Tensor] = []
    lock = threading.Lock()

    def walk() -> None:
        while True:
            with lock:
                batch = next(iterator, None)
            if batch is None:
                return
            found.append(batch)

    threads = [threading.Thread(target=walk) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(sizes)
    expected = [told(index, size) for index, size in enumerate(sizes)]
    key = lambda tensor: (tensor.numel(), int(tensor[0]), int(tensor[1]))  # noqa: E731
    for one, other in zip(sorted(found, key=key), sorted(expected, key=key), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("size", [100, 300 << 10])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_are_dropped_under_their_copies(loader_class, workers, size):
    """torch's events guard the block that a batch was in, and its slot is not read any more."""
    sizes = [size] * 24
    loader = loader_class(Sized(sizes), num_workers=workers, batch_size=None, **PIN)
    pretend.set_poison(True)
    for _ in range(2):
        copies = []
        pretend.set_delay(20_000)
        for batch in loader:
            copies.append(batch.to(pretend.NAME, non_blocking=True))
            del batch
        pretend.set_delay(0)
        pretend.synchronize()
        for index, copy in enumerate(copies):
            assert torch.equal(copy.cpu(), told(index, size))
    assert pretend.counters()["snapshots"] == 0
