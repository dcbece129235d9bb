"""Modes of a caller, for code of the user's that runs in another call than the one it belongs to."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch
import torch.overrides
from torch.utils._device import DeviceContext

from ringloader._torch import modes


class CallerModes:
    """Gradients, autocast and the default device, as they are in this thread when it is made.

    Inference mode is left out: what is made in it, code outside of it cannot use. There are no gradients
    in it.

    Args:
        kind: The type of the device whose autocast counts, beside the CPU's.
    """

    def __init__(self, kind: str) -> None:
        self._has_grad = torch.is_grad_enabled()
        self._autocast = {kind: _autocast(kind), "cpu": _autocast("cpu")}
        self._default_device = _default_device()

    @contextlib.contextmanager
    def entered(self) -> Generator[None]:
        """Enters these in this thread, and leaves its own."""
        with contextlib.ExitStack() as stack:
            if modes.is_in_modes():
                stack.enter_context(modes.without_modes())
            if torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(self._has_grad))
            for kind, wanted in self._autocast.items():
                if wanted == _autocast(kind):
                    continue
                if wanted is None:
                    stack.enter_context(torch.autocast(kind, enabled=False))
                else:
                    dtype, caches = wanted
                    stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=caches))
            if self._default_device is not None:
                stack.enter_context(self._default_device)
            yield


def _autocast(kind: str) -> tuple[torch.dtype, bool] | None:
    """Returns the dtype of a device's autocast in this thread, and if it keeps casts; None if it is off."""
    try:
        if torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
    except RuntimeError:
        # A device without autocast.
        pass
    return None


def _default_device() -> torch.device | None:
    """The default device of this thread. ``torch.get_default_device`` would initialise it."""
    stack: Any = getattr(torch.overrides, "_get_current_function_mode_stack", list)
    devices = (mode.device for mode in reversed(stack()) if isinstance(mode, DeviceContext))
    return next(devices, None)
