"""What torch's iterator takes for queues and an event: the main process's ends of the transport.

The parent's ends are made by the transport, which torch's iterator takes for the loader's
``multiprocessing_context``.
"""

from __future__ import annotations

import collections
import queue
import threading
from collections.abc import Callable
from typing import Any

import ringloader._native as _native

# The parent's ends: over shared memory, and between threads.
Ends = _native.Engine | _native.ThreadQueues


class TaskQueue:
    """The parent's end of one worker's tasks, as torch's iterator uses a queue."""

    def __init__(self, engine: Ends, worker: int) -> None:
        self._engine = engine
        self.worker = worker
        # Whether torch's final signal was sent: the worker's end is no failure then.
        self.ended = False
        # INVARIANT: of two calls, the one with the lower tag is sent first.
        self._lock = threading.RLock()
        self._tag = 0

    def put(self, message: object) -> None:
        """Sends a message without ever waiting."""
        self._engine.put(self.worker, message)
        self.ended = self.ended or message is None

    def call(self, callable_object: object) -> None:
        """Has the worker call it, in its turn among the messages; nothing answers it here. Never waits."""
        if isinstance(self._engine, _native.ThreadQueues):
            self._engine.put(self.worker, callable_object)
        else:
            self._engine.put_call(self.worker, callable_object)

    def call_with(self, fd: int, make: Callable[[int], object]) -> bool:
        """As :meth:`call`, to a worker process, with a descriptor beside it, which stays the caller's.

        Args:
            fd: The descriptor.
            make: Makes what is called, of the tag by which the worker takes the descriptor.

        Returns:
            Whether it was sent: the worker may have to take others before.
        """
        assert isinstance(self._engine, _native.Engine)
        with self._lock:
            self._tag += 1
            if not self._engine.send_fd(self.worker, fd, self._tag):
                return False
            self._engine.put_call(self.worker, make(self._tag))
            return True

    def cancel_join_thread(self) -> None:
        """Does nothing: there is no thread."""

    def close(self) -> None:
        """Does nothing: the transport is closed as a whole."""


class RememberingTaskQueue(TaskQueue):
    """One that knows the last ``most`` tasks, for errors that name them."""

    def __init__(self, engine: Ends, worker: int, most: int) -> None:
        super().__init__(engine, worker)
        self._sent: collections.deque[tuple[int, Any]] = collections.deque(maxlen=most)

    def put(self, message: object) -> None:
        """Sends a message, and keeps it if it is a task."""
        super().put(message)
        if isinstance(message, tuple):
            self._sent.append(message)

    def index_of(self, number: int) -> Any:
        """The index of the task of that number; None if it is not known."""
        return next((index for sent, index in reversed(self._sent) if sent == number), None)


class ResultQueue:
    """The parent's end of all results, as torch's iterator and pin thread use a queue."""

    def __init__(self, engine: Ends, note_end: Callable[[int], bool]) -> None:
        self._engine = engine
        # Looks at a worker whose process has ended. Returns whether it should not have.
        self._note_end = note_end
        self._local: collections.deque[object] = collections.deque()

    def put(self, message: object) -> None:
        """Wakes the thread that is in :meth:`get` with a message of the main process's own."""
        self._local.append(message)
        self._engine.wake()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Takes the next result.

        Raises:
            queue.Empty: When there is none in time, or a worker has ended: the caller looks which.
        """
        while True:
            if self._local:
                return self._local.popleft()
            found = self._engine.next(timeout if block else 0.0)
            if found is None:
                if self._local:
                    continue
                raise queue.Empty
            if not isinstance(found, _native.WorkerEnded):
                return found
            if self._note_end(found.worker):
                raise queue.Empty

    def qsize(self) -> int:
        """Results that are there."""
        return len(self._local) + self._engine.committed()

    def empty(self) -> bool:
        """Whether none is there."""
        return self.qsize() == 0

    def cancel_join_thread(self) -> None:
        """Does nothing: there is no thread."""

    def close(self) -> None:
        """Does nothing: the transport is closed as a whole."""


class DoneEvent:
    """The event by which torch's iterator ends its workers."""

    def __init__(self, engine: Ends) -> None:
        self._engine = engine

    def set(self) -> None:
        """Sets it and wakes the workers."""
        self._engine.set_done()

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._engine.is_done()
