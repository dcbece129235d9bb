"""A worker process's end of the rings: on its way to the process, and as the worker loop uses it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from multiprocessing import reduction
from typing import Any

import ringloader._native as _native
from ringloader._torch import internals
from ringloader._worker.options import WorkerOption


@dataclasses.dataclass
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

    engine: _native.Engine
    worker: int
    options: Sequence[WorkerOption] = ()
    busy: Sequence[int] | None = None

    @property
    def share(self) -> int:
        """Bytes of shared memory that are this worker's."""
        return self.engine.share

    def attach(self) -> _native.Port:
        """The worker's end, in the worker."""
        return _native.Port.inherit(self.engine, self.worker, self.busy)

    def __reduce__(self) -> tuple[Any, ...]:
        sent = [reduction.DupFd(fd) for fd in self.engine.worker_fds(self.worker)]
        return SentEndpoint, (sent, self.worker, self.share, self.options, self.busy)


@dataclasses.dataclass
class SentEndpoint:
    """The end of a worker that was not forked, as it arrives there."""

    sent: Sequence[Any]
    worker: int
    share: int
    options: Sequence[WorkerOption]
    busy: Sequence[int] | None

    def attach(self) -> _native.Port:
        """The worker's end."""
        fds = [sent.detach() for sent in self.sent]
        try:
            return _native.Port.attach(fds, self.worker, self.share, self.busy)
        finally:
            for fd in fds:
                os.close(fd)


class ProcessChannel:
    """A :class:`~ringloader._worker.loop.Channel` over the rings: mostly the port's own methods.

    Args:
        port: The process's end.
        worker: The worker's number.
    """

    shares_dataset = False
    get: Callable[[], Any]
    ahead: Callable[[], Any]
    begin_task: Callable[[], None]
    put: Callable[[tuple[Any, Any]], None]
    is_done: Callable[[], bool]

    def __init__(self, port: _native.Port, worker: int) -> None:
        self._port = port
        self._where = f"in DataLoader worker process {worker}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)

    def failure(self) -> Any:
        """Wraps the error that is being handled."""
        return internals.ExceptionWrapper(where=self._where)
