"""The device in use, its streams, and a device that a fork has made unusable."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator
from typing import Any

import torch


def on_cuda_device_in_use() -> contextlib.AbstractContextManager[Any]:
    """Makes a device of this process's the current one that has a context, if there is one."""
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    devices = range(torch.cuda.device_count()) if has_context is not None else ()
    in_use = next((index for index in devices if has_context and has_context(index)), None)
    return contextlib.nullcontext() if in_use is None else torch.cuda.device(in_use)


def current_device_index() -> int:
    """Returns the index of the device that torch pins for, as its pinning thread finds it."""
    return int(torch.accelerator.current_device_index())


@functools.cache
def copies_many(device_type: str) -> bool:
    """True if a device has code of its own that copies a list of tensors in one call."""
    key_for = getattr(torch._C, "_dispatch_key_for_device", None)
    has_kernel = getattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", None)
    if key_for is None or has_kernel is None:
        return False
    return bool(has_kernel("aten::_foreach_copy_", key_for(device_type)))


@contextlib.contextmanager
def stream_context(stream: torch.Stream) -> Generator[None]:
    """Makes a stream, and its device, the current ones of this thread.

    ``with stream`` would keep the streams that were current before on the stream object, where threads and
    nested entries overwrite each other's. torch 2.6 does not have it.
    """
    device = torch.accelerator.current_device_index()
    before = torch.accelerator.current_stream(stream.device)
    try:
        # Inside: an interrupt behind it must not leave it set.
        torch.accelerator.set_stream(stream)
        yield
    finally:
        # Each call sets the device too.
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(device)


def device_in_bad_fork() -> str | None:
    """A device that was initialised in the process from which this one was forked, and is unusable here.

    If a device cannot tell this, it counts once it was initialised at all.
    """
    get_name = getattr(torch._C, "_get_privateuse1_backend_name", None)
    names: list[str] = [*_DEVICES, *([] if get_name is None else [get_name()])]
    for name in dict.fromkeys(names):
        device = getattr(torch, name, None)
        ask = getattr(device, "_is_in_bad_fork", None) or getattr(device, "is_initialized", None)
        # A device's Python package may be there without its other half.
        with contextlib.suppress(AttributeError, NotImplementedError):
            if ask is not None and ask():
                return name
    return None


# `hpu` is put there by its own package; a device of a name of its own is the private one.
_DEVICES = ("cuda", "xpu", "mps", "mtia", "hpu")
