"""The pretend accelerator itself: what goes wrong on a device goes wrong on it, and what is guarded not."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from accelerator import pretend

pytestmark = pytest.mark.rings_only

LATE_US = 300_000
DEVICE = torch.device(pretend.NAME, 0)


def filled(value: int, size: int = 4096, *, pin: bool = True) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8, pin_memory=pin)


def values(tensor: torch.Tensor) -> list[int]:
    return tensor.cpu().unique().tolist()


def new_stream() -> torch.Stream:
    return torch.Stream(device=DEVICE)


# -- Hazards: each with what guards against it, and without


@pytest.mark.parametrize("too_early", [True, False])
def test_source_used_again(too_early: bool):
    source = filled(1)
    with pretend.delayed(LATE_US):
        copied = source.to(DEVICE, non_blocking=True)
    if not too_early:
        pretend.synchronize()
    source.fill_(2)
    assert values(copied) == [2 if too_early else 1]


@pytest.mark.parametrize("waits", [True, False])
def test_wait_for_the_copy(waits: bool):
    source, copied = filled(1), torch.zeros(4096, dtype=torch.uint8, device=DEVICE)
    pretend.synchronize()
    side, event = new_stream(), torch.Event(device=DEVICE)
    with pretend.on_stream(side), pretend.delayed(LATE_US):
        copied.copy_(source, non_blocking=True)
        event.record(side)
    if waits:
        torch.accelerator.current_stream().wait_event(event)
    assert values(copied) == [1 if waits else 0]


@pytest.mark.parametrize("recorded", [True, False])
def test_block_that_another_stream_uses(recorded: bool):
    first, second = filled(1), filled(2)
    block = torch.empty(4096, dtype=torch.uint8, device=DEVICE)
    address = block.data_ptr()
    side = new_stream()
    with pretend.on_stream(side), pretend.delayed(LATE_US):
        block.copy_(first, non_blocking=True)
    if recorded:
        block.record_stream(side)
    del block
    successor = torch.empty(4096, dtype=torch.uint8, device=DEVICE)
    assert (successor.data_ptr() != address) == recorded
    successor.copy_(second, non_blocking=True)
    pretend.synchronize()
    assert values(successor) == [2 if recorded else 1]


def test_withheld_block_comes_back():
    block = torch.empty(4096, dtype=torch.uint8, device=DEVICE)
    address, side = block.data_ptr(), new_stream()
    block.record_stream(side)
    before = pretend.counters()["device_blocks"]
    with pretend.on_stream(side), pretend.delayed(LATE_US):
        torch.empty(1, device=DEVICE).copy_(torch.ones(1).pin_memory(), non_blocking=True)
    del block
    assert pretend.counters()["device_blocks"] >= before
    pretend.synchronize()
    assert torch.empty(4096, dtype=torch.uint8, device=DEVICE).data_ptr() == address


def _foreign(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same memory in a storage that torch's allocator did not make."""
    return torch.from_dlpack(tensor)


