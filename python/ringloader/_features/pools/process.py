"""The main process's end of a process of a pool, and the process object that stands for it at an iterator."""

from __future__ import annotations

import contextlib
import io
import os
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection, context, reduction
from typing import Any

import ringloader._native as _native
from ringloader._features import spawn_server
from ringloader._features.pools import main as pooled
from ringloader._features.pools.objects import Key, PoolRecord, moments
from ringloader._start import guard, pickled, processes

# Seconds between two looks whether a process that is waited for has left or ended.
_POLL_SECONDS = 0.05


class LostError(RuntimeError):
    """A process of a pool has ended before it could be given work."""


class PoolProcess:
    """A process of a pool.

    Args:
        context: The ``multiprocessing`` context that starts it.
        others: Ends of the sockets of the pool's other processes.
        fork: The argument by which it would be forked, for people.
    """

    def __init__(self, context: Any, others: Sequence[socket.socket], fork: str = guard.FORK) -> None:
        # Of the records that it holds.
        self.numbers: set[int] = set()
        # A forked process has the main module of this moment; others run it again.
        self._forked_at = next(moments) if context.get_start_method() == "fork" else None
        # True while an iterator has the process.
        self.is_lent = False
        # True if it has closed its end of the socket.
        self._has_closed = False
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            parent = os.pidfd_open(os.getpid())
            try:
                end = pooled.Assignments(theirs, parent, [*others, self.channel])
                made = context.Process(target=pooled.main, args=(end,), daemon=True)
                self.process = spawn_server.by_server(made)
                processes.start(self.process, context, fork)
            except BaseException:
                self.channel.close()
                raise
            finally:
                os.close(parent)

    def is_alive(self) -> bool:
        return bool(self.process.is_alive())

    def is_lost(self) -> bool:
        """True if the process has ended, or is idle and about to.

        A fork server tells the end of a process only after its channel has closed.
        """
        if not self.is_alive() or self.channel.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self.channel, 0)
        return not self.is_lent and bool(poll.poll(0))

    def can_serve(self, record: PoolRecord) -> bool:
        """True if it has, or finds, what a pickle names of the main module."""
        is_newer = self._forked_at is None or self._forked_at > record.made_at
        return is_newer or record.number in self.numbers or not record.names_main

    def assign(self, record: PoolRecord, work: tuple[Any, ...], finds_main: bool) -> None:
        """Sends an assignment.

        Args:
            record: The objects of its loader, ready to be sent. They go first, if the process lacks them.
            work: The work that the process is to do.
            finds_main: True if the process has the main module.

        Raises:
            LostError: If the process has ended.
            BaseException: What pickling raises.
        """
        # The objects too: an address is theirs while they exist.
        things = record.things()
        keys, sent = record.keys(), None
        if record.number not in self.numbers:
            sent = record.number, record.pickled or pickled.ForOne(things, finds_main=finds_main)
        sending = _Sending()
        file = io.BytesIO()
        before = context.get_spawning_popen()
        context.set_spawning_popen(sending)  # type: ignore[arg-type]
        try:
            _Pickler(file, {}).dump(sent)
            _Pickler(file, keys).dump(work)
        finally:
            context.set_spawning_popen(before)
        memory = _native.OwnFd.memory("ringloader-assignment")
        try:
            with open(memory.fd, "wb", closefd=False) as target:
                target.write(file.getvalue())
            os.lseek(memory.fd, 0, os.SEEK_SET)
            self._send(pooled.ASSIGN, [*sending.fds, memory.fd])
        finally:
            memory.close()
        self.numbers.add(record.number)

    def _send(self, message: bytes, fds: list[int]) -> None:
        try:
            while len(fds) > pooled.MOST_FDS:
                socket.send_fds(self.channel, [pooled.MORE_FDS], fds[: pooled.MOST_FDS])
                fds = fds[pooled.MOST_FDS :]
            socket.send_fds(self.channel, [message], fds)
        except OSError as error:
            # Another thread that finds the process dead closes the channel too.
            if isinstance(error, ConnectionError) or self.channel.fileno() < 0:
                raise LostError(
                    f"DataLoader worker (pid(s) {self.process.pid}) exited unexpectedly"
                ) from error
            raise

    def keep(self, numbers: set[int]) -> None:
        """Makes it forget the records with other numbers."""
        held = list(self.numbers - numbers)
        self.numbers &= numbers
        for begin in range(0, len(held), pooled.MOST_DROPPED):
            some = held[begin : begin + pooled.MOST_DROPPED]
            packed = b"".join(pooled.NUMBER.pack(number) for number in some)
            # A process that does not take it has ended or was stopped. The numbers are not used again.
            with contextlib.suppress(OSError):
                self.channel.send(pooled.DROP + packed, socket.MSG_DONTWAIT)

    def end(self) -> None:
        """Ends the process after its assignment, and does not wait for it."""
        with contextlib.suppress(OSError):
            self.channel.send(pooled.END, socket.MSG_DONTWAIT)
        self.channel.close()
        processes.resume([self.process])

    def wait_until_left(self, timeout: float | None) -> bool | None:
        """Waits for the end of an assignment. True: the process has left its memory; None: it has ended."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _POLL_SECONDS if until is None else max(0.0, min(_POLL_SECONDS, until - time.monotonic()))
            is_open = self.channel.fileno() >= 0 and not self._has_closed
            # Another thread may find the process dead, and close its channel.
            with contextlib.suppress(ValueError):
                connection.wait([self.process.sentinel, *([self.channel] if is_open else [])], left)
            with contextlib.suppress(OSError):
                message = self.channel.recv(len(pooled.LEFT), socket.MSG_DONTWAIT)
                if message:
                    return True
                # The process is about to end.
                self._has_closed = True
            if not self.process.is_alive():
                return None
            if until is not None and time.monotonic() >= until:
                return False


class _Sending:
    """Stands for the process that is being started: descriptors are numbered, and sent with the rest."""

    DupFd = pooled.SentFd

    def __init__(self) -> None:
        self.fds: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        self.fds.append(fd)
        return len(self.fds) - 1


class _Pickler(reduction.ForkingPickler):
    """Pickles as multiprocessing does, with keys for objects that the process holds."""

    def __init__(self, file: Any, keys: Mapping[int, Key]) -> None:
        super().__init__(file)
        # By the addresses of the objects.
        self._keys = keys

    def persistent_id(self, thing: Any) -> Key | None:
        return self._keys.get(id(thing))


class Assigned:
    """A pool's process at one iterator: it "ends" when it is given back.

    Has the other attributes of the process object too.

    Args:
        begin: Gives work to a process of the pool, and returns the process.
        give_back: Called with the process once it has left the iterator's memory.
    """

    daemon = True

    def __init__(self, begin: Callable[[], PoolProcess], give_back: Callable[[PoolProcess], None]) -> None:
        self._begin: Callable[[], PoolProcess] | None = begin
        self._give_back = give_back
        self._lent: PoolProcess | None = None
        # True if the process has left the iterator's memory, and lives on.
        self.has_left = False

    def start(self) -> None:
        begin, self._begin = self._begin, None
        assert begin is not None, "a process is started once"
        self._lent = begin()

    def join(self, timeout: float | None = None) -> None:
        if self._lent is not None and not self.has_left and self._lent.wait_until_left(timeout):
            self.has_left = True
            self._give_back(self._lent)

    def is_alive(self) -> bool:
        self.join(0.0)
        return not self.has_left and self._lent is not None and self._lent.is_alive()

    @property
    def exitcode(self) -> int | None:
        self.join(0.0)
        if self.has_left:
            return 0
        code: int | None = None if self._lent is None else self._lent.process.exitcode
        return code

    def terminate(self) -> None:
        if not self.has_left and self._lent is not None:
            self._lent.process.terminate()

    def kill(self) -> None:
        if not self.has_left and self._lent is not None:
            self._lent.process.kill()

    def close(self) -> None:
        """Does nothing: the process is the pool's."""

    @property
    def pid(self) -> int | None:
        pid: int | None = None if self._lent is None else self._lent.process.pid
        return pid

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or self._lent is None:
            raise AttributeError(name)
        return getattr(self._lent.process, name)
