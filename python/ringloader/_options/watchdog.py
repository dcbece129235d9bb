"""``watchdog=``: says after so many seconds without a batch what workers are doing, as timeouts do too."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from textwrap import indent
from typing import Any, Protocol

from ringloader._log import logger
from ringloader._options import overdue, stacks
from ringloader._options.overdue import Late
from ringloader._worker import loop
from ringloader._worker.options import Fetcher, WorkerOption
from ringloader._worker.placed import Placed

# Workers that a message describes at most.
_MOST_WORKERS = 8


class Watched(Protocol):
    """Descriptions of what workers do: processes or threads."""

    def describe(self, worker: int, process: Any, until: float, /) -> str:
        """Describes one worker, over several lines. Does not wait for an answer after ``until``."""

    def is_in_batch(self, worker: int, process: Any, /) -> bool:
        """True if the worker makes a batch, or has not come to its first one."""

    def owed(self, late: Late, process: Any, is_turn: bool, /) -> str:
        """Describes the batch that the worker owes."""

    def close(self) -> None:
        """Gives back what it has."""


class Watchdog:
    """The watchdog of one iterator.

    Args:
        seconds: After how long a wait is said; None: only errors of timeouts say it.
        watched: What its workers are doing; None: that cannot be had.
        turn_is_known: Whether the first of those that owe a batch is the one whose turn it is.
    """

    def __init__(self, seconds: float | None, watched: Watched | None, turn_is_known: bool) -> None:
        self.seconds = seconds
        self._watched = watched
        self._turn_is_known = turn_is_known

    def say(self, seconds: float, workers: Sequence[Any], owing: Iterable[Late]) -> None:
        """Logs what the workers do that owe a batch, for which the iterator has waited so long."""
        until = time.monotonic() + stacks.ANSWER_SECONDS
        watched = self._watched
        texts = []
        if watched is None:
            for late in owing:
                texts.append(f"worker {late[0]} (pid {workers[late[0]].pid}) owes {overdue.batch(*late[1:])}")
        else:
            all_owing = [(late, at == 0 and self._turn_is_known) for at, late in enumerate(owing)]
            named = [
                (late, is_turn)
                for late, is_turn in all_owing
                if is_turn or watched.is_in_batch(late[0], workers[late[0]])
            ]
            # Else they are in none: in `worker_init_fn`, say, or in the dataset's `__iter__`.
            for late, is_turn in named or all_owing:
                worker, process = late[0], workers[late[0]]
                owed = watched.owed(late, process, is_turn)
                texts.append(f"{owed}; {watched.describe(worker, process, until)}")
        more = len(texts) - _MOST_WORKERS
        if more > 0:
            texts[_MOST_WORKERS:] = [f"and {more} other workers owe batches"]
        what = "\n".join(texts) or "no worker owes one"
        logger.warning("DataLoader has waited %.1f s for a batch:\n%s", seconds, what)

    def add_notes(self, error: BaseException, workers: Sequence[Any], late: Iterable[Late]) -> None:
        """Adds the same descriptions of late workers to the error of a timeout."""
        until = time.monotonic() + stacks.ANSWER_SECONDS
        if self._watched is None:
            return
        for worker, *_ in list(late)[:_MOST_WORKERS]:
            error.add_note(f"worker {worker} {self._watched.describe(worker, workers[worker], until)}")

    def close(self) -> None:
        """Gives back what it has."""
        if self._watched is not None:
            self._watched.close()


class WatchedProcesses:
    """Workers that are processes."""

    def __init__(self, told: stacks.Stacks) -> None:
        self._told = told

    def owed(self, late: Late, process: Any, is_turn: bool) -> str:
        del is_turn
        return f"worker {late[0]} (pid {process.pid}) owes {overdue.batch(*late[1:])}"

    def is_in_batch(self, worker: int, process: Any) -> bool:
        return not self._told.has_begun(worker, process.pid) or (
            self._told.seconds_in_batch(worker, process.pid) is not None
        )

    def describe(self, worker: int, process: Any, until: float) -> str:
        pid = process.pid
        parts = [stacks.state_in_words(pid)]
        if self._told.notes:
            seconds = self._told.seconds_in_batch(worker, pid)
            if seconds is not None:
                parts.append(f"has been making a batch for {seconds:.1f} s")
            elif self._told.has_begun(worker, pid):
                parts.append("makes no batch at this moment")
            else:
                parts.append("has not come to its loop")
        return f"{' and '.join(parts)}\n{indent(self._told.stack(worker, pid, until), '  ')}"

    def close(self) -> None:
        self._told.close()


def watch_processes(
    workers: int, seconds: float | None, turn_is_known: bool
) -> tuple[Watchdog, Sequence[WorkerOption]]:
    """The watchdog of an iterator, and the options of its workers that it needs.

    Args:
        workers: How many there are.
        seconds: After how long a wait is said; None: only errors of timeouts say it.
        turn_is_known: Whether batches come in their order.
    """
    try:
        told = stacks.Stacks(workers, notes=seconds is not None)
    except OSError as error:
        # The file of a stack is no reason not to begin.
        logger.debug("no stacks of workers can be had: %s", error)
        return Watchdog(seconds, None, turn_is_known), ()
    return Watchdog(seconds, WatchedProcesses(told), turn_is_known), (told.option,)


class ThreadNotes(WorkerOption):
    """Notes since when each thread is in which batch. Its copies share the notes."""

    def __init__(self) -> None:
        # By thread: since when it is in which batch; None while it is in none.
        self._notes: dict[int, tuple[float, Any] | None] = {}

    def wrap(self, fetcher: Fetcher) -> Fetcher:
        return _NotingFetcher(fetcher, self._notes)

    def has_begun(self, thread: int | None) -> bool:
        """True if a thread has begun a batch."""
        return thread in self._notes

    def of(self, thread: int | None) -> tuple[float, Any] | None:
        """Returns since when a thread is in a batch, and the batch's index; None if it is in none."""
        return None if thread is None else self._notes.get(thread)


class _NotingFetcher:
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


class WatchedThreads:
    """Workers that are threads.

    Args:
        notes: What they note; None if they do not.
    """

    def __init__(self, notes: ThreadNotes | None) -> None:
        self._notes = notes

    def owed(self, late: Late, thread: Any, is_turn: bool) -> str:
        which, number, index = late
        if not is_turn and self._notes is not None:
            # Batches that it has made wait for their turn, which do not tell which comes next.
            noted = self._notes.of(thread.ident)
            if noted is not None:
                number, index = None, noted[1]  # type: ignore[assignment]
                index = index.index if isinstance(index, Placed) else index
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
