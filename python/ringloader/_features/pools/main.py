"""A process of a pool: the work that it is given over its socket, and one iterator's worker after another.

The next iterator finds objects, and the process, in the state in which they were.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pickle
import select
import signal
import socket
import struct
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import reduction
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import IO, Any, TypeVar

import torch
import torch.utils.data

from ringloader._torch import stand_ins
from ringloader._worker import entry
from ringloader._worker.options import WorkerOption

# An assignment lies in the last of the descriptors; descriptors of the next message.
ASSIGN, MORE_FDS = b"a", b"m"
# Numbers of what is dropped follow; nothing.
DROP, END = b"d", b"e"
LEFT = b"left"
# The kernel takes at most 253 in one message.
MOST_FDS = 250
NUMBER = struct.Struct("q")
# Numbers in one message that drops, at most.
MOST_DROPPED = 512
_MOST_BYTES = 1 + MOST_DROPPED * NUMBER.size
# A dataset of more parts is not searched for datasets.
_MOST_PARTS = 1000
_T = TypeVar("_T")


class SentFd:
    """A descriptor on its way to a process that runs. MIRRORS multiprocessing popen_forkserver.py::_DupFd."""

    def __init__(self, number: int) -> None:
        self._number = number

    def detach(self) -> int:
        """The descriptor, which is the caller's now."""
        return _received.pop(self._number)


# Descriptors of the assignment that is unpickled now, or was last, by their numbers.
_received: dict[int, int] = {}


class Unpickler(pickle.Unpickler):
    """Finds what the process holds by its key."""

    def __init__(self, file: Any, held: Held) -> None:
        super().__init__(file)
        self._held = held

    def persistent_load(self, key: Any) -> Any:
        return self._held.get(key)


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

    def next(self, held: Held, when_idle: Callable[[], object]) -> Any:
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
                message, more, flags, _ = socket.recv_fds(self._channel, _MOST_BYTES, MOST_FDS)
            except ConnectionError:
                return None
            fds += more
            if flags & socket.MSG_CTRUNC:
                raise OSError("too few file descriptors are left for what a loader sends to a pool's process")
            if message in (b"", END):
                return None
            if message[:1] == DROP:
                held.drop(number for (number,) in NUMBER.iter_unpack(message[1:]))
            elif message == ASSIGN:
                return self._open(os.fdopen(fds.pop(), "rb"), fds, held)

    @staticmethod
    def _open(file: IO[bytes], fds: list[int], held: Held) -> Any:
        _received.clear()
        _received.update(enumerate(fds))
        # An error in here ends the process.
        with file:
            sent = Unpickler(file, held).load()
            if sent is not None:
                held.put(*sent)
            return Unpickler(file, held).load()

    def close(self) -> None:
        """Closes what it has, at the end of the process."""
        self._channel.close()
        os.close(self._parent)

    def report_left(self) -> bool:
        """Tells the main process that this one has left the iterator's memory. False: it has ended."""
        try:
            self._channel.send(LEFT)
        except ConnectionError:
            return False
        return True


def _rebuild(channel: Any, parent: Any) -> Assignments:
    return Assignments(socket.socket(fileno=channel.detach()), parent.detach())


class Held:
    """Datasets and functions of loaders, by the numbers of the main process's records.

    Attributes that an iterator sets on them (``worker_init_fn`` that splits a dataset, files opened when they
    are first read) are those of that iterator: the next one finds what was sent.
    """

    def __init__(self) -> None:
        self._things: dict[int, Mapping[str, Any]] = {}
        self._states: dict[int, list[tuple[dict[str, Any], dict[str, Any]]]] = {}

    def put(self, number: int, things: Mapping[str, Any]) -> None:
        """Takes the objects of a loader, by their arguments."""
        self._things[number] = things
        self._states[number] = [(state, dict(state)) for thing in things.values() for state in _states(thing)]

    def drop(self, numbers: Iterable[int]) -> None:
        """Forgets the objects with these numbers, which no loader has any more."""
        for number in numbers:
            self._things.pop(number, None)
            self._states.pop(number, None)

    def get(self, key: tuple[int, str]) -> Any:
        """Returns an object by its number and argument."""
        number, name = key
        return self._things[number][name]

    def restore(self) -> None:
        """Gives all objects the attributes that they had when they came."""
        for states in self._states.values():
            for state, before in states:
                if state.keys() != before.keys() or any(state[name] is not before[name] for name in before):
                    state.clear()
                    state.update(before)


def _states(thing: Any) -> list[dict[str, Any]]:
    """The attributes of an object, and of the datasets that it is made of."""
    found: dict[int, dict[str, Any]] = {}
    pending = [thing]
    while pending:
        one = pending.pop()
        if isinstance(one, MethodType):
            pending.append(one.__self__)
        elif isinstance(one, functools.partial):
            pending += [one.func, *_parts((*one.args, *one.keywords.values()))]
        else:
            state = _attributes(one)
            if state is not None and id(state) not in found:
                found[id(state)] = state
                pending += _parts(state.values())
    return list(found.values())


