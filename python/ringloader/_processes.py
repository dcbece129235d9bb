"""Worker processes: how they get their end of the transport, and what they run."""

from __future__ import annotations

import atexit
import enum
import os
import queue
from collections.abc import Callable, Iterable
from multiprocessing import reduction
from typing import Any

import numpy
import torch

from ringloader import _collation, _forks, _heap, _moved, _native, _seam

# A worker that has waited as long for a task is idle. Not more than torch's loop allows.
_IDLE_SECONDS = 0.1

# A thread that waits or copies natively when the interpreter goes must not come back to it. Nor in a spawned
# worker, whose dataset may have threads.
if _native.SUPPORTED:
    atexit.register(_native.note_exit)
    _moved.keep_views()


class Seat(enum.Enum):
    """Stands for an end of the transport among the arguments of torch's worker loop."""

    TASKS = enum.auto()
    RESULTS = enum.auto()
    DONE = enum.auto()


class Berth:
    """A worker's place in the transport, on its way to the worker.

    A forked worker inherits mapping and descriptors; to any other the descriptors are sent, which
    ``multiprocessing`` allows only while the process is being started.
    """

    def __init__(self, engine: _native.Engine, worker: int) -> None:
        self._engine = engine
        self._worker = worker

    @property
    def share(self) -> int:
        """Bytes of shared memory that are this worker's."""
        return self._engine.share

    def board(self) -> _native.Port:
        """The worker's end, in the worker."""
        return _native.Port.inherit(self._engine, self._worker)

    def __reduce__(self) -> tuple[Any, ...]:
        sent = [reduction.DupFd(fd) for fd in self._engine.worker_fds(self._worker)]
        return _SentBerth, (sent, self._worker, self.share)


class _SentBerth:
    def __init__(self, sent: list[Any], worker: int, share: int) -> None:
        self._sent = sent
        self._worker = worker
        self.share = share

    def board(self) -> _native.Port:
        fds = [sent.detach() for sent in self._sent]
        try:
            return _native.Port.attach(fds, self._worker, self.share)
        finally:
            for fd in fds:
                os.close(fd)


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


class _Done:
    """The event, as torch's worker loop sees it: also set once the parent has ended."""

    def __init__(self, port: _native.Port) -> None:
        self._port = port

    def is_set(self) -> bool:
        return self._port.is_done()


class _Tasks:
    """The task queue, as torch's worker loop sees it."""

    def __init__(self, port: _native.Port, heap: _heap.Trimming) -> None:
        self._port = port
        self._heap = heap

    def get(self, timeout: float | None = None) -> Any:
        task = self._port.get(_IDLE_SECONDS)
        if task is None and not self._port.parent_ended:
            task = self._get_idle(timeout)
        if task is not None:
            self._heap.note_task()
            return task[0]
        if self._port.parent_ended:
            # With the event set, this is the loop's way out that says nothing.
            return None
        raise queue.Empty

    def _get_idle(self, timeout: float | None) -> Any:
        """Waits for longer, and gives back meanwhile what the allocator keeps."""
        pause = self._heap.until_trim()
        if timeout is not None and timeout <= pause:
            return self._port.get(timeout)
        task = self._port.get(pause)
        if task is None and not self._port.parent_ended:
            self._heap.trim()
            task = self._port.get(None if timeout is None else timeout - pause)
        return task


class _Results:
    """The result queue, as torch's worker loop sees it."""

    def __init__(self, port: _native.Port, where: str) -> None:
        self._port = port
        self._where = where

    def put(self, message: object) -> None:
        """Commits a message. Never raises but to end the worker: the loop does not expect it."""
        try:
            self._port.put(message)
        except Exception as error:
            if not isinstance(message, tuple):
                raise
            # What cannot be sent becomes an error of its task, raised where the batch is asked for.
            try:
                self._port.put((message[0], self._wrapped()))
            except Exception:
                self._put_text(message[0], error)

    def _wrapped(self) -> object:
        wrapped: object = _seam.ExceptionWrapper(where=self._where)
        return wrapped

    def _put_text(self, index: object, error: Exception) -> None:
        """For an error whose own type cannot be sent either."""
        try:
            raise RuntimeError(f"a batch could not be sent: {type(error).__name__}: {error}") from None
        except RuntimeError:
            self._port.put((index, self._wrapped()))

    def cancel_join_thread(self) -> None:
        pass

    def close(self) -> None:
        pass


def run_worker(berth: Berth | _SentBerth, target: Callable[..., None], args: Iterable[Any]) -> None:
    """Runs torch's worker loop at a worker's end of the transport. The main function of a worker process."""
    _forks.tell_native()
    port = berth.board()
    heap = _heap.Trimming(_heap.keep_freed(berth.share))
    _collate_into_slots(port)
    _collation.replace_collate(port)
    worker = berth._worker
    ends = {
        Seat.TASKS: _Tasks(port, heap),
        Seat.RESULTS: _Results(port, f"in DataLoader worker process {worker}"),
        Seat.DONE: _Done(port),
    }
    target(*(ends[arg] if isinstance(arg, Seat) else _collation.native(arg) for arg in args))


def _collate_into_slots(port: _native.Port) -> None:
    """Lets who allocates shared memory for a batch write into the slot: torch's collate, and PyG's."""

    def make(torchs_own: Callable[..., Any]) -> Callable[..., Any]:
        def _new_shared(cls: Any, size: int, *, device: Any = "cpu") -> Any:
            if torch.device(device).type == "cpu":
                storage = port.new_storage(size)
                return _private_storage(size) if storage is None else storage
            return torchs_own(cls, size, device=device)

        return _new_shared

    _seam.replace_new_shared(make)


def _private_storage(size: int) -> Any:
    """Memory of the worker's own, copied when it is sent; as little resizable as shared memory is."""
    return torch.from_numpy(numpy.empty(size, numpy.uint8)).untyped_storage()
