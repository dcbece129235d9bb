"""The state and the Python stack of a worker process, as it and the kernel tell them.

All workers of an iterator share one memory file: a record for each, and behind these, the text of one stack.
A worker notes since when it is in the dataset. A handler of ``faulthandler`` writes its stack when it is
asked, also where the worker has the interpreter lock in native code.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import ringloader._native as _native
from ringloader._common import proc
from ringloader._features.losses.samples import Around
from ringloader._features.shared_words import SharedWords
from ringloader._worker import entry
from ringloader._worker.options import EpochStart, Fetcher, Position, WorkerOption

# Numbers of a worker's record: its process, when that began, the signal that asks it, and the nanoseconds of
# the monotonic clock at which it began what it is in. 0: not yet, or in nothing.
_PID, _START, _SIGNAL, _SINCE = range(4)
_NUMBERS = 8
# Seconds for the answers of all workers that are asked at once.
ANSWER_SECONDS = 0.5
_POLL_SECONDS = 0.002
# Bytes that a stack may have.
_MOST_BYTES = 1 << 18

# The part of a line of ``faulthandler`` that stands for the caller of the worker loop.
_BENEATH = f'{entry.__file__}", line '

_STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "sleeps in the kernel, where no signal reaches it",
    "T": "was stopped by a signal",
    "t": "was stopped by a debugger",
    "Z": "has ended",
    "X": "has ended",
    "I": "is idle",
}
# States in which no handler runs until something else happens.
_ANSWERS_NOT = "DTtZX"


class Stacks:
    """Notes and stacks that the workers of an iterator write of themselves.

    Args:
        workers: How many there are.
        notes: True if they note each batch.

    Raises:
        OSError: If there is no memory, or no descriptor.
    """

    def __init__(self, workers: int, notes: bool) -> None:
        self._records = SharedWords.make("ringloader-watchdog", _NUMBERS, workers, behind=_MOST_BYTES)
        self._fd = self._records.fd
        # Keeps the memory while it is read: another thread may end the iterator.
        self._lock = threading.Lock()
        self._is_closed = False
        self.notes = notes
        self.option = Watched(self._records, notes)

    def seconds_in_batch(self, worker: int, pid: int) -> float | None:
        """Returns for how long a worker has been making a batch; None if it makes none."""
        with self._lock:
            since = self._records.get(worker, _SINCE) if self._is_of(worker, pid) else 0
        return max((time.monotonic_ns() - since) / 1e9, 0.0) if since else None

    def has_begun(self, worker: int, pid: int) -> bool:
        """True if the process has come to the start of the worker loop."""
        with self._lock:
            return self._is_of(worker, pid)

    def _is_of(self, worker: int, pid: int) -> bool:
        return not self._is_closed and self._records.get(worker, _PID) == pid

    def stack(self, worker: int, pid: int, until: float) -> str:
        """Returns a worker's Python stack, the innermost call first; or why there is none, in parentheses."""
        if proc.state_of(pid) in _ANSWERS_NOT:
            return "(no stack: it cannot answer)"
        with self._lock:
            if self._is_closed:
                return "(no stack: the iterator has ended)"
            number = self._records.get(worker, _SIGNAL)
            if not self._is_of(worker, pid):
                return "(no stack: the worker has not come to its loop)"
            # A worker may have written anything there.
            if not signal.SIGRTMIN < number < signal.SIGRTMAX:
                return "(no stack: no signal is left in the worker)"
            try:
                return self._ask(worker, pid, number, until)
            except OSError as error:
                return f"(no stack: {error})"

    def _ask(self, worker: int, pid: int, number: int, until: float) -> str:
        begin = self._records.nbytes
        # The workers share the position at which they write. It tells how much the answer is.
        os.lseek(self._fd, begin, os.SEEK_SET)
        asked = bit(number)
        # The number may become another process's.
        process = os.pidfd_open(pid)
        try:
            sets = signals_of(pid)
            if proc.start_of(pid) != self._records.get(worker, _START) or not sets.get("SigCgt", 0) & asked:
                # Another process, or another program: the signal would end it.
                return "(no stack: the worker has given up its handler)"
            if sets.get("SigBlk", 0) & asked or sets.get("ShdPnd", 0) & asked:
                return "(no stack: the worker blocks the signal that asks for it)"
            signal.pidfd_send_signal(process, number)
        finally:
            os.close(process)
        text = ""
        while time.monotonic() < until:
            text = self._written(begin)
            # The worker's handler blocks the signal while it writes.
            if text.endswith("\n") and not signals_of(pid).get("SigBlk", 0) & asked:
                break
            time.sleep(_POLL_SECONDS)
        return _of_loop(text) or f"(no stack: no answer within {ANSWER_SECONDS} s)"

    def _written(self, begin: int) -> str:
        size = os.lseek(self._fd, 0, os.SEEK_CUR) - begin
        # A worker may have set any position.
        return os.pread(self._fd, max(size, 0), begin).decode(errors="replace")

    def close(self) -> None:
        """Gives the memory back. No read may follow."""
        # With a limit: a signal handler may end the iterator in the midst of a question, and in a process
        # that was forked then nobody gives the lock back.
        is_held = self._lock.acquire(timeout=2 * ANSWER_SECONDS)
        self._is_closed = True
        self._records.close()
        if is_held:
            self._lock.release()


