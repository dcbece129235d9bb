"""``watchdog=``: logs what workers do after some seconds without a batch; timeouts say the same."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Sequence
from textwrap import indent
from typing import TYPE_CHECKING, Any

import ringloader._native as _native
from ringloader._core.feature import Feature, Setup
from ringloader._features.losses import stacks
from ringloader._features.losses.samples import Around
from ringloader._log import logger
from ringloader._transport import overdue
from ringloader._transport.overdue import Late
from ringloader._worker import loop
from ringloader._worker.options import Fetcher, Position, WorkerOption

if TYPE_CHECKING:
    from ringloader._features.table import Options
    from ringloader._torch.protocols import TorchLoader

# Workers that a message describes at most.
_MOST_WORKERS = 8


def feature_for(loader: TorchLoader, options: Options, setup: Setup) -> Watchdog | None:
    """Returns the feature of ``watchdog``, and of ``timeout``, whose errors say the same."""
    if not setup.workers:
        return None
    turn_is_known = loader.in_order and options.worker_task != "sample"
    if setup.path == "native":
        return ProcessWatchdog(options.watchdog, turn_is_known, setup.workers)
    return (ThreadWatchdog if setup.path == "threads" else Watchdog)(options.watchdog, turn_is_known)


class Watchdog(Feature):
    """The watchdog of one iterator. This one knows of its workers only which batches they owe.

    Args:
        seconds: Seconds without a batch before a warning; None: only timeout errors describe workers.
        turn_is_known: True if batches come in order: the first worker that owes one is next.
    """

    def __init__(self, seconds: float | None, turn_is_known: bool) -> None:
        self._seconds = seconds
        self._turn_is_known = turn_is_known

    def schedule(self, scheduler: Any) -> None:
        """Makes the scheduler tell of waits."""
        if self._seconds is not None:
            scheduler.watch(self._seconds)

    def waits(self, seconds: float, workers: Sequence[Any], owing: Sequence[Late]) -> None:
        """Logs what the workers do that owe a batch, for which the iterator has waited so long."""
        until = time.monotonic() + stacks.ANSWER_SECONDS
        all_owing = [(late, at == 0 and self._turn_is_known) for at, late in enumerate(owing)]
        named = [
            (late, is_turn)
            for late, is_turn in all_owing
            if is_turn or self._is_in_batch(late[0], workers[late[0]])
        ]
        texts = []
        # A worker in no batch may be in `worker_init_fn`, or in the dataset's `__iter__`.
        for late, is_turn in named or all_owing:
            worker, handle = late[0], workers[late[0]]
            texts.append(self._owed(late, handle, is_turn))
            description = self._describe(worker, handle, until)
            if description is not None:
                texts[-1] += f"; {description}"
        more = len(texts) - _MOST_WORKERS
        if more > 0:
            texts[_MOST_WORKERS:] = [f"and {more} other workers owe batches"]
        what = "\n".join(texts) or "no worker owes one"
        logger.warning("DataLoader has waited %.1f s for a batch:\n%s", seconds, what)

    def late(self, error: BaseException, workers: Sequence[Any], late: Sequence[Late]) -> None:
        """Adds the same descriptions of late workers to the error of a timeout."""
        until = time.monotonic() + stacks.ANSWER_SECONDS
        for worker, *_ in late[:_MOST_WORKERS]:
            description = self._describe(worker, workers[worker], until)
            if description is not None:
                error.add_note(f"worker {worker} {description}")

    def _is_in_batch(self, _worker: int, _handle: Any) -> bool:
        """True if the worker makes a batch, or has not come to its first one."""
        return True

    def _owed(self, late: Late, handle: Any, _is_turn: bool) -> str:
        """Describes the batch that a worker owes."""
        return f"worker {late[0]} (pid {handle.pid}) owes {overdue.batch(*late[1:])}"

    def _describe(self, _worker: int, _handle: Any, _until: float) -> str | None:
        """Describes one worker, over several lines. Does not wait for an answer after ``until``."""
        return None


class ProcessWatchdog(Watchdog):
    """The watchdog of workers that are processes, which write their stacks when they are asked."""

    def __init__(self, seconds: float | None, turn_is_known: bool, workers: int) -> None:
        super().__init__(seconds, turn_is_known)
        self._workers = workers
        # None until the workers start, and where no memory is available.
        self._stacks: stacks.Stacks | None = None

    def attach(self, transport: Any) -> None:
        try:
            self._stacks = stacks.Stacks(self._workers, notes=self._seconds is not None)
            transport.add(self._stacks.option)
        except OSError as error:
            # The file of a stack is no reason not to begin.
            logger.debug("no stacks of workers can be had: %s", error)

    def _is_in_batch(self, worker: int, process: Any) -> bool:
        return (
            self._stacks is None
            or not self._stacks.has_begun(worker, process.pid)
            or (self._stacks.seconds_in_batch(worker, process.pid) is not None)
        )

    def _describe(self, worker: int, process: Any, until: float) -> str | None:
        if self._stacks is None:
            return None
        pid = process.pid
        parts = [stacks.state_in_words(pid)]
        if self._stacks.notes:
            seconds = self._stacks.seconds_in_batch(worker, pid)
            if seconds is not None:
                parts.append(f"has been making a batch for {seconds:.1f} s")
            elif self._stacks.has_begun(worker, pid):
                parts.append("makes no batch at this moment")
            else:
                parts.append("has not come to its loop")
        return f"{' and '.join(parts)}\n{indent(self._stacks.stack(worker, pid, until), '  ')}"

    def close(self) -> None:
        if self._stacks is not None:
            self._stacks.close()


# By thread: since when it is in which batch; None while it is in none.
_Notes = dict[int, tuple[float, Any] | None]


class ThreadNotes(WorkerOption):
    """Notes since when each thread is in which batch. Its copies share the notes."""

    position = Position.WATCH

    def __init__(self, notes: _Notes) -> None:
        self._notes = notes

    def wrap(self, fetcher: Fetcher) -> Fetcher:
        return Around(fetcher, self._begin, self._end)

    def _begin(self, index: Any) -> None:
        self._notes[threading.get_ident()] = time.monotonic(), index

    def _end(self) -> None:
        self._notes[threading.get_ident()] = None


class ThreadWatchdog(Watchdog):
    """The watchdog of workers that are threads. They record their batches if waits are logged."""

    def __init__(self, seconds: float | None, turn_is_known: bool) -> None:
        super().__init__(seconds, turn_is_known)
        self._notes: _Notes = {}

    def workers(self) -> Sequence[WorkerOption]:
        return () if self._seconds is None else (ThreadNotes(self._notes),)

    def _owed(self, late: Late, thread: Any, is_turn: bool) -> str:
        which, number, index = late
        noted = self._notes.get(thread.ident)
        if not is_turn and noted is not None:
            # Batches that it has made wait for their turn, which do not tell which comes next.
            if isinstance(noted[1], _native.Claimed):
                return f"worker thread {which} owes samples of {overdue.batch(number, index)}"
            index = noted[1].index if isinstance(noted[1], _native.Placed) else noted[1]
            return f"worker thread {which} owes {overdue.batch(None, index)}"
        return f"worker thread {which} owes {overdue.batch(number, index)}"

    def _is_in_batch(self, _worker: int, thread: Any) -> bool:
        return thread.ident not in self._notes or self._notes[thread.ident] is not None

    def _describe(self, _worker: int, thread: Any, _until: float) -> str:
        parts = [] if thread.is_alive() else ["has ended"]
        noted = self._notes.get(thread.ident)
        if noted is not None:
            parts.append(f"has been making a batch for {max(time.monotonic() - noted[0], 0.0):.1f} s")
        frame = sys._current_frames().get(thread.ident)
        if frame is None:
            return " and ".join([*parts, "has no stack"])
        calls = list(reversed(traceback.extract_stack(frame)))
        # Below the loop are the calls of the thread's start.
        in_loop = [at for at, call in enumerate(calls) if call.filename == loop.__file__]
        text = "".join(traceback.format_list(calls[: max(in_loop) + 1] if in_loop else calls))
        what = " and ".join(parts) or "runs"
        return f"{what}\n  Stack of the thread (most recent call first):\n{indent(text.rstrip(), '  ')}"
