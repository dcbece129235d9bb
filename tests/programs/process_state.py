"""The parts of a process that a test may change, and that the tests after it would find changed."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import signal
import sys
import threading
from multiprocessing import context
from pathlib import Path

import torch.multiprocessing
import torch.utils.data

# pytest writes the name of the test there; torch's compiler, where its cache is; torch 2.6, when it first
# looks for a device, how CUDA loads modules.
_OF_OTHERS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "CUDA_MODULE_LOADING"}
_LIMITS = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}


def of_this() -> dict[str, object]:
    """Returns the state of this process, by names."""
    state: dict[str, object] = {
        f"${name}": value for name, value in os.environ.items() if name not in _OF_OTHERS
    }
    # torch's handler of SIGCHLD stays after its first iterator with workers.
    numbers = signal.valid_signals() - {signal.SIGCHLD}
    state |= {f"handler of {number!r}": signal.getsignal(number) for number in numbers}
    state |= {name: resource.getrlimit(number) for name, number in _LIMITS.items()}
    return state | {
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "working directory": Path.cwd(),
        "process that is being started": context.get_spawning_popen(),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "sharing strategy": torch.multiprocessing.get_sharing_strategy(),  # type: ignore[no-untyped-call]
        "trace function": sys.gettrace(),
        "profile function": sys.getprofile(),
        "sys.excepthook": sys.excepthook,
        "sys.unraisablehook": sys.unraisablehook,
        "threading.excepthook": threading.excepthook,
        "sys.path": list(sys.path),
        "sys.meta_path": list(sys.meta_path),
        "collector": (gc.isenabled(), gc.get_threshold()),
        "switch interval": sys.getswitchinterval(),
        "recursion limit": sys.getrecursionlimit(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch's DataLoader": torch.utils.data.DataLoader,
    }


def changes(before: dict[str, object]) -> dict[str, tuple[object, object]]:
    """Returns the values before and now of all that differs; None for what was or is not there."""
    now = of_this()
    names = before.keys() | now.keys()
    return {name: (before.get(name), now.get(name)) for name in names if before.get(name) != now.get(name)}
