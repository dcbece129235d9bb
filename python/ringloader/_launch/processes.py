"""Process objects, as torch's iterator starts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


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
