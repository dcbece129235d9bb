"""``main_prefetch=``: batches decoded before their turn, by a thread of the main process."""

from __future__ import annotations

import atexit
import queue
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, Self

import ringloader._native as _native
from ringloader._core.feature import Feature, Setup
from ringloader._transport.lookahead import Prepared

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

# Seconds that the end of an iterator waits for what user code unpickles at that moment.
_PATIENCE_S = 5.0
# Seconds after which a caller that waits for a batch looks again if it is done.
_LOOK_S = 0.1


class _Decoded:
    """A batch that the thread decodes.

    INVARIANT: the lock is held until the thread is done with the batch, or was told to leave it, and this is
    noted before. A caller never gives the lock back: an interrupt may come between any two steps, and the
    caller then asks again.
    """

    __slots__ = ("_arrival", "_decoding", "_error", "_is_done", "_pending")

    def __init__(self, arrival: _native.Arrival, decoding: Decoding) -> None:
        self._arrival = arrival
        self._decoding = decoding
        self._error: BaseException | None = None
        self._is_done = False
        self._pending = threading.Lock()
        self._pending.acquire()

    def decode(self) -> None:
        """Decodes the batch. Called in the thread."""
        try:
            self._arrival.unpack()
        except BaseException as error:
            # An error that interrupts a program is raised in the caller's thread.
            self._error = error.with_traceback(None)
        finally:
            self.release()

    def abandon(self) -> None:
        """Gives the batch up where :meth:`release` may have run already. The caller looks soon."""
        self._is_done = True

    def release(self) -> None:
        """Marks the batch as decoded, and wakes the caller."""
        self._is_done = True
        self._pending.release()

    def result(self) -> Any:
        while not self._is_done:
            if self._decoding.is_stopped:
                raise RuntimeError("the iterator was ended while this batch was decoded")
            self._pending.acquire(timeout=_LOOK_S)
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                # In a local variable the error, and with it this frame, would keep the iterator.
                del error
        return self._arrival.unpack()


def feature_for(_loader: TorchLoader, options: Any, setup: Setup) -> Decoding | None:
    """Returns the feature of ``main_prefetch``; None without workers."""
    return Decoding(options.main_prefetch) if setup.workers else None


class Decoding(Feature):
    """Decodes batches in one thread: unpickles them, makes their tensors, and copies out what must be copied.

    The thread is in no mode of the caller's, as torch's pinning thread. It begins with the first batch, and
    keeps neither the iterator nor a batch alive.

    Args:
        ahead: Batches that are decoded before their turn, at most.

    Attributes:
        is_stopped: True once the iterator has ended: callers that wait raise.
    """

    # Attributes: a thread that lives on while modules are torn down finds their names None.
    _is_finalizing = staticmethod(sys.is_finalizing)
    _process_identity = staticmethod(_native.process_identity)
    _current_thread = staticmethod(threading.current_thread)
    _none_left = queue.Empty
    _patience = _PATIENCE_S

    def __init__(self, ahead: int) -> None:
        self.depth = ahead
        self.is_stopped = False
        # INVARIANT: from then on the queue has nothing but an end for each thread.
        self._is_closed = False
        self._tasks: queue.SimpleQueue[_Decoded | None] = queue.SimpleQueue()
        # INVARIANT: it was started.
        self._thread: threading.Thread | None = None
        # Threads that may run: an interrupt may have come while one was started.
        self._begun = 0
        self._process = _native.process_identity()

    def placement(self) -> Self:
        return self

    def prepare(self, arrival: _native.Arrival) -> Prepared:
        """Gives the thread a batch to decode."""
        decoded = _Decoded(arrival, self)
        if self._thread is None and not self._started():
            decoded.decode()
        else:
            self._tasks.put(decoded)
        return decoded

    def _started(self) -> bool:
        """Starts the thread. False after :meth:`close` and at exit: then the caller decodes."""
        if self._is_closed or _has_exited:
            return False
        thread = threading.Thread(
            target=_decode_all, args=(self._tasks,), name="ringloader_decode", daemon=True
        )
        _alive.add(self)
        self._begun += 1
        try:
            thread.start()
        except RuntimeError:
            return False
        self._thread = thread
        return True

    def stop(self) -> None:
        """Makes callers that wait for a batch raise."""
        self.is_stopped = True

    def abandon(self) -> None:
        """Takes back what the thread has not begun."""
        while not self._is_closed:
            try:
                left = self._tasks.get_nowait()
            except self._none_left:
                return
            if left is not None:
                left.release()

    def close(self) -> None:
        """Ends the thread, after the batch that it decodes. A forked child has none."""
        if not self._begun or self._process != self._process_identity():
            return
        self.abandon()
        self._is_closed = True
        while self._begun > 0:
            # An interrupt may come in between: an end too many has no effect.
            self._tasks.put(None)
            self._begun -= 1
        thread, self._thread = self._thread, None
        # A thread that needs the interpreter while it is finalized never ends.
        if thread is None or thread is self._current_thread() or self._is_finalizing():
            return
        thread.join(self._patience)


def _decode_all(tasks: queue.SimpleQueue[_Decoded | None]) -> None:
    while True:
        decoded = None
        try:
            if (decoded := tasks.get()) is None:
                return
            decoded.decode()
        except BaseException:
            # Memory ran out before the batch was begun: a MemoryError, or a SystemError where none was set.
            # The caller decodes it. INVARIANT: the thread continues, as callers wait for it.
            if decoded is not None:
                decoded.abandon()
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
