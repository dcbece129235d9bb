"""State that an iterator's code may change in a pool's process, and the next iterator must not see."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from ringloader._common import worker_port
from ringloader._torch import stand_ins
from ringloader._worker import watched


class ProcessState:
    """The state of this process as it is now, without seeds and threads: each worker sets them itself."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._directory = _directory()
        self._path = list(sys.path)
        self._handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._dtype = torch.get_default_dtype()
        self._grad = torch.is_grad_enabled()
        self._parts = stand_ins.WorkerParts()

    def restore(self) -> None:
        """Restores that state. Leaves out what C code changes by itself."""
        if dict(os.environ) != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)
        if self._directory is not None and _directory() != self._directory:
            os.chdir(self._directory)
        if sys.path != self._path:
            sys.path[:] = self._path
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._handlers.items():
            # A handler that C code has set cannot be set from here.
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        torch.set_default_dtype(self._dtype)
        torch.set_grad_enabled(self._grad)
        self._parts.restore()
        worker_port.port = None
        watched.forget()


def _directory() -> Path | None:
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None
