"""The batches and stacks of workers that are threads, as the interpreter tells them."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from textwrap import indent
from typing import Any

from ringloader._options import overdue
from ringloader._options.overdue import Late
from ringloader._worker import loop
from ringloader._worker.options import Fetcher, WorkerOption


class Notes(WorkerOption):
    """Notes since when each thread is in which batch. Its copies share the notes."""

    def __init__(self) -> None:
        # By thread: since when it is in which batch; None while it is in none.
        self._notes: dict[int, tuple[float, Any] | None] = {}

    def wrap(self, fetcher: Fetcher) -> Fetcher:
        return _Noting(fetcher, self._notes)

    def has_begun(self, thread: int | None) -> bool:
        """True if a thread has begun a batch."""
        return thread in self._notes

    def of(self, thread: int | None) -> tuple[float, Any] | None:
        """Returns since when a thread is in a batch, and the batch's index; None if it is in none."""
        return None if thread is None else self._notes.get(thread)


class _Noting:
    """Notes when the fetcher is asked, and when it has answered."""

    def __init__(self, fetcher: Fetcher, notes: dict[int, tuple[float, Any] | None]) -> None:
        self._fetcher = fetcher
        self._notes = notes

    def fetch(self, index: Any, /) -> Any:
        thread = threading.get_ident()
        self._notes[thread] = time.monotonic(), index
        try:
            return self._fetcher.fetch(index)
        finally:
            self._notes[thread] = None


class Threads:
    """Workers that are threads.

    Args:
        notes: What they note; None if they do not.
    """

    def __init__(self, notes: Notes | None) -> None:
        self._notes = notes

    def owed(self, late: Late, thread: Any, is_turn: bool) -> str:
        which, number, index = late
        if not is_turn and self._notes is not None:
            # Batches that it has made wait for their turn, which do not tell which comes next.
            noted = self._notes.of(thread.ident)
            if noted is not None:
                number, index = None, noted[1]  # type: ignore[assignment]
        return f"worker thread {which} owes {overdue.batch(number, index)}"

    def is_in_batch(self, _number: int, thread: Any) -> bool:
        notes = self._notes
        return notes is None or not notes.has_begun(thread.ident) or notes.of(thread.ident) is not None

    def describe(self, _number: int, thread: Any, _until: float) -> str:
        parts = [] if thread.is_alive() else ["has ended"]
        noted = None if self._notes is None else self._notes.of(thread.ident)
        if noted is not None:
            parts.append(f"has been making a batch for {max(time.monotonic() - noted[0], 0.0):.1f} s")
        frame = sys._current_frames().get(thread.ident)
        if frame is None:
            return " and ".join([*parts, "has no stack"])
        calls = list(reversed(traceback.extract_stack(frame)))
        # Beneath the loop are the calls of the thread's start.
        in_loop = [at for at, call in enumerate(calls) if call.filename == loop.__file__]
        text = "".join(traceback.format_list(calls[: max(in_loop) + 1] if in_loop else calls))
        what = " and ".join(parts) or "runs"
        return f"{what}\n  Stack of the thread (most recent call first):\n{indent(text.rstrip(), '  ')}"

    def close(self) -> None:
        """Does nothing: there is nothing to give back."""