def _view(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[2048:]


@pytest.mark.parametrize(
    ("make", "guarded"),
    [
        (lambda pinned: pinned, True),
        (_view, True),
        (_foreign, True),
        (lambda pinned: _foreign(_view(pinned)), False),
    ],
    ids=["whole", "view", "foreign", "foreign in the middle"],
)
def test_events_guard_a_pinned_block(make: Callable[[torch.Tensor], torch.Tensor], guarded: bool):
    torch.ops.pretend.empty_host_cache()
    pretend.set_poison(True)
    source = filled(1)
    address = source.data_ptr()
    with pretend.delayed(LATE_US):
        copied = make(source).to(DEVICE, non_blocking=True)
    del source
    successor = filled(2)
    assert (successor.data_ptr() != address) == guarded
    assert values(copied) == ([1] if guarded else [2])


@pytest.mark.parametrize("registered", [True, False])
def test_memory_that_is_not_pinned_is_read_at_once(registered: bool):
    source = filled(1, pin=False)
    if registered:
        pretend.host_register(source.data_ptr(), source.nbytes)
    assert source.is_pinned() == registered
    with pretend.delayed(LATE_US):
        copied = source.to(DEVICE, non_blocking=True)
    source.fill_(2)
    assert values(copied) == [2 if registered else 1]
    assert pretend.counters()["snapshots"] == (0 if registered else 1)
    if registered:
        pretend.host_unregister(source.data_ptr())
    assert not source.is_pinned()
    assert not pretend.violations()


def test_source_that_is_unregistered_too_early():
    source = filled(1, pin=False)
    pretend.host_register(source.data_ptr(), source.nbytes)
    with pretend.delayed(LATE_US):
        copied = source.to(DEVICE, non_blocking=True)
    pretend.host_unregister(source.data_ptr())
    pretend.synchronize()
    assert pretend.violations() == [
        "the source was page-locked when the copy was issued, and is not when it runs"
    ]
    del copied


class Mapped:
    """Shared memory, as a slot is."""

    def __init__(self, size: int) -> None:
        self.fd = os.memfd_create("slot")
        os.ftruncate(self.fd, size)
        self.map = mmap.mmap(self.fd, size)
        self.tensor = torch.frombuffer(self.map, dtype=torch.uint8)
        self.tensor.fill_(1)


def test_source_that_is_unmapped():
    mapped = Mapped(1 << 16)
    pretend.host_register(mapped.tensor.data_ptr(), 1 << 16)
    with pretend.delayed(LATE_US):
        copied = mapped.tensor.to(DEVICE, non_blocking=True)
    libc = ctypes.CDLL(None)
    address = ctypes.c_void_p(mapped.tensor.data_ptr())
    # Mapped still, but no more to be read.
    assert libc.mprotect(address, ctypes.c_size_t(1 << 16), 0) == 0
    pretend.synchronize()
    assert "the source is not mapped" in pretend.violations()
    assert libc.mprotect(address, ctypes.c_size_t(1 << 16), mmap.PROT_READ | mmap.PROT_WRITE) == 0
    pretend.host_unregister(mapped.tensor.data_ptr())
    del copied


@pytest.mark.parametrize("punched", ["before", "during", "never"])
def test_pages_that_are_given_back_while_registered(punched: str):
    mapped = Mapped(1 << 16)
    pretend.host_register(mapped.tensor.data_ptr(), 1 << 16)

    def punch() -> None:
        # A worker does this through a mapping of its own.
        other = mmap.mmap(mapped.fd, 1 << 16)
        other.madvise(mmap.MADV_REMOVE, 1 << 15, 1 << 15)
        other[1 << 15 :] = bytes([3]) * (1 << 15)

    if punched == "before":
        punch()
    with pretend.delayed(LATE_US):
        copied = mapped.tensor.to(DEVICE, non_blocking=True)
    if punched == "during":
        punch()
    pretend.synchronize()
    lost = ["the source lost pages while it was registered"]
    assert pretend.violations() == ([] if punched == "never" else lost)
    pretend.host_unregister(mapped.tensor.data_ptr())
    del copied


def test_a_copy_across_two_registrations_is_not_pinned():
    source = filled(1, 8192, pin=False)
    for offset in (0, 4096):
        pretend.host_register(source.data_ptr() + offset, 4096)
    source.to(DEVICE, non_blocking=True)
    assert pretend.counters()["snapshots"] == 1
    source[:4096].to(DEVICE, non_blocking=True)
    assert pretend.counters()["snapshots"] == 1
    for offset in (0, 4096):
        pretend.host_unregister(source.data_ptr() + offset)


def test_poison_tells_of_a_device_block_that_is_used_after_it():
    pretend.set_poison(True)
    block = torch.ones(512, dtype=torch.uint8, device=DEVICE)
    view = torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(block.untyped_storage(), 0, (512,))
    assert values(view) == [1]
    address = block.data_ptr()
    del block, view
    successor = torch.empty(512, dtype=torch.uint8, device=DEVICE)
    assert successor.data_ptr() == address
    assert values(successor) == [0xCB]


# -- Registration


def test_registration_errors():
    source = filled(1, pin=False)
    address = source.data_ptr()
    pretend.host_register(address, 4096)
    for start, size in ((address, 4096), (address + 100, 10), (address - 10, 20), (address + 4000, 4096)):
        with pytest.raises(RuntimeError, match="already mapped"):
            pretend.host_register(start, size)
    for start in (address + 1, address - 1, 4096):
        with pytest.raises(RuntimeError, match="does not correspond"):
            pretend.host_unregister(start)
    counted = pretend.counters()
    assert (counted["registrations"], counted["registered_bytes"]) == (1, 4096)
    pretend.host_unregister(address)
    with pytest.raises(RuntimeError, match="does not correspond"):
        pretend.host_unregister(address)
    counted = pretend.counters()
    assert (counted["registrations"], counted["registered_bytes"]) == (0, 0)
    pretend.host_register(address, 4096)
    pretend.host_unregister(address)
    with pytest.raises(RuntimeError, match="invalid argument"):
        pretend.host_register(1 << 46, 4096)
    with pytest.raises(RuntimeError, match="already mapped"):
        pinned = filled(1)
        pretend.host_register(pinned.data_ptr(), 10)


def test_registration_makes_every_page_be():
    fd = os.memfd_create("slot")
    os.ftruncate(fd, 1 << 20)
    mapped = mmap.mmap(fd, 1 << 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    assert os.fstat(fd).st_blocks == 0
    pretend.host_register(address, 1 << 18)
    assert os.fstat(fd).st_blocks * 512 == 1 << 18
    pretend.host_unregister(address)


# -- Faults


def test_faults_strike_when_they_are_told_to():
    pretend.fail("allocation", 2)
    kept = torch.empty(3, device=DEVICE)
    with pytest.raises(torch.OutOfMemoryError, match="pretend out of memory"):
        torch.empty(3, device=DEVICE)
    torch.empty(3, device=DEVICE)
    pretend.fail("copy", 1, 2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="copy failed"):
            kept.copy_(torch.ones(3))
    kept.copy_(torch.ones(3))
    pretend.fail("pinning", times=-1)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="out of page-locked memory"):
            torch.ones(3).pin_memory()
    pretend.fail("pinning", times=0)
    torch.ones(3).pin_memory()
    pretend.fail("registration")
    with pytest.raises(RuntimeError, match="refused"):
        pretend.host_register(kept.data_ptr(), 1)


# -- What is there and what happened


def test_counters():
    before = pretend.counters()
    source = torch.ones(1000).pin_memory()
    copied = source.to(DEVICE, non_blocking=True)
    back = copied.cpu()
    copied.clone()
    after = pretend.counters()
    change = {name: after[name] - before[name] for name in after}
    assert (change["copies_to_device"], change["bytes_to_device"]) == (1, 4000)
    assert (change["copies_to_host"], change["bytes_to_host"]) == (1, 4000)
    assert change["copies_on_device"] == 1
    assert (change["pinned_live_blocks"], change["pinned_live_bytes"]) == (1, 4096)
    assert change["device_blocks"] == 1
    assert torch.equal(back, source)
    # A kernel that the CPU stands in for is no copy.
    assert values((copied * 2).to(torch.uint8)) == [2]
    del copied, source
    gc.collect()
    pretend.synchronize()
    torch.empty(1).pin_memory()
    end = pretend.counters()
    assert end["pinned_live_blocks"] == before["pinned_live_blocks"]
    assert end["device_blocks"] == before["device_blocks"]


def test_delay_is_drawn_when_the_copy_is_issued():
    source = filled(1)
    with pretend.delayed(LATE_US):
        late = torch.Event(device=DEVICE)
        source.to(DEVICE, non_blocking=True)
        late.record()
    begun = time.monotonic()
    assert not late.query()
    late.synchronize()
    assert late.query()
    assert time.monotonic() - begun > LATE_US / 2e6


def test_times_between_events():
    first, second = (torch.Event(device=DEVICE, enable_timing=True) for _ in range(2))
    first.record()
    with pretend.delayed(LATE_US):
        filled(1).to(DEVICE, non_blocking=True)
    second.record()
    second.synchronize()
    assert first.elapsed_time(second) >= LATE_US / 1000


# -- An accelerator as torch knows it


def test_torch_finds_it():
    assert torch.accelerator.is_available()
    assert str(torch.accelerator.current_accelerator()) == pretend.NAME
    assert torch.accelerator.device_count() == pretend.DEVICES
    assert torch.accelerator.current_device_index() == 0
    assert torch.pretend.is_initialized()
    assert filled(1).is_pinned()
    assert not filled(1, pin=False).is_pinned()


def test_two_devices():
    one = filled(1).to("pretend:1")
    assert one.device == torch.device("pretend:1")
    assert values(one.to("pretend:0")) == [1]
    torch.accelerator.set_device_index(1)
    try:
        assert torch.empty(1, device=pretend.NAME).device.index == 1
        assert torch.accelerator.current_stream().device_index == 1
    finally:
        torch.accelerator.set_device_index(0)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.empty(1, device="pretend:2")


@pytest.mark.parametrize("non_blocking", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
        lambda: torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        lambda: torch.arange(24).view(4, 6)[::2, 1::2],
        lambda: torch.ones(3).expand(4, 3),
        lambda: torch.zeros(0, 3),
        lambda: torch.tensor(7),
        lambda: torch.complex(torch.ones(3), torch.ones(3)).conj(),
        lambda: torch.arange(5, dtype=torch.bfloat16),
        lambda: torch.tensor([True, False]),
    ],
)
def test_tensors_come_and_go(make: Callable[[], Any], non_blocking: bool):
    tensor = make()
    there = tensor.to(DEVICE, non_blocking=non_blocking)
    # torch's own copy decides which memory formats are kept.
    assert there.stride() == tensor.to("meta").stride()
    assert torch.equal(there.cpu(), tensor)
    assert torch.equal(there.to(torch.complex64, non_blocking=non_blocking).cpu(), tensor.to(torch.complex64))
    target = torch.zeros(tensor.shape, dtype=torch.complex128)
    target.copy_(there, non_blocking=non_blocking)
    pretend.synchronize()
    assert torch.equal(target, tensor.to(torch.complex128))


def test_a_model_trains():
    model = torch.nn.Linear(4, 1).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (model(torch.ones(8, 4, device=DEVICE)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


# -- Forks


def in_child(function: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_child_uses_the_cpu_and_nothing_else():
    with pretend.delayed(LATE_US):
        held = [filled(1), filled(2).to(DEVICE, non_blocking=True), new_stream(), torch.Event(device=DEVICE)]

    def child() -> None:
        assert torch.pretend._is_in_bad_fork()
        assert torch.ones(3).sum() == 3
        torch.manual_seed(1)
        assert held[0].is_pinned()
        held.clear()
        gc.collect()
        for use in (lambda: torch.empty(1, device=DEVICE), lambda: torch.ones(1).pin_memory()):
            try:
                use()
            except RuntimeError as error:
                assert "forked subprocess" in str(error)
            else:
                raise AssertionError("the device was used")

    assert in_child(child) == 0
    assert values(held[1]) == [2]
