"""A worker's end of the transport, on its way: made in the main process, used in the worker."""

from __future__ import annotations

import os
from collections.abc import Sequence
from multiprocessing import reduction
from typing import Any

import ringloader._native as _native
from ringloader._worker.options import WorkerOption


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
        fds = self._engine.worker_fds(self.worker).as_dict()
        sent = {name: reduction.DupFd(fd) for name, fd in fds.items()}
        return SentEndpoint, (sent, self.worker, self.share, self.options, self._busy)


class SentEndpoint:
    """The end of a worker that was not forked, as it arrives there."""

    def __init__(
        self,
        sent: dict[str, Any],
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
        fds = {name: sent.detach() for name, sent in self._sent.items()}
        try:
            return _native.Port.attach(_native.WorkerFds(**fds), self.worker, self.share, self._busy)
        finally:
            for fd in fds.values():
                os.close(fd)
