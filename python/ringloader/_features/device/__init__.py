"""``device=``: batches on a device."""

from __future__ import annotations

from typing import Any

from ringloader._features import rules
from ringloader._features.rules import of_options, option

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
