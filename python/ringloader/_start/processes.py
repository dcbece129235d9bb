"""Process objects, as torch's iterator starts them, and one iterator's start at a time."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

# Seconds of a start's wait for the start of another thread, which may itself wait for this one.
_PATIENCE_S = 5.0
_starting = threading.RLock()


def _begin_anew() -> None:
    # In a forked child no other thread starts workers.
    global _starting
    _starting = threading.RLock()


os.register_at_fork(after_in_child=_begin_anew)


@contextlib.contextmanager
def one_start_at_a_time() -> Iterator[None]:
    """Keeps other threads from making iterators with worker processes, and from starting any, meanwhile.

    torch draws while it makes an iterator, without the interpreter lock. Its generator, and the C library
    where torch calls an operator for the first time, have locks: a worker that is forked at that moment would
    wait for them without end.
    """
    lock, is_held = _starting, False
    try:
        is_held = lock.acquire(timeout=_PATIENCE_S)
        yield
    finally:
        if is_held:
            lock.release()


def watched(process: Any, started: Callable[[int], None]) -> Any:
    """Has ``started`` called with the process id once ``process.start()`` has succeeded."""
    start = process.start

    def start_and_tell() -> None:
        # An instance attribute would travel with the process object to a spawned child.
        del process.start
        start()
        started(process.pid)

    process.start = start_and_tell
    return process


def kill(process: Any) -> None:
    """Ends a process that was started, whatever it is in, and waits for its end."""
    process.kill()
    process.join()
