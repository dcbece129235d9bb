"""A worker's end of the transport, on its way: made in the main process, used in the worker."""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from multiprocessing import reduction
from typing import Any

import ringloader._native as _native
from ringloader._worker.fetch import Step


class QueueEnd(enum.Enum):
    """Stands for a queue, or the event, among the arguments of torch's worker loop."""

    TASKS = enum.auto()
    RESULTS = enum.auto()
    DONE = enum.auto()


class WorkerEndpoint:
    """A worker's end of the transport, on its way to the worker.

    A forked worker inherits mapping and descriptors; to any other the descriptors are sent, which
    ``multiprocessing`` allows only while the process is being started.
    """

    def __init__(self, engine: _native.Engine, worker: int, steps: Sequence[Step] = ()) -> None:
        self._engine = engine
        self.worker = worker
        self.steps = steps

    @property
    def share(self) -> int:
        """Bytes of shared memory that are this worker's."""
        return self._engine.share

    def attach(self) -> _native.Port:
        """The worker's end, in the worker."""
        return _native.Port.inherit(self._engine, self.worker)

    def __reduce__(self) -> tuple[Any, ...]:
        fds = self._engine.worker_fds(self.worker).as_dict()
        sent = {name: reduction.DupFd(fd) for name, fd in fds.items()}
        return SentEndpoint, (sent, self.worker, self.share, self.steps)


class SentEndpoint:
    """The same, as a worker that was not forked gets it."""

    def __init__(self, sent: dict[str, Any], worker: int, share: int, steps: Sequence[Step]) -> None:
        self._sent = sent
        self.worker = worker
        self.share = share
        self.steps = steps

    def attach(self) -> _native.Port:
        """The worker's end."""
        fds = {name: sent.detach() for name, sent in self._sent.items()}
        try:
            return _native.Port.attach(_native.WorkerFds(**fds), self.worker, self.share)
        finally:
            for fd in fds.values():
                os.close(fd)
