"""``device=``: batches on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringloader._features import rules
from ringloader._features.rules import of_options, option

if TYPE_CHECKING:
    import torch

_AUTO = "auto"
# Devices that were found to be there.
_known: set[object] = set()
# torch takes a larger index of a device for another one.
_DEVICES = 128


def _check_device(name: str, value: Any) -> None:
    # Without importing torch.
    is_device = (type(value).__module__, type(value).__qualname__) == ("torch", "device")
    if value is None or isinstance(value, str) or is_device:
        return
    if not rules.is_int(value):
        raise TypeError(
            f"{name} must be a torch.device, a string ('cuda:0', or 'auto'), an index or None, not {value!r}"
        )
    if value < 0:
        raise ValueError(f"{name} must be an index of 0 or more, not {value}")
    if value >= _DEVICES:
        raise ValueError(f"{name} must be an index below {_DEVICES}, as torch has them, not {value}")


DEVICE = option(None, check=_check_device, in_worker="is left out", on_torchs="works")
DEVICE_PREFETCH = option(2, check=rules.integer(0), on_torchs="is left out")
DEVICE_TRANSFORM = option(
    None, check=rules.callable_or_none, in_worker="is left out", on_torchs="works", is_text=False
)

RULES = (
    of_options(
        "device_transform",
        "without `device`",
        lambda options: options.device is None,
        "device_transform needs device: pass the device that its batches are to be on",
    ),
)


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
    # Rows need no torch.
    import torch

    from ringloader._torch import devices

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
