"""The pretend accelerator: `load()` makes it the accelerator of the whole process, named `pretend`.

`torch.pretend` is its device module. What tests set and read is here.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch

from . import build

NAME = "pretend"
DEVICES = 2


def load() -> None:
    """Builds what is not built, and registers the backend. It stays: a second call does nothing.

    Raises:
        build.CannotBuildError: There is no g++, or it failed.
    """
    if hasattr(torch, NAME):
        return
    torch.ops.load_library(str(build.library()))
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def _device_module() -> types.ModuleType:
    """Makes the module that torch and its users expect at `torch.<device type>`."""
    module: Any = types.ModuleType(f"torch.{NAME}")
    ops = torch.ops.pretend

    def index(device: Any) -> int:
        if device is None:
            return torch.accelerator.current_device_index()
        if isinstance(device, int):
            return device
        found = torch.device(device).index
        return torch.accelerator.current_device_index() if found is None else found

    module.is_available = lambda: True
    module.device_count = lambda: DEVICES
    module.is_initialized = ops.is_initialized
    module._is_in_bad_fork = ops.is_in_bad_fork
    module.init = module._lazy_init = lambda: None
    module.current_device = torch.accelerator.current_device_index
    module.set_device = lambda device: torch.accelerator.set_device_index(index(device))
    module.current_stream = lambda device=None: torch.accelerator.current_stream(index(device))
    module.set_stream = torch.accelerator.set_stream
    module.synchronize = lambda device=None: ops.synchronize(index(device))
    module.empty_cache = ops.empty_cache
    module.memory_allocated = lambda _device=None: counters()["device_bytes"]
    module.max_memory_allocated = lambda _device=None: counters()["device_bytes_peak"]
    # Random numbers for the device are drawn on the CPU.
    module.manual_seed = module.manual_seed_all = lambda _seed: None
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.Stream = torch.Stream
    module.Event = torch.Event
    return module


def counters() -> dict[str, int]:
    """Returns the counters that `kCountNames` in `backend.cpp` names."""
    return dict(torch.ops.pretend.counters())


def violations() -> list[str]:
    """Returns the faults that a driver would have answered with since `reset`."""
    return list(torch.ops.pretend.violations())


def set_delay(microseconds: int) -> None:
    """Every copy that is issued from now on waits so long, on its stream, before it moves a byte."""
    torch.ops.pretend.set_delay_range(microseconds, microseconds)


def set_delay_range(low: int, high: int, seed: int = 0) -> None:
    """As `set_delay`, with a delay drawn for each copy."""
    torch.ops.pretend.set_seed(seed)
    torch.ops.pretend.set_delay_range(low, high)


def set_poison(on: bool) -> None:
    """Memory that is given back is overwritten at the earliest moment at which its next owner could."""
    torch.ops.pretend.set_poison(on)


def set_unguarded(on: bool) -> None:
    """Plants a defect: copies do not tell torch's host allocator of the pinned blocks that they use."""
    torch.ops.pretend.set_unguarded(on)


def fail(what: str, nth: int = 1, times: int = 1) -> None:
    """Lets `allocation`, `pinning`, `copy` or `registration` fail, the n-th call from now and `times` in all.

    An allocation fails with `torch.OutOfMemoryError`, the others with `RuntimeError`. `times`:
    -1 is every one, 0 none any more.
    """
    torch.ops.pretend.fail(what, nth, times)


def host_register(address: int, size: int) -> None:
    """Page-locks memory in place, as `cudaHostRegister`. `RuntimeError` where the range overlaps another."""
    torch.ops.pretend.host_register(address, size)


def host_unregister(address: int) -> None:
    """`RuntimeError` where no registration begins at `address`."""
    torch.ops.pretend.host_unregister(address)


def synchronize() -> None:
    """Waits for all streams of all devices."""
    torch.ops.pretend.synchronize(-1)


def reset() -> None:
    """No delay, no poison, no fault; every stream is done; what happened is no longer counted."""
    set_delay(0)
    set_poison(False)
    set_unguarded(False)
    for what in ("allocation", "pinning", "copy", "registration"):
        fail(what, times=0)
    synchronize()
    torch.ops.pretend.reset_counters()


@contextlib.contextmanager
def delayed(microseconds: int) -> Iterator[None]:
    """`set_delay` for a block."""
    set_delay(microseconds)
    try:
        yield
    finally:
        set_delay(0)


@contextlib.contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """`with stream`, which torch 2.6 has not."""
    before = torch.accelerator.current_stream(stream.device_index)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
