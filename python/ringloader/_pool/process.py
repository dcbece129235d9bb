"""The main process's end of a process of a pool, and the process object that stands for it at an iterator."""

from __future__ import annotations

import contextlib
import io
import os
import select
import socket
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection, context, reduction
from typing import Any

from ringloader._common import memory_file
from ringloader._pool import main as pooled
from ringloader._pool.objects import Entry, Parcel
from ringloader._start import guard, processes, spawn
from ringloader._start.main_module import Look

# Seconds between two looks whether a process that is waited for has left or ended.
_LOOK = 0.05


class PoolProcess:
    """A process of a pool.

    Args:
        context: The ``multiprocessing`` context that starts it.
        inherited: What it holds from the beginning, by number, if it is forked.
        others: Ends of the sockets of the pool's other processes.
        moment: When it is forked. Processes of one moment inherited their objects in one state. Processes
            that are sent their objects all have the same moment.
        fork: The argument by which it would be forked, for people.
    """

    def __init__(
        self,
        context: Any,
        inherited: dict[int, Any],
        others: Sequence[socket.socket],
        moment: int,
        fork: str = guard.FORK,
    ) -> None:
        self.numbers = set(inherited)
        self.moment = moment
        # True while an iterator has the process.
        self.is_lent = False
        # True if it was forked in the midst of an iteration: it has what was there then, and ends with it.
        self.is_for_one = False
        self._lease: Callable[[], object] = _no_lease
        self._is_given_back = False
        self._is_assigned = False
        self._has_said_all = False
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            parent = os.pidfd_open(os.getpid())
            try:
                end = pooled.Assignments(theirs, parent, [*others, self.channel])
                made = context.Process(target=pooled.main, args=(end, inherited), daemon=True)
                self.process = spawn.by_server(made)
                with guard.told(context, fork):
                    self.process.start()
                processes.note_started(self.process)
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

    def lend(self, lease: object) -> None:
        """Lends the process to the iterator that has this lease, until it is given back."""
        self._lease, self._is_assigned, self._is_given_back = weakref.ref(lease), False, False
        self.is_lent = True

    def note_given_back(self) -> None:
        """Notes that the iterator is done, and the pool will have it idle. Called before the lease goes."""
        self._is_given_back = True

    def recover(self) -> None:
        """Takes it back if an interrupt has lost the lease: idle if it has left its iterator, else killed."""
        # ORDERING: the lease first: another thread notes that it gives the process back, then drops it.
        if self.is_lent and self._lease() is None and not self._is_given_back:
            if not self._is_assigned or self.wait_until_left(0.0):
                self.is_lent = False
            else:
                self.process.kill()

    def assign(self, entries: Sequence[Entry], work: tuple[Any, ...], look: Look | None = None) -> None:
        """Sends an assignment.

        Args:
            entries: What its loader has: sent by number where the process holds it, and first where not.
                Each has a parcel by now, or is for each process.
            work: What the process is to do.
            look: Looks through the pickles, and may raise; None if nothing need be looked for.

        Raises:
            RuntimeError: If the process has ended.
        """
        parcels: list[Parcel] = []
        for entry in entries:
            _add_missing(entry, self.numbers, parcels)
        sent = {one.number for parcel in parcels for one in parcel.entries}
        # The objects too: an address is theirs as long as they are there.
        found = ((entry.number, entry.find()) for entry in entries)
        things = {number: thing for number, thing in found if thing is not None}
        held = {id(thing): number for number, thing in things.items() if number in self.numbers | sent}
        for_each = [(number, thing) for number, thing in things.items() if id(thing) not in held]
        numbered = [([one.number for one in parcel.entries], parcel.pickled) for parcel in parcels]
        sending = _Sending()
        file = io.BytesIO()
        before = context.get_spawning_popen()
        context.set_spawning_popen(sending)  # type: ignore[arg-type]
        try:
            _Pickler(file, held).dump(numbered)
            begin = file.tell()
            _Pickler(file, held).dump((for_each, work))
        finally:
            context.set_spawning_popen(before)
        data = file.getvalue()
        if look is not None:
            look.through(data[begin:])
        if len(data) <= pooled.MOST_BYTES:
            self._send(pooled.ASSIGN + data, sending.fds)
        else:
            memory = memory_file.make("ringloader-assignment")
            try:
                with open(memory, "wb", closefd=False) as target:
                    target.write(data)
                os.lseek(memory, 0, os.SEEK_SET)
                self._send(pooled.ASSIGN_LARGE, [*sending.fds, memory])
            finally:
                os.close(memory)
        self.numbers.update(sent, things)

    def _send(self, message: bytes, fds: list[int]) -> None:
        self._is_assigned = True
        try:
            while len(fds) > pooled.MOST_FDS:
                socket.send_fds(self.channel, [pooled.MORE_FDS], fds[: pooled.MOST_FDS])
                fds = fds[pooled.MOST_FDS :]
            socket.send_fds(self.channel, [message], fds)
        except OSError as error:
            # Another thread that finds the process dead closes the channel too.
            if isinstance(error, ConnectionError) or self.channel.fileno() < 0:
                raise RuntimeError(
                    f"DataLoader worker (pid(s) {self.process.pid}) exited unexpectedly"
                ) from error
            raise

    def drop(self, numbers: list[int]) -> None:
        """Has it forget what no loader has any more."""
        held = [number for number in numbers if number in self.numbers]
        self.numbers.difference_update(held)
        for begin in range(0, len(held), pooled.MOST_DROPPED):
            some = held[begin : begin + pooled.MOST_DROPPED]
            packed = b"".join(pooled.NUMBER.pack(number) for number in some)
            # A process that does not take it has ended or was stopped. The numbers are not used again.
            with contextlib.suppress(OSError):
                self.channel.send(pooled.DROP + packed, socket.MSG_DONTWAIT)

    def end(self) -> None:
        """Has the process end after its assignment, and does not wait for it."""
        with contextlib.suppress(OSError):
            self.channel.send(pooled.END, socket.MSG_DONTWAIT)
        self.channel.close()
        processes.resume([self.process])

    def wait_until_left(self, timeout: float | None) -> bool | None:
        """Waits for the end of an assignment. True: the process has left its memory; None: it has ended."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _LOOK if until is None else max(0.0, min(_LOOK, until - time.monotonic()))
            is_open = self.channel.fileno() >= 0 and not self._has_said_all
            # Another thread may find the process dead, and close its channel.
            with contextlib.suppress(ValueError):
                connection.wait([self.process.sentinel, *([self.channel] if is_open else [])], left)
            with contextlib.suppress(OSError):
                message = self.channel.recv(len(pooled.LEFT), socket.MSG_DONTWAIT)
                if message:
                    return True
                # The process is about to end.
                self._has_said_all = True
            if not self.process.is_alive():
                return None
            if until is not None and time.monotonic() >= until:
                return False


def _no_lease() -> None:
    return None


def _add_missing(entry: Entry, held: set[int], parcels: list[Parcel]) -> None:
    """Adds the parcel of ``entry``, after those that it refers to, where a process does not hold them."""
    parcel = entry.parcel
    if parcel is None or parcel in parcels or entry.number in held:
        return
    for one in parcel.refers:
        _add_missing(one, held, parcels)
    parcels.append(parcel)


class _Sending:
    """Stands for the process that is being started: descriptors are numbered, and sent with the rest."""

    DupFd = pooled.SentFd

    def __init__(self) -> None:
        self.fds: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        self.fds.append(fd)
        return len(self.fds) - 1


class _Pickler(reduction.ForkingPickler):
    """Pickles as multiprocessing does, with numbers for what the process holds."""

    def __init__(self, file: Any, held: Mapping[int, int]) -> None:
        super().__init__(file)
        # Numbers by the address of what they are of.
        self._held = held

    def persistent_id(self, thing: Any) -> int | None:
        return self._held.get(id(thing))


class Assigned:
    """A pool's process at one iterator: it "ends" when it is given back.

    Has the other attributes of the process object too.

    Args:
        begin: Has a process of the pool begin, and returns it.
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
    def process(self) -> Any:
        """The process of the pool, as ``multiprocessing`` knows it."""
        return None if self._lent is None else self._lent.process

    @property
    def pid(self) -> int | None:
        pid: int | None = None if self._lent is None else self._lent.process.pid
        return pid

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or self._lent is None:
            raise AttributeError(name)
        return getattr(self._lent.process, name)
