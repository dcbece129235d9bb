"""The device that the option ``device`` means."""

from __future__ import annotations

import torch

from ringloader._torch import devices

_AUTO = "auto"
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
    accelerator = devices.current_accelerator()
    if device == _AUTO:
        if (
            accelerator is None
            or devices.count_of(accelerator.type) == 0
            or devices.is_in_bad_fork(accelerator.type)
        ):
            return None
        return accelerator
    if not isinstance(device, int):
        try:
            asked = torch.device(device)
        except RuntimeError as error:
            what = str(error).splitlines()[0]
            raise ValueError(f"device {device!r} is unknown to torch, and is not {_AUTO!r}: {what}") from None
        if asked.type == "cpu":
            return None
    elif accelerator is None:
        raise ValueError(
            f"device {device} does not exist: torch has no accelerator here; pass {_AUTO!r} or None"
        )
    else:
        asked = torch.device(accelerator.type, device)
    if accelerator is None or asked.type != accelerator.type:
        there = "there is none" if accelerator is None else f"which is {accelerator.type!r}"
        raise ValueError(
            f"device {device!r} is not of the current accelerator ({there}); pass {_AUTO!r} for that, and "
            "for the CPU where there is none"
        )
    if asked not in _known:
        count = devices.count_of(asked.type)
        if count == 0:
            raise ValueError(
                f"device {device!r} does not exist: torch finds no {asked.type!r} device; pass {_AUTO!r} "
                "for the CPU where there is none"
            )
        if asked.index is not None and asked.index >= count:
            raise ValueError(
                f"device {device!r} does not exist: torch finds {count} {asked.type!r} device(s); pass an "
                f"index below {count}"
            )
        _known.add(asked)
    return asked
