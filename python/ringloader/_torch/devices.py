"""The device that an option means, and a check that it is there. No device is initialised for it."""

from __future__ import annotations

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
    accelerator = _accelerator()
    if device == AUTO:
        if accelerator is None or _count(accelerator.type) == 0 or _is_in_bad_fork(accelerator.type):
            return None
        return accelerator
    if not isinstance(device, int):
        try:
            asked = torch.device(device)
        except RuntimeError as error:
            what = str(error).splitlines()[0]
            raise ValueError(f"device {device!r} is none that torch knows, nor {AUTO!r}: {what}") from None
        if asked.type == "cpu":
            return None
    elif accelerator is None:
        raise ValueError(
            f"device {device} is not there: torch has no accelerator here; pass {AUTO!r} or None"
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
                f"device {device!r} is not there: torch finds no {asked.type!r} device; pass {AUTO!r} "
                "for the CPU where there is none"
            )
        if asked.index is not None and asked.index >= count:
            raise ValueError(
                f"device {device!r} is not there: torch finds {count} {asked.type!r} device(s); pass an "
                f"index below {count}"
            )
        _known.add(asked)
    return asked


def _accelerator() -> torch.device | None:
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
