"""The main function of a process of a pool: one iterator's worker after another."""

from __future__ import annotations

import gc
import signal
import warnings
import weakref
from typing import Any

from ringloader._pool.assignments import Assignments
from ringloader._pool.state import Held, ProcessState
from ringloader._worker import entry


class _Interrupts:
    """``SIGINT``: a process that waits ignores it; one that works ends by it, as torch's worker does."""

    def __init__(self) -> None:
        self.came = False
        self._before = signal.getsignal(signal.SIGINT)

    def ignore(self) -> None:
        # A handler that C code has set stays.
        if self._before is not None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def heed(self) -> None:
        if self._before is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
        elif self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: Any) -> None:
        self.came = True
        signal.default_int_handler(number, frame)


def main(assignments: Assignments, inherited: dict[int, Any]) -> None:
    """Works until the pool, or its process, ends.

    Args:
        assignments: This process's end of what the main process sends.
        inherited: What a forked process holds from the beginning, by number.
    """
    assignments.begin()
    held = Held()
    held.put(inherited.items())
    inherited.clear()
    interrupts = _Interrupts()
    interrupts.ignore()
    state = ProcessState()
    trim = _nothing
    while True:
        assignment = assignments.next(held, trim)
        if assignment is None:
            return
        worker_end, work = assignment
        del assignment
        port = entry.attach(worker_end)
        interrupts.heed()
        # An error that the worker loop does not catch ends the process, as it ends torch's worker.
        with warnings.catch_warnings():
            trim = entry.run_at(port, worker_end, work).trim
        interrupts.ignore()
        del work
        if interrupts.came or port.parent_ended:
            # The loop was not told to end. Also in a child of the dataset's that has come back to it.
            return
        state.restore()
        held.restore()
        is_free, unmapped = port.leave(), weakref.ref(port)
        del port, worker_end
        if is_free and unmapped() is not None:
            # In a cycle, such as that of an error and its traceback.
            gc.collect()
        # INVARIANT: the main process uses the memory again once it is told that this one has left.
        # A dataset that keeps what was collated keeps the memory: the process ends instead.
        if not is_free or unmapped() is not None or not assignments.say_left():
            return


def _nothing() -> None:
    pass
