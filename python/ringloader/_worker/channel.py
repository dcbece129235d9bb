"""A worker process's end of the rings, as the worker loop uses it."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import ringloader._native as _native
from ringloader._torch import internals
from ringloader._worker import malloc

# A worker that has waited as long for a task is idle.
_IDLE_SECONDS = 0.1


class Results:
    """Sends results, also those that cannot be sent as they are.

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
        except Exception as error:
            try:
                self._port.put((message[0], self.failure()))
            except Exception:
                self._port.put((message[0], self._in_text(error)))

    def put_now(self, message: tuple[int, object]) -> bool:
        """Sends a message, as :meth:`put`, if there is room. Returns False if there is none."""
        try:
            return self._port.put_now(message)
        except Exception as error:
            try:
                return self._port.put_now((message[0], self.failure()))
            except Exception:
                return self._port.put_now((message[0], self._in_text(error)))

    def failure(self) -> Any:
        """Wraps the error that is being handled."""
        return internals.ExceptionWrapper(where=self._where)

    def _in_text(self, error: Exception) -> object:
        """Stands for an error whose own type cannot be sent either."""
        try:
            raise RuntimeError(f"a batch could not be sent: {type(error).__name__}: {error}") from None
        except RuntimeError:
            return self.failure()


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
        self._trimming = trimming
        parent = multiprocessing.parent_process()
        # In a process of a fork server, the port alone knows of the main process's end.
        self._is_child = parent is None or parent.pid == os.getppid()
        self._parent = os.getppid()

    def get(self) -> Any:
        port = self._port
        while True:
            task = port.get(_IDLE_SECONDS)
            if task is None and not port.parent_ended:
                task = self._get_idle()
            if task is not None:
                self._trimming.note_task()
                return task[0]
            # MIRRORS torch worker.py::ManagerWatchdog. Other children may hold the main process's ends.
            if port.parent_ended or (self._is_child and os.getppid() != self._parent):
                return None

    def _get_idle(self) -> Any:
        """Waits for longer, and gives back meanwhile what the allocator keeps."""
        timeout, pause = internals.JOIN_SECONDS, self._trimming.until_trim()
        if timeout <= pause:
            return self._port.get(timeout)
        task = self._port.get(pause)
        if task is None and not self._port.parent_ended:
            self._trimming.trim()
            task = self._port.get(timeout - pause)
        return task

    def is_done(self) -> bool:
        return self._port.is_done()
