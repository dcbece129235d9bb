"""A process of a pool: the work that it is given over its socket, and one iterator's worker after another."""

from __future__ import annotations

import gc
import io
import os
import pickle
import select
import signal
import socket
import struct
import warnings
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import reduction
from typing import IO, Any

from ringloader._pool.state import Held, ProcessState
from ringloader._worker import entry

# An assignment follows, or lies in the last of the descriptors; descriptors of the next message.
ASSIGN, ASSIGN_LARGE, MORE_FDS = b"a", b"l", b"m"
# Numbers of what is dropped follow; nothing.
DROP, END = b"d", b"e"
LEFT = b"left"
# The kernel takes at most 253 in one message.
MOST_FDS = 250
NUMBER = struct.Struct("q")
# Bytes of an assignment that is sent in the message itself: an interrupt can lose no descriptor of it.
MOST_BYTES = 32 << 10
# Numbers in one message that drops, at most.
MOST_DROPPED = 512
_LONGEST = 1 + MOST_BYTES


class SentFd:
    """A descriptor on its way to a process that runs. MIRRORS multiprocessing popen_forkserver.py::_DupFd."""

    def __init__(self, number: int) -> None:
        self._number = number

    def detach(self) -> int:
        """The descriptor, which is the caller's now."""
        return _received.pop(self._number)


# Descriptors of the assignment that is unpickled now, or was last, by their numbers.
_received: dict[int, int] = {}


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, held: Held) -> None:
        super().__init__(file)
        self._held = held

    def persistent_load(self, number: Any) -> Any:
        return self._held.get(number)


class Assignments:
    """Made in the main process, used in the pool's.

    Args:
        channel: This end of the socket.
        parent: A pidfd of the main process.
        others: Ends of sockets that a forked process has no business with. It closes them.
    """

    def __init__(self, channel: socket.socket, parent: int, others: Sequence[socket.socket] = ()) -> None:
        self._channel = channel
        self._parent = parent
        self._others = others

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (reduction.DupFd(self._channel.fileno()), reduction.DupFd(self._parent))

    def begin(self) -> None:
        """Closes the other ends. Call it once, in the process."""
        for other in self._others:
            other.close()
        self._others = ()

    def next(self, held: Held, when_idle: Callable[[], None]) -> Any:
        """Waits for the next assignment; None if there will be none.

        Args:
            held: What the process holds. Takes what comes, and loses what is dropped, meanwhile.
            when_idle: Called once, after a second of waiting.
        """
        waiting = select.poll()
        for fd in (self._channel.fileno(), self._parent):
            waiting.register(fd, select.POLLIN)
        fds: list[int] = []
        while True:
            ready = waiting.poll(1000)
            if not ready:
                when_idle()
                ready = waiting.poll()
            # Forked children of the main process may hold its end of the channel.
            if self._parent in dict(ready):
                return None
            try:
                message, more, flags, _ = socket.recv_fds(self._channel, _LONGEST, MOST_FDS)
            except ConnectionError:
                return None
            fds += more
            if flags & socket.MSG_CTRUNC:
                raise OSError("too few file descriptors are left for what a loader sends to a pool's process")
            if message in (b"", END):
                return None
            if message[:1] == DROP:
                held.drop(number for (number,) in NUMBER.iter_unpack(message[1:]))
            elif message[:1] == ASSIGN:
                return self._open(io.BytesIO(message[1:]), fds, held)
            elif message == ASSIGN_LARGE:
                return self._open(os.fdopen(fds.pop(), "rb"), fds, held)

    @staticmethod
    def _open(file: IO[bytes], fds: list[int], held: Held) -> Any:
        _received.clear()
        _received.update(enumerate(fds))
        # An error in here ends the process.
        with file:
            for numbers, sent in _Unpickler(file, held).load():
                held.put(zip(numbers, sent.load(held.get), strict=True))
            things, assignment = _Unpickler(file, held).load()
            held.put(things)
            return assignment

    def say_left(self) -> bool:
        """Tells the main process that this one has left the iterator's memory. False: it has ended."""
        try:
            self._channel.send(LEFT)
        except ConnectionError:
            return False
        return True


def _rebuild(channel: Any, parent: Any) -> Assignments:
    return Assignments(socket.socket(fileno=channel.detach()), parent.detach())


class _Interrupts:
    """``SIGINT``: a process that waits ignores it; one that works ends by it, as torch's worker does."""

    def __init__(self) -> None:
        self.came = False
        self._before = signal.getsignal(signal.SIGINT)

    def ignore(self) -> None:
        # A handler that C code has set stays.
        if self._before is not None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def heed(self) -> None:
        if self._before is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
        elif self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: Any) -> None:
        self.came = True
        signal.default_int_handler(number, frame)


def main(assignments: Assignments, inherited: dict[int, Any]) -> None:
    """Works until the pool, or its process, ends.

    Args:
        assignments: This process's end of what the main process sends.
        inherited: What a forked process holds from the beginning, by number.
    """
    assignments.begin()
    held = Held()
    held.put(inherited.items())
    inherited.clear()
    interrupts = _Interrupts()
    interrupts.ignore()
    state = ProcessState()
    trim = _nothing
    while True:
        assignment = assignments.next(held, trim)
        if assignment is None:
            return
        worker_end, work = assignment
        del assignment
        port = entry.attach(worker_end)
        interrupts.heed()
        # An error that the worker loop does not catch ends the process, as it ends torch's worker.
        with warnings.catch_warnings():
            trim = entry.run_at(port, worker_end, work).trim
        interrupts.ignore()
        del work
        if interrupts.came or port.parent_ended:
            # The loop was not told to end. Also in a child of the dataset's that has come back to it.
            return
        state.restore()
        held.restore()
        is_free, unmapped = port.leave(), weakref.ref(port)
        del port, worker_end
        if is_free and unmapped() is not None:
            # In a cycle, such as that of an error and its traceback.
            gc.collect()
        # INVARIANT: the main process uses the memory again once it is told that this one has left.
        # A dataset that keeps what was collated keeps the memory: the process ends instead.
        if not is_free or unmapped() is not None or not assignments.say_left():
            return


def _nothing() -> None:
    pass
