"""Devices: the one that an option means, the one in use and its streams, and one that a fork has spoilt."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator
from typing import Any

import torch

AUTO = "auto"
# Devices that were found to be there.
_known: set[object] = set()


def resolve(device: torch.device | str | int | None) -> torch.device | None:
    """Returns the device that batches are moved to; None where they stay on the CPU.

    Without an index it is the device that is current when the first batch is moved.

    Args:
        device: As the option ``device`` takes it.

    Raises:
        ValueError: If it is not there, or not of the current accelerator.
    """
    if device is None:
        return None
    accelerator = current_accelerator()
    if device == AUTO:
        if accelerator is None or _count(accelerator.type) == 0 or _is_in_bad_fork(accelerator.type):
            return None
        return accelerator
    if not isinstance(device, int):
        try:
            asked = torch.device(device)
        except RuntimeError as error:
            what = str(error).splitlines()[0]
            raise ValueError(f"device {device!r} is unknown to torch, and is not {AUTO!r}: {what}") from None
        if asked.type == "cpu":
            return None
    elif accelerator is None:
        raise ValueError(
            f"device {device} does not exist: torch has no accelerator here; pass {AUTO!r} or None"
        )
    else:
        asked = torch.device(accelerator.type, device)
    if accelerator is None or asked.type != accelerator.type:
        there = "there is none" if accelerator is None else f"which is {accelerator.type!r}"
        raise ValueError(
            f"device {device!r} is not of the current accelerator ({there}); pass {AUTO!r} for that, and for "
            "the CPU where there is none"
        )
    if asked not in _known:
        count = _count(asked.type)
        if count == 0:
            raise ValueError(
                f"device {device!r} does not exist: torch finds no {asked.type!r} device; pass {AUTO!r} "
                "for the CPU where there is none"
            )
        if asked.index is not None and asked.index >= count:
            raise ValueError(
                f"device {device!r} does not exist: torch finds {count} {asked.type!r} device(s); pass an "
                f"index below {count}"
            )
        _known.add(asked)
    return asked


def current_accelerator() -> torch.device | None:
    """Returns the current accelerator of this torch, whether or not there is one in this machine."""
    try:
        return torch.accelerator.current_accelerator()
    except RuntimeError:
        # Older ones raise where there is none.
        return None


def _count(kind: str) -> int:
    """Returns the number of devices, as the device's own module counts them.

    The module can count without the driver. All other ways ask the driver, and then forked children, which
    workers are, cannot use the device.
    """
    return int(torch.get_device_module(kind).device_count())


def _is_in_bad_fork(kind: str) -> bool:
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


@contextlib.contextmanager
def stream_context(stream: torch.Stream) -> Generator[None]:
    """Makes a stream, and its device, the current ones of this thread.

    ``with stream`` would keep the streams that were current before on the stream object, where threads and
    nested entries overwrite each other's. torch 2.6 does not have it.
    """
    device = torch.accelerator.current_device_index()
    before = torch.accelerator.current_stream(stream.device)
    try:
        # Inside the `try`: an interrupt after this call must not leave it set.
        torch.accelerator.set_stream(stream)
        yield
    finally:
        # Each call sets the device too.
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(device)


def device_in_bad_fork() -> str | None:
    """A device that was initialised in the process from which this one was forked, and is unusable here."""
    accelerator = current_accelerator()
    return accelerator.type if accelerator is not None and _is_in_bad_fork(accelerator.type) else None
