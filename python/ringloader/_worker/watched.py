"""A worker that is watched: it notes since when it is in the dataset, and writes its stack when it is asked.

All workers of an iterator share one memory file: a record for each, and behind these, the text of one stack.
A handler of ``faulthandler`` writes that, also where the worker has the interpreter lock in native code.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import time
from multiprocessing import reduction
from typing import Any

import ringloader._native as _native
from ringloader._common import proc
from ringloader._worker.options import Fetcher, WorkerOption

# Numbers of a worker's record: its process, when that began, the signal that asks it, and the nanoseconds of
# the monotonic clock at which it began what it is in. 0: not yet, or in nothing.
PID, START, SIGNAL, SINCE = range(4)
_NUMBERS = 8


class Records:
    """The records of all workers, in this process.

    Args:
        fd: The memory file, which stays the caller's.
        workers: How many there are.
    """

    def __init__(self, fd: int, workers: int) -> None:
        self._map = mmap.mmap(fd, records_len(workers))
        self._numbers = memoryview(self._map).cast("Q")

    def get(self, worker: int, number: int) -> int:
        return self._numbers[worker * _NUMBERS + number]

    def set(self, worker: int, number: int, value: int) -> None:
        self._numbers[worker * _NUMBERS + number] = value

    def clear(self, worker: int) -> None:
        for number in range(_NUMBERS):
            self.set(worker, number, 0)

    def close(self) -> None:
        self._numbers.release()
        self._map.close()


def records_len(workers: int) -> int:
    """Bytes of the records. The stack stands behind them."""
    return workers * _NUMBERS * 8


class Watched(WorkerOption):
    """Notes when the worker is in the dataset, if ``notes``, and makes it answer.

    Args:
        fd: The memory file; how to get it, on its way to a worker.
        workers: How many workers share it.
        notes: Whether each batch is noted.
    """

    def __init__(self, fd: Any, workers: int, notes: bool) -> None:
        self._fd = fd
        self._workers = workers
        self._notes = notes
        self._worker = 0
        self._records: Records

    def __reduce__(self) -> tuple[Any, ...]:
        return Watched, (reduction.DupFd(self._fd), self._workers, self._notes)

    def join(self, worker: int, port: _native.Port | None) -> None:  # noqa: ARG002
        """Has this process answer."""
        self._worker = worker
        fd = self._fd if isinstance(self._fd, int) else self._fd.detach()
        try:
            self._records = Records(fd, self._workers)
            _Answering.write_to(fd)
        finally:
            os.close(fd)
        # Clears the notes of a worker that was lost before.
        self._records.clear(worker)
        pid = os.getpid()
        self._records.set(worker, PID, pid)
        self._records.set(worker, START, proc.start_of(pid))
        # ORDERING: last. Nothing is asked before.
        self._records.set(worker, SIGNAL, _Answering.signal)

    def wrap(self, fetcher: Fetcher) -> Fetcher:
        # Behind `worker_init_fn`, which may have set a handler of its own.
        _Answering.check(self._records, self._worker)
        return _Noting(fetcher, self._records, self._worker) if self._notes else fetcher


class _Noting:
    """Notes when the fetcher is asked, and when it has answered."""

    def __init__(self, fetcher: Fetcher, records: Records, worker: int) -> None:
        self._fetcher = fetcher
        self._records = records
        self._worker = worker

    def fetch(self, index: Any, /) -> Any:
        self._records.set(self._worker, SINCE, time.monotonic_ns())
        try:
            return self._fetcher.fetch(index)
        finally:
            self._records.set(self._worker, SINCE, 0)
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
            if not cls.signal or proc.signals_of(pid).get("SigCgt", 0) & proc.bit(cls.signal):
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
    def check(cls, records: Records, worker: int) -> None:
        """Has a worker not be asked any more where the program has set a handler in place of this one."""
        # Python knows nothing of that of ``faulthandler``.
        if cls.signal and signal.getsignal(cls.signal) != signal.SIG_DFL:
            records.set(worker, SIGNAL, 0)

    @classmethod
    def write_to_nothing(cls) -> None:
        if cls._pid == os.getpid():
            nothing = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nothing, cls._fd, inheritable=False)
            os.close(nothing)


def forget() -> None:
    """Gives back the memory file of the iterator that this process has worked for."""
    _Answering.write_to_nothing()


def _free_signal() -> int:
    """A real-time signal that nothing in this process uses; 0 if there is none."""
    sets = proc.signals_of(os.getpid())
    if not {"SigCgt", "SigIgn", "SigBlk"} <= sets.keys():
        return 0
    used = sets["SigCgt"] | sets["SigIgn"] | sets["SigBlk"]
    # From above, because programs take them from below.
    candidates = reversed(range(signal.SIGRTMIN + 1, signal.SIGRTMAX))
    return next((number for number in candidates if not used & proc.bit(number)), 0)
