"""A worker process's end of the rings: on its way to the process, and as the worker loop uses it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from multiprocessing import reduction
from typing import Any

import ringloader._native as _native
from ringloader._torch import internals
from ringloader._worker import malloc
from ringloader._worker.options import WorkerOption

# A worker that has waited as long for a task is idle.
_IDLE_SECONDS = 0.1


class WorkerEndpoint:
    """A worker's end of the transport, on its way to the worker.

    A forked worker inherits mapping and descriptors; to any other the descriptors are sent, which
    ``multiprocessing`` allows only while the process is being started.

    Args:
        engine: The main process's end.
        worker: The worker's number.
        options: The options of the iterator. They may be pickled only with the end.
        busy: Of the successor of a worker, what ``Engine.succeed`` has returned.
    """

    def __init__(
        self,
        engine: _native.Engine,
        worker: int,
        options: Sequence[WorkerOption] = (),
        busy: Sequence[int] | None = None,
    ) -> None:
        self._engine = engine
        self.worker = worker
        self.options = options
        self._busy = busy

    @property
    def share(self) -> int:
        """Bytes of shared memory that are this worker's."""
        return self._engine.share

    def attach(self) -> _native.Port:
        """The worker's end, in the worker."""
        return _native.Port.inherit(self._engine, self.worker, self._busy)

    def __reduce__(self) -> tuple[Any, ...]:
        sent = [reduction.DupFd(fd) for fd in self._engine.worker_fds(self.worker)]
        return SentEndpoint, (sent, self.worker, self.share, self.options, self._busy)


class SentEndpoint:
    """The end of a worker that was not forked, as it arrives there."""

    def __init__(
        self,
        sent: Sequence[Any],
        worker: int,
        share: int,
        options: Sequence[WorkerOption],
        busy: Sequence[int] | None,
    ) -> None:
        self._busy = busy
        self._sent = sent
        self.worker = worker
        self.share = share
        self.options = options

    def attach(self) -> _native.Port:
        """The worker's end."""
        fds = [sent.detach() for sent in self._sent]
        try:
            return _native.Port.attach(fds, self.worker, self.share, self._busy)
        finally:
            for fd in fds:
                os.close(fd)


class Results:
    """Sends results. One that cannot be sent becomes an error.

    Args:
        port: The process's end.
        where: The process in words, for errors.
    """

    def __init__(self, port: _native.Port, where: str) -> None:
        self._port = port
        self._where = where

    def put(self, message: tuple[Any, Any]) -> None:
        """Sends a message once there is room. An object that cannot be sent becomes an error of its task."""
        try:
            self._port.put(message)
        except Exception:
            self._port.put((message[0], self.failure()))

    def failure(self) -> Any:
        """Wraps the error that is being handled."""
        return internals.ExceptionWrapper(where=self._where)


class ProcessChannel(Results):
    """A :class:`~ringloader._worker.loop.Channel` over the rings.

    Args:
        port: The process's end.
        worker: The worker's number.
        trimming: Gives back memory of the allocator while the worker is idle.
    """

    shares_dataset = False

    def __init__(self, port: _native.Port, worker: int, trimming: malloc.Trimming) -> None:
        super().__init__(port, f"in DataLoader worker process {worker}")
        # Waits for the next message, and returns it in a tuple; None when the time is over.
        self._take = port.get
        self._trimming = trimming

    def get(self) -> Any:
        port = self._port
        while True:
            task = self._take(_IDLE_SECONDS)
            if task is None and not port.parent_ended:
                task = self._get_idle()
            if task is not None:
                self._trimming.note_task()
                return task[0]
            # MIRRORS torch worker.py::ManagerWatchdog.
            if port.parent_ended:
                return None

    def _get_idle(self) -> Any:
        """Waits for longer, and gives back meanwhile what the allocator keeps."""
        timeout, pause = internals.JOIN_SECONDS, self._trimming.until_trim()
        if timeout <= pause:
            return self._take(timeout)
        task = self._take(pause)
        if task is None and not self._port.parent_ended:
            self._trimming.trim()
            task = self._take(timeout - pause)
        return task

    def ahead(self) -> Any:
        """Returns the next message in a tuple, before its turn; None if there is none. Never waits."""
        task = self._port.ahead()
        return (None,) if task is None and self._port.parent_ended else task

    def begin_task(self) -> None:
        """Notes the turn of a task that was taken before it."""
        self._port.begin_task()
        self._trimming.note_task()

    def is_done(self) -> bool:
        return self._port.is_done()
