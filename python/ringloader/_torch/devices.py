"""Devices: the current one, those in use, and one that a fork has spoilt."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch


def current_accelerator() -> torch.device | None:
    """Returns the current accelerator of this torch, whether or not there is one in this machine."""
    try:
        return torch.accelerator.current_accelerator()
    except RuntimeError:
        # Older ones raise where there is none.
        return None


def count_of(kind: str) -> int:
    """Returns the number of devices, as the device's own module counts them.

    The module can count without the driver. All other ways ask the driver, and then forked children, which
    workers are, cannot use the device.
    """
    return int(torch.get_device_module(kind).device_count())


def is_in_bad_fork(kind: str) -> bool:
    """True if the device is unusable here, since it was initialised before the fork of this process."""
    ask = getattr(torch.get_device_module(kind), "_is_in_bad_fork", None)
    return ask is not None and bool(ask())


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


def copy_many(into: list[torch.Tensor], sources: tuple[torch.Tensor, ...]) -> None:
    """Issues copies on the current stream, in one call of the device."""
    torch._foreach_copy_(into, sources, non_blocking=True)
