"""The processes of a pool, and their leases to iterators."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch.multiprocessing

import ringloader._native as _native
from ringloader._pool.objects import Entry, Parcel, PoolObjects
from ringloader._pool.process import Assigned, PoolProcess
from ringloader._start import guard, spawn
from ringloader._start.main_module import Look, look_for
from ringloader._start.pickled import NotForAllError
from ringloader._start.processes import Group, preload_fork_server

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

# Seconds in which a process of a pool that is shut down must end by itself.
_ENDS_WITHIN = 5.0


class Lease:
    """The processes that an iterator has on lease."""

    # The argument by which they are forked, for people.
    fork = "start_method='fork' to the WorkerPool"

    def __init__(
        self,
        crew: Crew,
        loader: TorchLoader,
        processes: list[PoolProcess],
        entries: list[Entry],
        look: Look | None = None,
    ) -> None:
        self._crew = crew
        # Looks through what is sent; None if nothing need be looked for.
        self._look = look
        self._loader = weakref.ref(loader)
        self._entries = entries
        self._idle: list[PoolProcess] = []
        # That of which the processes are; a successor may be of another.
        self._moment = processes[0].moment
        self.take_over(processes)

    def take_over(self, processes: list[PoolProcess]) -> None:
        """The processes are this one's, until they are given back."""
        for process in processes:
            process.lend(self)
        self._idle += processes

    @property
    def context(self) -> Any:
        """The context of ``multiprocessing`` that starts the processes."""
        return self._crew.context

    def worker(self, *work: Any) -> Assigned:
        """Returns a process object for one of them. ``work``: a worker's end, and a ``Work`` for the loop."""
        return Assigned(lambda: self._begin(work), self._crew.give_back)

    def _begin(self, work: tuple[Any, ...]) -> PoolProcess:
        if not self._idle:
            loader = self._loader()
            if loader is None:
                raise RuntimeError(
                    "a process of worker_pool was lost, and the loader of its iterator has gone"
                )
            self._crew.lend_successor(self, loader, self._moment)
        process = self._idle.pop(0)
        try:
            self._pickle_for(process)
            process.assign(self._entries, work, self._look)
        except BaseException:
            # Nothing was sent, or the process is about to find out: it ends.
            self._crew.discard(process)
            raise
        return process

    def _pickle_for(self, process: PoolProcess) -> None:
        """Has what the process does not hold be pickled, where that was not done for another one before."""
        for entry in self._entries:
            while entry.number not in process.numbers and entry.parcel is None and not entry.is_for_each:
                look = None if self._look is None else self._look.through
                try:
                    self._crew.add(Parcel(entry, self._entries, look))
                except NotForAllError:
                    entry.is_for_each = True

    def close(self) -> None:
        """Gives back the processes that got no work. Those that did are given back as they leave."""
        while self._idle:
            self._crew.give_back(self._idle.pop())
        # A report of the iterator may have this one for long.
        self._entries = []


@functools.cache
def _look_up_torch() -> None:
    """Has the native side look up torch's names, as the first engine does.

    INVARIANT: before processes are forked: one that is forked while another thread looks them up would wait
    for that thread for ever. A pool forks before its iterator's engine is made.
    """
    _native.Engine(1, 1, 1 << 20).close()


