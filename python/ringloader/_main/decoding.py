"""``main_prefetch=``: batches decoded before their turn, by a thread of the main process."""

from __future__ import annotations

import atexit
import queue
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import ringloader._native as _native
from ringloader._main.lookahead import Prepared

# How long the end of an iterator waits for what user code unpickles at that moment.
_PATIENCE_S = 5.0


class _Decoded:
    """A batch that the thread decodes.

    INVARIANT: the lock is held until the thread is done with the batch, or was told to leave it.
    """

    __slots__ = ("_arrival", "_error", "_pending")

    def __init__(self, arrival: _native.Arrival) -> None:
        self._arrival = arrival
        self._error: BaseException | None = None
        self._pending = threading.Lock()
        self._pending.acquire()

    def decode(self) -> None:
        """In the thread."""
        try:
            self._arrival.unpack()
        except BaseException as error:
            # What interrupts a program interrupts it in the caller's thread.
            self._error = error.with_traceback(None)
        finally:
            self._pending.release()

    def leave(self) -> None:
        """The thread will not decode it."""
        self._pending.release()

    def result(self) -> Any:
        with self._pending:
            pass
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._arrival.unpack()


class Decoding:
    """Decodes batches in one thread: unpickles them, makes their tensors, and copies out what must be copied.

    The thread is in no mode of the caller's, as torch's pinning thread. It begins with the first batch, and
    keeps neither the iterator nor a batch alive.

    Args:
        ahead: Batches that are decoded before their turn, at most.
    """

    # The function itself: what lives on while modules are torn down finds their names None.
    _is_finalizing = staticmethod(sys.is_finalizing)

    def __init__(self, ahead: int) -> None:
        self.depth = ahead
        self._tasks: queue.SimpleQueue[_Decoded | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process = _native.process_identity()

    def prepare(self, arrival: _native.Arrival) -> Prepared:
        """Has the thread decode a batch."""
        decoded = _Decoded(arrival)
        if self._thread is None and not self._started():
            decoded.decode()
        else:
            self._tasks.put(decoded)
        return decoded

    def _started(self) -> bool:
        """Starts the thread. False while the interpreter ends: then the caller decodes."""
        if _has_exited:
            return False
        self._thread = threading.Thread(
            target=_decode_all, args=(self._tasks,), name="ringloader_decode", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = None
            return False
        _alive.add(self)
        return True

    def place_next(self, take: Callable[[], Any]) -> Any:
        """A batch of torch's own iterator is decoded when it is taken."""
        return take()

    def abandon(self) -> None:
        """Takes back what the thread has not begun."""
        while True:
            try:
                left = self._tasks.get_nowait()
            except queue.Empty:
                return
            if left is not None:
                left.leave()

    def close(self) -> None:
        """Ends the thread, behind the batch that it decodes. A forked child has none."""
        thread, self._thread = self._thread, None
        if thread is None or self._process != _native.process_identity():
            return
        self.abandon()
        self._tasks.put(None)
        # A thread that needs the interpreter while it is finalized never ends.
        if thread is not threading.current_thread() and not self._is_finalizing():
            thread.join(_PATIENCE_S)


def _decode_all(tasks: queue.SimpleQueue[_Decoded | None]) -> None:
    while (decoded := tasks.get()) is not None:
        decoded.decode()
        # The caller's alone, while this thread waits for the next.
        del decoded


_alive: weakref.WeakSet[Decoding] = weakref.WeakSet()
_has_exited = False


@atexit.register
def _close_at_exit() -> None:
    # A thread must not be in native code when the interpreter goes.
    global _has_exited
    _has_exited = True
    for decoding in list(_alive):
        decoding.close()
