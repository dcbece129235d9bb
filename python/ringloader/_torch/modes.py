"""The modes of a thread, which have a say in what torch's functions do, for code that runs elsewhere."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.overrides

from ringloader._torch import devices, internals

# torch's counts of the modes that have a say in what its functions do, and its answers to the question if
# `torch.jit.trace` or `torch.func` has one.
MODES = [
    getattr(torch._C, name)
    for name in (
        "_len_torch_function_stack",
        "_len_torch_dispatch_stack",
        "_is_tracing",
        "_are_functorch_transforms_active",
    )
    if hasattr(torch._C, name)
]

_pop_function_mode: Any = getattr(torch.overrides, "_pop_mode_temporarily", None)


def is_in_modes() -> bool:
    """True if modes, a trace or a transform of this thread have a say in what torch's functions do."""
    return any(count() for count in MODES)


@contextlib.contextmanager
def without_modes() -> Generator[None]:
    """Runs a block as in a thread of its own: no mode, nor default device, has a say in torch's functions."""
    with contextlib.ExitStack() as stack:
        while _pop_function_mode and internals.len_torch_function_stack():
            stack.enter_context(_pop_function_mode())
        stack.enter_context(internals.without_dispatch_modes())
        yield


class CallerModes:
    """Gradients, autocast and the default device, as they are in this thread when it is made.

    Inference mode is left out: what is made in it, code outside of it cannot use. There are no gradients
    in it.

    Args:
        kind: The type of the device whose autocast counts, beside the CPU's; None: the CPU's alone.
    """

    def __init__(self, kind: str | None) -> None:
        self._has_grad = torch.is_grad_enabled()
        self._autocast = {one: _autocast(one) for one in (kind, "cpu") if one is not None}
        self._default_device = _default_device_of_thread()

    @contextlib.contextmanager
    def entered(self) -> Generator[None]:
        """Enters these in this thread, and leaves its own."""
        with contextlib.ExitStack() as stack:
            if is_in_modes():
                stack.enter_context(without_modes())
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


class OfThread:
    """State that a forked process takes over from the thread that forks it, and a new thread does not.

    This state is inference mode, the :class:`CallerModes`, and the context of Python's ``contextvars``, which
    includes numpy's ``errstate``. Other modes are left out: their objects are not made for several threads.
    """

    def __init__(self) -> None:
        accelerator = devices.current_accelerator()
        self._context = contextvars.copy_context()
        self._is_inference = torch.is_inference_mode_enabled()
        self._modes = CallerModes(None if accelerator is None else accelerator.type)

    def run(self, function: Callable[..., object], *args: Any) -> None:
        """Calls ``function`` in another thread, once, as if it had been forked there."""
        self._context.run(self._run, function, *args)

    def _run(self, function: Callable[..., object], *args: Any) -> None:
        # Only where it is on: the guard that turns it off turns gradients on.
        inference = torch.inference_mode() if self._is_inference else contextlib.nullcontext()
        with self._modes.entered(), inference:
            function(*args)


def _autocast(kind: str) -> tuple[torch.dtype, bool] | None:
    """Returns the dtype of a device's autocast in this thread, and if it keeps casts; None if it is off."""
    try:
        if torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
    except RuntimeError:
        # A device without autocast.
        pass
    return None


def _default_device_of_thread() -> torch.device | None:
    """The default device of this thread. ``torch.get_default_device`` would initialise it."""
    # Not above: this module is imported by torch's path too, for a torch without it.
    from torch.utils._device import DeviceContext

    stack: Any = getattr(torch.overrides, "_get_current_function_mode_stack", list)
    devices = (mode.device for mode in reversed(stack()) if isinstance(mode, DeviceContext))
    return next(devices, None)
