"""The processes of a pool, and their leases to iterators."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch.multiprocessing

import ringloader._native as _native
from ringloader._core import epochs
from ringloader._core.make_transport import WorkerKind
from ringloader._features import spawn_server
from ringloader._features.pools.objects import LoaderObjects, PoolRecord
from ringloader._features.pools.process import Assigned, LostError, PoolProcess
from ringloader._start import fallback, guard
from ringloader._start.processes import Group, preload_fork_server
from ringloader._transport import budget

if TYPE_CHECKING:
    from ringloader._start.processes import Starter
    from ringloader._torch.protocols import TorchLoader
    from ringloader._torch.select_path import Reason

# Seconds in which a process of a pool that is shut down must end by itself.
_ENDS_WITHIN = 5.0


class Lease:
    """The processes that an iterator has on lease.

    Args:
        pool: The pool of the processes. It lives at least as long as the lease.
        crew: The processes of the pool.
        loader: The iterator's loader.
        record: The objects of the loader.
        finds_main: True if the processes have the main module.
    """

    # The argument that makes them fork, as an error names it.
    fork = "start_method='fork' to the WorkerPool"

    def __init__(
        self,
        pool: object,
        crew: Crew,
        loader: TorchLoader,
        record: PoolRecord,
        finds_main: bool,
    ) -> None:
        self._crew = crew
        self.finds_main = finds_main
        self._loader = weakref.ref(loader)
        # The iterator may be all that has them. One that persists is its loader's.
        self._keeps_alive: tuple[object, ...] = (pool, None if loader.persistent_workers else loader)
        # None once it is closed: a report of the iterator may have this one for long.
        self.record: PoolRecord | None = record
        # Processes that have no work of it yet.
        self.idle: list[PoolProcess] = []

    @property
    def context(self) -> Any:
        """The context of ``multiprocessing`` that starts the processes."""
        return self._crew.context

    def worker(self, worker_end: Any, work: Any) -> Assigned:
        """Returns a process object for one of them."""
        return Assigned(lambda: self._begin((worker_end, work)), self._crew.give_back)

    def start(self, handle: Any) -> None:
        """Gives a worker's work to one of the processes."""
        handle.start()

    def lives_on(self, handle: Any) -> bool:
        """True if a worker's process has left the iterator's memory, and lives on."""
        return bool(handle.has_left)

    def note_all_started(self) -> None:
        """Does nothing: the pool has pickled what they share."""

    def _begin(self, work: tuple[Any, ...]) -> PoolProcess:
        while True:
            process = self._take()
            # One that starts may end as all that follow would.
            has_worked = bool(process.numbers)
            try:
                assert self.record is not None, "it is not closed"
                process.assign(self.record, work, self.finds_main)
                return process
            except BaseException as error:
                # Nothing was sent, or the process is about to find out: it ends.
                self._crew.discard(process)
                if not (has_worked and isinstance(error, LostError)):
                    raise

    def _take(self) -> PoolProcess:
        if not self.idle:
            loader = self._loader()
            if loader is None:
                raise RuntimeError(
                    "a process of worker_pool was lost, and the loader of its iterator has gone"
                )
            self._crew.fill(self, loader, 1)
        return self.idle.pop(0)

    def __del__(self) -> None:
        # An interrupt may lose it before anybody has it.
        self.close()

    def close(self) -> None:
        """Gives back the processes that got no work. The others are given back as they leave."""
        while self.idle:
            self._crew.give_back(self.idle.pop())
        self.record, self._keeps_alive = None, ()


