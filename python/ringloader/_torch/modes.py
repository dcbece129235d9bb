"""The modes of a thread, which have a say in what torch's functions do."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch

from ringloader._torch import internals

# How many modes have a say in what torch's functions do.
_MODES = ("_len_torch_function_stack", "_len_torch_dispatch_stack")
MODES = [getattr(torch._C, name) for name in _MODES if hasattr(torch._C, name)]

_pop_function_mode: Any = getattr(torch.overrides, "_pop_mode_temporarily", None)


def is_in_modes() -> bool:
    """Whether modes of this thread have a say in what torch's functions do."""
    return any(count() for count in MODES)


@contextlib.contextmanager
def without_modes() -> Generator[None]:
    """As in a thread of its own: no mode, a default device neither, has a say in torch's functions."""
    with contextlib.ExitStack() as stack:
        while _pop_function_mode and internals.len_torch_function_stack():
            stack.enter_context(_pop_function_mode())
        stack.enter_context(internals.without_dispatch_modes())
        yield