def _of_loop(text: str) -> str:
    """Returns a stack without the calls below the worker loop, which come from the start of the process."""
    return text.partition(_BENEATH)[0].rpartition("\n")[0] if _BENEATH in text else text.rstrip()


def state_in_words(pid: int) -> str:
    """Returns the state of a process, as the kernel knows it, in words."""
    return _STATES.get(proc.state_of(pid), "is in an unknown state")


class Watched(WorkerOption):
    """Notes when the worker is in the dataset, if ``notes``, and makes it answer.

    Args:
        records: The records of all workers.
        notes: True if each batch is noted.
    """

    position = Position.WATCH

    def __init__(self, records: SharedWords, notes: bool) -> None:
        self._records = records
        self._notes = notes
        self._worker = 0

    def join(self, worker: int, port: _native.Port | None, start: EpochStart) -> None:  # noqa: ARG002
        """Puts the handler with which this process answers."""
        self._worker = worker
        _Answering.write_to(self._records.fd)
        # Clears the notes of a worker that was lost before.
        for number in range(_NUMBERS):
            self._records.set(worker, number, 0)
        pid = os.getpid()
        self._records.set(worker, _PID, pid)
        self._records.set(worker, _START, proc.start_of(pid))
        # ORDERING: last. Nothing is asked before.
        self._records.set(worker, _SIGNAL, _Answering.signal)

    def leave_process(self) -> None:
        """Gives back the memory file of the iterator, to which the handler writes."""
        _Answering.write_to_nothing()
        self._records.close()

    def wrap(self, fetcher: Fetcher) -> Fetcher:
        # After `worker_init_fn`, which may have set a handler of its own.
        _Answering.check(self._records, self._worker)
        return Around(fetcher, self._begin, self._end) if self._notes else fetcher

    def _begin(self, _index: Any) -> None:
        self._records.set(self._worker, _SINCE, time.monotonic_ns())

    def _end(self) -> None:
        self._records.set(self._worker, _SINCE, 0)
        _Answering.check(self._records, self._worker)


class _Answering:
    """The handler of this process, and the descriptor that it writes to.

    INVARIANT: once there, it stays, so that a signal which comes late ends no process. In one that works for
    several iterators in turn, the descriptor is that of the last one's memory file, or of nothing.
    """

    signal = 0
    _fd = -1
    _pid = 0

    @classmethod
    def write_to(cls, fd: int) -> None:
        pid = os.getpid()
        if cls._pid == pid:
            os.dup2(fd, cls._fd, inheritable=False)
            if not cls.signal or signals_of(pid).get("SigCgt", 0) & bit(cls.signal):
                return
            # Code that worked here before has set another handler.
            faulthandler.unregister(cls.signal)
        else:
            # A process that this one has forked has its handler, and the number of its descriptor.
            cls._fd = os.dup(fd)
        cls._pid, cls.signal = pid, _free_signal()
        if cls.signal:
            # This thread alone: another one that runs may change its stack while it is read.
            try:
                faulthandler.register(cls.signal, file=cls._fd, all_threads=False, chain=False)
            except (OSError, RuntimeError):
                # A sandbox refuses what it needs. The worker is watched, without its stack.
                cls.signal = 0

    @classmethod
    def check(cls, records: SharedWords, worker: int) -> None:
        """Marks a worker as silent if the program has set a handler in place of this one."""
        # Python knows nothing of that of ``faulthandler``.
        if cls.signal and signal.getsignal(cls.signal) != signal.SIG_DFL:
            records.set(worker, _SIGNAL, 0)

    @classmethod
    def write_to_nothing(cls) -> None:
        if cls._pid == os.getpid():
            nothing = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nothing, cls._fd, inheritable=False)
            os.close(nothing)


def _free_signal() -> int:
    """A real-time signal that nothing in this process uses; 0 if there is none."""
    sets = signals_of(os.getpid())
    if not {"SigCgt", "SigIgn", "SigBlk"} <= sets.keys():
        return 0
    used = sets["SigCgt"] | sets["SigIgn"] | sets["SigBlk"]
    # From above, because programs take them from below.
    candidates = reversed(range(signal.SIGRTMIN + 1, signal.SIGRTMAX))
    return next((number for number in candidates if not used & bit(number)), 0)


def signals_of(pid: int) -> dict[str, int]:
    """The sets of signals in ``/proc/PID/status``; none if it cannot be read."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    fields = (line.partition(":") for line in lines if line.startswith(("Sig", "ShdPnd")))
    return {name: int(value, 16) for name, _, value in fields if name != "SigQ"}


def bit(number: int) -> int:
    """Returns the bit of a signal in such a set."""
    return 1 << (number - 1)