@functools.cache
def _look_up_torch() -> None:
    """Makes the native side look up torch's names, as the first engine does.

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
        self.objects = LoaderObjects(PoolRecord)
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
            raise RuntimeError("worker_pool is in use: a signal handler or finalizer interrupted that use")
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
            self._returned.pop().is_lent = False
        numbers = self.objects.numbers()
        for process in list(self._processes):
            if process.is_lost():
                self._processes.remove(process)
                process.channel.close()
                # So that it is no zombie until another process is started.
                process.process.join(_ENDS_WITHIN)
            else:
                process.keep(numbers)
        # So that they are no zombies until another process is started.
        self._ending = [process for process in self._ending if process.is_alive()]
        keep = 0 if self.is_shut_down else 2 * self._num_workers
        for process in self._idle()[keep:]:
            self._end(process)

    def _idle(self) -> list[PoolProcess]:
        """Processes without an iterator, the most useful first: they hold the most, or are the newest."""
        idle = [process for process in reversed(self._processes) if not process.is_lent]
        return sorted(idle, key=lambda process: -len(process.numbers))

    def _end(self, process: PoolProcess) -> None:
        process.end()
        self._processes.remove(process)
        self._ending.append(process)

    def _add_gone(self, loader: int) -> None:
        self.objects.add_gone(loader)
        if not self.is_inherited():
            self._tidy_if_free()

    def lend(self, pool: object, loader: TorchLoader, count: int, most: int) -> Lease:
        """Lends processes to an iterator of ``loader``: idle ones, and new ones for the rest.

        Args:
            pool: The pool, which ends all processes when it goes.
            loader: The loader.
            count: The processes that it begins with.
            most: The most that it may ask for.
        """
        context = self.context
        guard.refuse_in_import(context)
        preload_fork_server(context)
        spawn_server.start_server(self, context)
        _look_up_torch()
        with self._held():
            self._check_open()
            record = self.objects.record_of(loader, self._add_gone)
        finds_main = self._is_forked() or fallback.main_is_found()
        lease = Lease(pool, self, loader, record, finds_main)
        self.fill(lease, loader, count)
        if self._is_forked():
            self._have_idle(lease, most - count)
        return lease

    def _have_idle(self, lease: Lease, count: int) -> None:
        """Starts processes that an iterator may ask for later: one that is forked then has its memory too."""
        assert lease.record is not None, "it is not closed"
        with self._held():
            self._check_open()
            for _ in range(count - len(self._serving(lease.record))):
                self._start()

    def fill(self, lease: Lease, loader: TorchLoader, count: int) -> None:
        """Lends processes to a lease, and renews its record where they cannot have the state of before.

        Args:
            lease: The lease.
            loader: Its loader.
            count: How many processes.
        """
        record = lease.record
        assert record is not None, "it is not closed"
        # Not under the lock: it calls the user's code.
        made = None if record.is_ready() else record.made_ready(lease.finds_main)
        with self._held():
            self._check_open()
            if not record.is_ready():
                record.set_ready(made)
            found = self._serving(record)[:count]
            holding = [process for process in found if record.number in process.numbers]
            if record.is_for_each and len(holding) < count:
                # Each gets a pickle of its own, and all of them in one state.
                record = self.objects.renewed(loader, record)
                record.set_ready(None)
                found = self._serving(record)[:count]
            while len(found) < count:
                found.append(self._start())
            lease.record = record
            for process in found:
                process.is_lent = True
            lease.idle += found

    def _check_open(self) -> None:
        if self.is_shut_down:
            raise RuntimeError(
                "the worker_pool of this loader was shut down: make its iterators inside `with pool:` and "
                "before pool.shutdown(), or give it another WorkerPool"
            )

    def _serving(self, record: PoolRecord) -> list[PoolProcess]:
        """Idle processes that can serve a loader: first the ones that hold its objects."""
        serving = [process for process in self._idle() if process.can_serve(record)]
        return sorted(serving, key=lambda process: record.number not in process.numbers)

    def _is_forked(self) -> bool:
        return bool(self.context.get_start_method() == "fork")

    def _start(self) -> PoolProcess:
        process = PoolProcess(self.context, [process.channel for process in self._processes], Lease.fork)
        self._processes.append(process)
        return process

    def give_back(self, process: PoolProcess) -> None:
        """Takes back a process that has left its iterator. Called from anywhere."""
        if not self.is_inherited():
            self._returned.append(process)
            self._tidy_if_free()

    def discard(self, process: PoolProcess) -> None:
        """Kills a process in an unknown state."""
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
            self.objects = LoaderObjects(PoolRecord)
        for process in processes:
            if process.is_lent:
                process.process.terminate()
            process.end()
        _wait_for([*processes, *ending])


def _wait_for(processes: list[PoolProcess]) -> None:
    """Waits for processes that were told to end, and kills the ones that are left."""
    group = Group([process.process for process in processes])
    for process in processes:
        group.join(process.process, _ENDS_WITHIN)
    group.kill()


class Lent(WorkerKind):
    """The workers of an iterator that a pool lends.

    Args:
        pool: The pool.
        crew: What the pool lends from.
    """

    def __init__(self, pool: object, crew: Any) -> None:
        self._pool = pool
        self._crew = crew

    def refuse(self, reason: Reason) -> None:
        if not self.are_here:
            # torch would start as many workers on this machine.
            raise RuntimeError(
                f"the workers of {self._pool!r} cannot be used: {reason.text}; leave worker_pool "
                "out for workers on this machine"
            )

    def told(self, loader: TorchLoader) -> epochs.Told | None:
        return epochs.told_to_kept(loader)

    def starter(self, loader: TorchLoader, running: int, most: int) -> Starter:
        with budget.asking(OSError):
            lease: Starter = self._crew.lend(self._pool, loader, running, most)
        return lease
