"""Starts of worker processes: one at a time, and where a fork server starts them, with torch imported."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from typing import Any

# Seconds of a start's wait for the start of another thread, which may itself wait for this one.
_PATIENCE_S = 5.0
_starting = threading.RLock()
# Modules that the fork server imports before it forks, so that not every worker must.
_PRELOADED = ["__main__", "torch", "numpy.random", "ringloader._worker.entry"]


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


def preload_fork_server(context: Any) -> None:
    """Has the fork server import torch, if it is still to be started.

    One server serves the whole process. Where it runs already, or the program has said what it imports
    (``multiprocessing.set_forkserver_preload``), nothing changes.

    No module of the user's: the server looks for it in other places than the program does, ends if the
    module's import raises, and would give what the module opens or draws to all workers alike.

    Args:
        context: The ``multiprocessing`` context that starts the workers.
    """
    if context.get_start_method() != "forkserver":
        return
    server = getattr(forkserver, "_forkserver", None)
    if getattr(server, "_forkserver_pid", 0) is None and _preloaded() == ["__main__"]:
        context.set_forkserver_preload(_PRELOADED)


def is_preload_the_programs() -> bool:
    """True if the program has said what the fork server imports."""
    return _preloaded() not in (["__main__"], _PRELOADED)


def _preloaded() -> list[str] | None:
    return getattr(getattr(forkserver, "_forkserver", None), "_preload_modules", None)