class Crew:
    """The processes of a pool in one process."""

    _process_identity = staticmethod(_native.process_identity)

    def __init__(self, num_workers: int, start_method: str | None) -> None:
        self._num_workers = num_workers
        self._start_method = start_method
        self._owner = self._process_identity()
        self._lock = threading.Lock()
        self._holder: int | None = None
        self._processes: list[PoolProcess] = []
        # Processes that were told to end, and are still to be waited for.
        self._ending: list[PoolProcess] = []
        # Asked for while the same thread held the lock, below a finalizer or a signal's handler.
        self._returned: list[PoolProcess] = []
        self._ends_idle = False
        self._moments = itertools.count(1)
        self.objects = PoolObjects()
        self.is_shut_down = False

    def is_inherited(self) -> bool:
        """True if this process is a forked child of the one that made the crew."""
        return self._process_identity() != self._owner

    @property
    def context(self) -> Any:
        method = self._start_method
        return torch.multiprocessing if method is None else torch.multiprocessing.get_context(method)

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        if self._holder == threading.get_ident():
            raise RuntimeError("worker_pool is at work already, below a signal handler or a finalizer")
        try:
            with self._lock:
                self._holder = threading.get_ident()
                try:
                    self._tidy()
                    yield
                    self._tidy()
                finally:
                    self._holder = None
        finally:
            self._tidy_if_free()

    def _tidy_if_free(self) -> None:
        # Loaders go anywhere, also where the lock is held: its holder looks afterwards.
        while (self._returned or self._ends_idle or self.objects.has_gone()) and self._lock.acquire(
            blocking=False
        ):
            self._holder = threading.get_ident()
            try:
                self._ends_idle = False
                self._tidy()
            finally:
                self._holder = None
                self._lock.release()

    def _tidy(self) -> None:
        while self._returned:
            returned = self._returned.pop()
            returned.is_lent = False
            if returned.is_for_one and returned in self._processes:
                self._end(returned)
        self.objects.tidy()
        dropped, self.objects.dropped = self.objects.dropped, []
        for process in list(self._processes):
            process.recover()
            if process.is_lost():
                self._processes.remove(process)
                process.channel.close()
                # So that it is no zombie until another process is started.
                process.process.join(_ENDS_WITHIN)
            elif dropped:
                process.drop(dropped)
        # So that they are no zombies until another process is started.
        self._ending = [process for process in self._ending if process.is_alive()]
        keep = 0 if self.is_shut_down else 2 * self._num_workers
        for process in self._idle()[keep:]:
            self._end(process)

    def _idle(self) -> list[PoolProcess]:
        """Processes without an iterator. Those come last that can be missed best: few of one moment, old."""
        idle = [process for process in self._processes if not process.is_lent]
        number = collections.Counter(process.moment for process in idle)
        return sorted(idle, key=lambda process: (-number[process.moment], -process.moment))

    def _end(self, process: PoolProcess) -> None:
        process.end()
        self._processes.remove(process)
        self._ending.append(process)

    def _note_gone(self, loader: int) -> None:
        self.objects.note_gone(loader)
        if not self.is_inherited():
            self._tidy_if_free()

    def register(self, loader: TorchLoader) -> None:
        with self._held():
            self.objects.keep(loader, self._note_gone)

    def lend(self, loader: TorchLoader) -> Lease:
        """Processes for an iterator of ``loader``: those that are idle, and new ones for the rest."""
        context = self.context
        guard.refuse_in_import(context, Lease.fork)
        look = look_for(context, Lease.fork)
        preload_fork_server(context)
        spawn.keep_server(self, context)
        _look_up_torch()
        with self._held():
            entries = self._check_in(loader)
            return Lease(self, loader, self._find(loader.num_workers, entries), entries, look)

    def lend_successor(self, lease: Lease, loader: TorchLoader, moment: int) -> None:
        """Lends another process, in place of one that was lost: of that moment, where there is one.

        Args:
            lease: Who gets it. The memory of its iterator is there already.
            loader: Its loader.
            moment: The moment.
        """
        with self._held():
            entries = self._check_in(loader)
            found = self._find(1, entries, moment, for_one=True) or self._find(1, entries, for_one=True)
            lease.take_over(found)

    def add(self, parcel: Parcel) -> None:
        """Has all processes that need it be sent this parcel."""
        with self._held():
            self.objects.add(parcel)

    def _check_in(self, loader: TorchLoader) -> list[Entry]:
        if self.is_shut_down:
            raise RuntimeError(
                "the worker_pool of this loader was shut down: make its iterators inside `with pool:` and "
                "before pool.shutdown(), or give it another WorkerPool"
            )
        return self.objects.keep(loader, self._note_gone)

    def _find(
        self, count: int, entries: list[Entry], moment: int | None = None, for_one: bool = False
    ) -> list[PoolProcess]:
        """Processes that are idle, or new; all of them will hold the entries in the same state.

        Args:
            count: How many.
            entries: What they must hold.
            moment: Of which they must be; None for any one. None are found if there are too few of it.
            for_one: For an iterator whose memory is there already.
        """
        needed = {entry.number for entry in entries}
        if self.context.get_start_method() == "fork":
            return self._find_inheriting(count, needed, moment, for_one)
        found = sorted(self._idle(), key=lambda process: not needed <= process.numbers)[:count]
        while len(found) < count:
            found.append(self._start({}, 0))
        for_each = [entry for entry in entries if entry.is_for_each]
        if any(entry.number not in process.numbers for entry in for_each for process in found):
            self.objects.renew(for_each)
        return found

    def _find_inheriting(
        self, count: int, needed: set[int], moment: int | None, for_one: bool
    ) -> list[PoolProcess]:
        idle = self._idle()
        holding: dict[int, list[PoolProcess]] = {}
        for process in idle:
            if needed <= process.numbers and moment in (None, process.moment):
                holding.setdefault(process.moment, []).append(process)
        enough = [processes for processes in holding.values() if len(processes) >= count]
        if enough:
            # The fewest: larger iterators find the others. Of as many, the newest, which come first.
            return min(enough, key=len)[:count]
        if moment is not None:
            return []
        # New ones inherit what these cannot be given without a pickle: those that hold an older state of it
        # end, so that it is not seen again, and so many of the others that there are not more than before.
        ended = [process for processes in holding.values() for process in processes]
        others = [process for process in reversed(idle) if process not in ended]
        for process in ended + others[: max(0, count - len(ended))]:
            self._end(process)
        inherited, moment = self.objects.all(), next(self._moments)
        started: list[PoolProcess] = []
        while len(started) < count:
            started.append(self._start(inherited, moment))
            started[-1].is_for_one = for_one
        return started

    def _start(self, inherited: dict[int, Any], moment: int) -> PoolProcess:
        channels = [process.channel for process in self._processes]
        process = PoolProcess(self.context, dict(inherited), channels, moment, Lease.fork)
        self._processes.append(process)
        return process

    def give_back(self, process: PoolProcess) -> None:
        """Takes back a process that has left its iterator. Called from anywhere."""
        if not self.is_inherited():
            process.note_given_back()
            self._returned.append(process)
            self._tidy_if_free()

    def discard(self, process: PoolProcess) -> None:
        """Ends a process of which it is not known what it does."""
        process.process.kill()
        with self._held():
            if process in self._processes:
                self._end(process)

    def end(self) -> None:
        """Ends all processes. Called from a finalizer: the pool has gone.

        Those that iterators still have end with these, which wait for them.
        """
        if not self.is_inherited():
            processes, returned = list(self._processes), list(self._returned)
            for process in processes:
                process.end()
            idle = [process for process in processes if not process.is_lent or process in returned]
            _wait_for([*self._ending, *idle])

    def shut_down(self) -> None:
        if self._holder == threading.get_ident():
            # The call that this one interrupts ends the idle ones. One that is returned later is ended then.
            self.is_shut_down = self._ends_idle = True
            for process in list(self._processes):
                if process.is_lent:
                    process.process.terminate()
            return
        with self._held():
            self.is_shut_down = True
            processes, self._processes = self._processes, []
            ending, self._ending = self._ending, []
            # The pickles of all objects go too.
            self.objects = PoolObjects()
        for process in processes:
            if process.is_lent:
                process.process.terminate()
            process.end()
        _wait_for([*processes, *ending])


def _wait_for(processes: list[PoolProcess]) -> None:
    """Waits for processes that were told to end, and kills those that are left."""
    group = Group([process.process for process in processes])
    for process in processes:
        group.join(process.process, _ENDS_WITHIN)
    group.kill()
