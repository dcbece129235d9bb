"""The processes of a pool, and those of them that one iterator has."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch.multiprocessing

import ringloader._native as _native
from ringloader._launch import forkserver, shared_args, spawn, stuck
from ringloader._launch.pool_objects import Entry, PoolObjects
from ringloader._launch.pool_process import Assigned, LostError, PoolProcess

# Seconds in which a process of a pool that is shut down must end by itself.
_ENDS_WITHIN = 5.0
# Of processes that were lost while they were idle, how many are replaced at the start of one worker.
_LOST_AT_MOST = 3


class Lease:
    """The processes that one iterator has."""

    def __init__(self, crew: Crew, loader: Any, processes: list[PoolProcess], entries: list[Entry]) -> None:
        self._crew = crew
        self._loader = weakref.ref(loader)
        self._idle = processes
        self._entries = entries
        for process in processes:
            process.lend(self)
        # Objects that are sent, and their pickle, by the numbers of those that a process does not hold.
        self._sent: dict[tuple[int, ...], tuple[shared_args.Shared, tuple[Any, ...]]] = {}

    @property
    def context(self) -> Any:
        """Of ``multiprocessing``, that starts the processes."""
        return self._crew.context

    def worker(self, *work: Any) -> Assigned:
        """A process object for one of them. Its work: a worker's end, torch's loop, the arguments of that."""
        return Assigned(lambda: self._begin(work), self._crew.give_back)

    def _begin(self, work: tuple[Any, ...]) -> PoolProcess:
        for _ in range(_LOST_AT_MOST):
            process = self._idle[0] if self._idle else self._crew.lend_one(self, self._own_loader())
            numbers = tuple(entry.number for entry in self._entries if entry.number not in process.numbers)
            try:
                process.assign(self._crew.objects, self._new(numbers), numbers, work)
            except LostError:
                self._take(process)
                self._crew.discard(process)
                continue
            except BaseException:
                # Nothing was sent, or the process is about to find out: it ends.
                self._take(process)
                self._crew.discard(process)
                raise
            self._take(process)
            return process
        raise RuntimeError(
            f"{_LOST_AT_MOST} processes of worker_pool in a row have ended before they got to work"
        )

    def _own_loader(self) -> Any:
        loader = self._loader()
        if loader is None:
            raise RuntimeError("a process of worker_pool was lost, and the loader of its iterator has gone")
        return loader

    def _take(self, process: PoolProcess) -> None:
        if process in self._idle:
            self._idle.remove(process)

    def _new(self, numbers: tuple[int, ...]) -> Any:
        if not numbers:
            return ()
        if numbers not in self._sent:
            found = {entry.number: entry.find() for entry in self._entries}
            self._sent[numbers] = (shared_args.Shared(), tuple((one, found[one]) for one in numbers))
        shared, things = self._sent[numbers]
        return shared_args.Arguments(shared, things)

    def share_nothing_more(self) -> None:
        """All workers have started: gives back what was pickled for them."""
        while self._sent:
            self._sent.popitem()[1][0].close()

    def close(self) -> None:
        """Gives back the processes that got no work. Those that did are given back as they leave."""
        self.share_nothing_more()
        while self._idle:
            self._crew.give_back(self._idle.pop())


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
        # Asked for while the same thread held the lock, below a finalizer or a signal's handler.
        self._returned: list[PoolProcess] = []
        self._ends_idle = False
        self.objects = PoolObjects()
        self.is_shut_down = False

    def is_inherited(self) -> bool:
        """Whether this process is a forked child of the one that made it."""
        return self._process_identity() != self._owner

    @property
    def context(self) -> Any:
        method = self._start_method
        return torch.multiprocessing if method is None else torch.multiprocessing.get_context(method)

    # As `spawn.prepare` looks at a loader.
    num_workers = 1

    @property
    def multiprocessing_context(self) -> Any:
        return self.context

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
            if not process.is_alive():
                self._processes.remove(process)
                process.channel.close()
            elif dropped:
                process.drop(dropped)
        idle = [process for process in self._processes if not process.is_lent]
        keep = 0 if self.is_shut_down else 2 * self._num_workers
        for process in idle[keep:]:
            self._end(process)

    def _end(self, process: PoolProcess) -> None:
        process.end()
        self._processes.remove(process)

    def _note_gone(self, loader: int) -> None:
        self.objects.note_gone(loader)
        if not self.is_inherited():
            self._tidy_if_free()

    def register(self, loader: Any) -> None:
        with self._held():
            self.objects.keep(loader, self._note_gone)

    def lend(self, loader: Any) -> Lease:
        """Processes for an iterator of ``loader``: those that are idle, and new ones for the rest."""
        context = self.context
        forkserver.preload(context)
        spawn.prepare(self)
        _look_up_torch()
        with self._held():
            entries = self._check_in(loader)
            processes = self._find(loader.num_workers, {entry.number for entry in entries})
            return Lease(self, loader, processes, entries)

    def lend_one(self, lease: Lease, loader: Any) -> PoolProcess:
        """Another process, in place of one that was lost."""
        with self._held():
            entries = self._check_in(loader)
            (process,) = self._find(1, {entry.number for entry in entries}, for_one=True)
            process.lend(lease)
        return process

    def _check_in(self, loader: Any) -> list[Entry]:
        if self.is_shut_down:
            raise RuntimeError(
                "the worker_pool of this loader was shut down: make its iterators inside `with pool:` and "
                "before pool.shutdown(), or give it another WorkerPool"
            )
        return self.objects.keep(loader, self._note_gone)

    def _find(self, count: int, needed: set[int], for_one: bool = False) -> list[PoolProcess]:
        """Processes that are idle, or new. ``for_one``: for an iterator whose memory is there already."""
        idle = [process for process in self._processes if not process.is_lent]
        found = [process for process in idle if needed <= process.numbers][:count]
        others = [process for process in idle if process not in found]
        missing = count - len(found)
        forks = self.context.get_start_method() == "fork"
        for process in others[:missing]:
            if forks:
                # A new one inherits what this one cannot be given without a pickle.
                self._end(process)
            else:
                found.append(process)
        inherited = self.objects.all() if forks and len(found) < count else {}
        while len(found) < count:
            channels = [process.channel for process in self._processes]
            process = PoolProcess(self.context, dict(inherited), channels)
            process.is_for_one = for_one and forks
            self._processes.append(process)
            found.append(process)
        return found

    def give_back(self, process: PoolProcess) -> None:
        """A process has left its iterator. From anywhere."""
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
        """The pool has gone: has all processes end. From a finalizer."""
        if not self.is_inherited():
            for process in self._processes:
                process.end()

    def shut_down(self) -> None:
        if self._holder == threading.get_ident():
            # What was interrupted ends those that are idle, and who returns one later ends that.
            self.is_shut_down = self._ends_idle = True
            for process in list(self._processes):
                if process.is_lent:
                    process.process.terminate()
            return
        with self._held():
            self.is_shut_down = True
            processes, self._processes = self._processes, []
        for process in processes:
            if process.is_lent:
                process.process.terminate()
            process.end()
        group = stuck.Group([process.process for process in processes])
        for process in processes:
            group.join(process.process, _ENDS_WITHIN)
        group.kill()