def _attributes(thing: Any) -> dict[str, Any] | None:
    if isinstance(thing, (type, FunctionType, ModuleType)):
        return None
    try:
        state = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return None
    return state if type(state) is dict else None


def _parts(values: Iterable[Any]) -> list[Any]:
    """The datasets among them, also one level deeper."""
    found = []
    for value in values:
        if isinstance(value, Mapping):
            inner: Iterable[Any] = value.values() if len(value) <= _MOST_PARTS else ()
        elif isinstance(value, (list, tuple)):
            inner = value if len(value) <= _MOST_PARTS else ()
        else:
            inner = (value,)
        found += [one for one in inner if isinstance(one, torch.utils.data.Dataset)]
    return found


class ProcessState:
    """The state of this process as it is now, without seeds and threads: each worker sets them itself."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._directory = _unless_refused(Path.cwd)
        self._path = list(sys.path)
        self._handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._dtype = torch.get_default_dtype()
        self._grad = torch.is_grad_enabled()
        self._parts = stand_ins.WorkerParts()
        self._blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        # There is no other way to ask for it. No thread of the user's makes files yet.
        os.umask(umask := os.umask(0o077))
        self._umask = umask
        self._cores = _unless_refused(lambda: os.sched_getaffinity(0))
        self._niceness = _niceness()

    def restore(self) -> bool:
        """Restores that state. Leaves out what C code changes by itself.

        Returns:
            False if the process has something that it may not put back.
        """
        if dict(os.environ) != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)
        if self._directory is not None and _unless_refused(Path.cwd) != self._directory:
            os.chdir(self._directory)
        sys.path[:] = self._path
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._handlers.items():
            # A handler that C code has set cannot be set from here.
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        torch.set_default_dtype(self._dtype)
        torch.set_grad_enabled(self._grad)
        self._parts.restore()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)
        os.umask(self._umask)
        if self._cores is not None and _unless_refused(lambda: os.sched_getaffinity(0)) != self._cores:
            try:
                os.sched_setaffinity(0, self._cores)
            except OSError:
                # The process may not use those cores any more.
                return False
        # To lower it takes privileges.
        return _niceness() == self._niceness


def _niceness() -> int | None:
    return _unless_refused(lambda: os.getpriority(os.PRIO_PROCESS, 0))


def _unless_refused(ask: Callable[[], _T]) -> _T | None:
    """Returns what the system answers; None where a sandbox refuses the question."""
    with contextlib.suppress(OSError):
        return ask()
    return None


def main(assignments: Assignments) -> None:
    """Works until the pool, or its process, ends.

    Args:
        assignments: This process's end of what the main process sends.
    """
    entry.drop_what_it_began_with()
    assignments.begin()
    try:
        _work(assignments, Held())
    finally:
        assignments.close()


def _work(assignments: Assignments, held: Held) -> None:
    before = signal.getsignal(signal.SIGINT)

    def on_interrupt(handler: Any) -> None:
        # A handler that C code has set stays.
        if before is not None:
            signal.signal(signal.SIGINT, handler)

    # A process that waits ignores it; one that works ends by it, as torch's worker does.
    on_interrupt(signal.SIG_IGN)
    state = ProcessState()
    trim: Callable[[], object] = bool
    while True:
        assignment = assignments.next(held, trim)
        if assignment is None:
            return
        worker_end, work = assignment
        del assignment
        port = entry.attach(worker_end)
        on_interrupt(before)
        try:
            # Another error that the worker loop does not catch ends the process, as it ends torch's worker.
            with warnings.catch_warnings():
                trim = entry.run_at(port, worker_end.share, worker_end.options, work)
        except KeyboardInterrupt:
            # The main process raises it.
            return
        on_interrupt(signal.SIG_IGN)
        del work
        if port.parent_ended:
            # Also in a child of the dataset's that has come back to the loop.
            return
        undo_options(worker_end.options)
        is_as_before = state.restore()
        held.restore()
        is_free, unmapped = port.leave(), weakref.ref(port)
        del port, worker_end
        if is_free and unmapped() is not None:
            # In a cycle, such as that of an error and its traceback.
            gc.collect()
        # INVARIANT: the main process uses the memory again once it is told that this one has left.
        # A dataset that keeps what was collated keeps the memory: the process ends instead.
        if not is_as_before or not is_free or unmapped() is not None or not assignments.report_left():
            return


def undo_options(options: Sequence[WorkerOption]) -> None:
    """Undoes what options have changed in this process."""
    # In a function of its own, so that no variable keeps an option, and the memory that it may refer to.
    for option in options:
        option.leave_process()
