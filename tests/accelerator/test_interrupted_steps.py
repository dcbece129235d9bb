"""An interrupt at each bytecode of what prepares batches: a caller that goes on gets all of them."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch

from accelerator import pretend
from accelerator.moved import DEVICE, registrar
from accelerator.pinned import IS_NAMED, PIN
from faults.interrupts import InterruptError, Interrupting
from faults.proc import wait_until
from ringloader import DataLoader
from ringloader._features.device import device, device_copy, device_tree
from ringloader._features.main_prefetch import decoding
from ringloader._transport import lookahead

pytestmark = [
    pytest.mark.rings_only,
    pytest.mark.usefixtures("registrar"),
    pytest.mark.skipif(IS_NAMED, reason="torch's own thread pins"),
]

__all__ = ["registrar"]

TRACED = {
    module.__file__
    for module in (
        *(decoding, device, device_copy, device_tree),
        lookahead,
    )
}
COUNT = 7


class Pickled:
    """No tensor: a thread unpickles it."""

    def __init__(self, number):
        self.number, self.padding = number, bytes(2000)

    def number_of(self):
        return self.number


class Mixed(dict):
    """Has no native layout."""


def tensors(number, size):
    return {
        "a": torch.full((size,), number, dtype=torch.int32),
        "b": torch.tensor([number]),
        "c": torch.full((3,), number, dtype=torch.uint8),
    }


DATASETS = {
    "small": lambda: [tensors(number, 20) for number in range(COUNT)],
    "large": lambda: [tensors(number, 50_000) for number in range(COUNT)],
    "any": lambda: [[Mixed(tensors(number, 30)), "text"] for number in range(COUNT)],
    "pickled": lambda: [Pickled(number) for number in range(COUNT)],
}
OPTIONS = {
    "main_prefetch": {"main_prefetch": 2},
    "pinned": PIN,
    "moved": {"device": DEVICE, "device_prefetch": 2},
    "transformed": {"device": DEVICE, "device_prefetch": 1, "device_transform": lambda batch: batch},
}


def identity(batch):
    return batch


def described(batch):
    if isinstance(batch, Pickled):
        return batch.number
    if isinstance(batch, list):
        return [described(one) for one in batch]
    if isinstance(batch, dict):
        return {name: (tensor.shape, set(tensor.cpu().tolist())) for name, tensor in batch.items()}
    return batch


def run(loader, number, at):
    """All batches of an epoch with an interrupt at one step of the call `at`, and where that was."""
    iterator = iter(loader)
    got = []
    interrupting = Interrupting(TRACED, number)
    while True:
        try:
            if len(got) == at and interrupting.where is None:
                # So that there is something to be prepared ahead.
                assert wait_until(lambda: iterator._transport.engine.committed() >= 2, 20)
                with interrupting:
                    batch = next(iterator)
            else:
                batch = next(iterator)
        except InterruptError:
            continue
        except StopIteration:
            return got, interrupting.where
        got.append(described(batch))
        del batch


def check(loader, at, stride):
    """An epoch with an interrupt at each step of the call `at`, or at every third or so."""
    expected, _ = run(loader, None, at)
    assert len(expected) == COUNT
    number, where = 0, ""
    while where is not None:
        got, where = run(loader, number, at)
        assert got == expected, f"step {number}, {where}"
        number += stride
    assert number > 20


def loader_of(kind, option, **options):
    return DataLoader(
        DATASETS[kind](),
        batch_size=None,
        collate_fn=identity,
        num_workers=1,
        prefetch_factor=4,
        **OPTIONS[option],
        **options,
    )


def _cases():
    """Each kind with each option; on a device the small batches take the most steps."""
    for kind, option in itertools.product(DATASETS, OPTIONS):
        is_slow = kind != "small" and option in ("moved", "transformed")
        yield pytest.param(kind, option, marks=pytest.mark.slow if is_slow else ())


@pytest.mark.limit(300)
@pytest.mark.parametrize(("kind", "option"), list(_cases()))
def test_an_interrupt_at_each_step_of_next_loses_nothing(kind, option):
    pretend.set_poison(True)
    pretend.set_delay_range(0, 500)
    loader = loader_of(kind, option, persistent_workers=True)
    # The calls before have left batches ahead.
    check(loader, 2, 3 if option in ("moved", "transformed") and kind != "small" else 1)
    loader.shutdown()
    gc.collect()
    pretend.synchronize()
    # At an allocation, the allocator looks for memory that other streams have done with.
    torch.empty(1, device=DEVICE)
    assert pretend.violations() == []
    assert pretend.counters()["device_bytes"] == 0


@pytest.mark.parametrize(
    ("option", "stride"),
    [("main_prefetch", 1), ("pinned", 1), pytest.param("moved", 7, marks=pytest.mark.slow)],
)
def test_nor_in_the_first_call(option, stride):
    """The first call starts a thread, or makes a stream. Each time with a loader's new workers."""
    pretend.set_delay_range(0, 500)
    check(loader_of("small", option), 0, stride)
    pretend.synchronize()
    assert pretend.violations() == []
