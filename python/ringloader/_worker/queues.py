"""What torch's worker loop takes for queues and an event: the worker's ends of its rings."""

from __future__ import annotations

import queue
from typing import Any

import ringloader._native as _native
from ringloader._torch import internals
from ringloader._worker import malloc

# A worker that has waited as long for a task is idle. Not more than torch's loop allows.
_IDLE_SECONDS = 0.1


class Done:
    """The event, as torch's worker loop sees it: also set once the parent has ended."""

    def __init__(self, port: _native.Port) -> None:
        self._port = port

    def is_set(self) -> bool:
        return self._port.is_done()


class Tasks:
    """The task queue, as torch's worker loop sees it."""

    def __init__(self, port: _native.Port, trimming: malloc.Trimming) -> None:
        self._port = port
        self._trimming = trimming

    def get(self, timeout: float | None = None) -> Any:
        task = self._port.get(_IDLE_SECONDS)
        if task is None and not self._port.parent_ended:
            task = self._get_idle(timeout)
        if task is not None:
            self._trimming.note_task()
            return task[0]
        if self._port.parent_ended:
            # With the event set, this is the loop's way out that says nothing.
            return None
        raise queue.Empty

    def _get_idle(self, timeout: float | None) -> Any:
        """Waits for longer, and gives back meanwhile what the allocator keeps."""
        pause = self._trimming.until_trim()
        if timeout is not None and timeout <= pause:
            return self._port.get(timeout)
        task = self._port.get(pause)
        if task is None and not self._port.parent_ended:
            self._trimming.trim()
            task = self._port.get(None if timeout is None else timeout - pause)
        return task


class Results:
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
                self._port.put((message[0], self._in_text(error)))

    def put_now(self, message: tuple[int, object]) -> bool:
        """As ``put``, where there is room. Returns whether there was."""
        try:
            return self._port.put_now(message)
        except Exception as error:
            # Its error waits for room no more than it does.
            try:
                return self._port.put_now((message[0], self._wrapped()))
            except Exception:
                return self._port.put_now((message[0], self._in_text(error)))

    def _wrapped(self) -> object:
        wrapped: object = internals.ExceptionWrapper(where=self._where)
        return wrapped

    def _in_text(self, error: Exception) -> object:
        """Stands for an error whose own type cannot be sent either."""
        try:
            raise RuntimeError(f"a batch could not be sent: {type(error).__name__}: {error}") from None
        except RuntimeError:
            return self._wrapped()

    def cancel_join_thread(self) -> None:
        pass

    def close(self) -> None:
        pass
