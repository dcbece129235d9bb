"""Starts and ends of worker processes.

They start one at a time, and where a fork server starts them, with torch imported. At their end they may be
busy or stopped, or wait in the kernel where no signal reaches them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import context, forkserver, util
from multiprocessing import process as multiprocessing_process
from typing import TYPE_CHECKING, Any, Protocol

import torch.multiprocessing

from ringloader._common import proc
from ringloader._log import logger
from ringloader._start import fallback, guard
from ringloader._start.pickled import ForOne, NotForAllError, Pickled, for_all
from ringloader._worker import entry

if TYPE_CHECKING:
    from ringloader._common.protocols import Handle
    from ringloader._torch.protocols import TorchLoader

# Seconds of a start's wait for the start of another thread, which may itself wait for this one.
_PATIENCE_S = 5.0
_starting = threading.RLock()
# Modules that the fork server imports before it forks, so that not every worker must.
_PRELOADED = ["__main__", "torch", "numpy.random", "ringloader._worker.entry"]
# Seconds between two looks at processes that are waited for.
_POLL_SECONDS = 0.05
# Seconds in which processes that were killed have gone, all together.
_KILLED_WITHIN = 1.0

# INVARIANT: processes of this package alone, so that no other code's is ever continued or killed. They are
# children of the process below.
_started: weakref.WeakSet[Any] = weakref.WeakSet()
_started_by: int | None = None


def _begin_anew() -> None:
    # In a forked child no other thread starts workers.
    global _starting
    _starting = threading.RLock()


os.register_at_fork(after_in_child=_begin_anew)


@contextlib.contextmanager
def one_start_at_a_time() -> Iterator[None]:
    """Keeps other threads from making iterators with worker processes, and from starting any, meanwhile.

    torch draws while it makes an iterator, without the interpreter lock. Its generator, and the C library
    where torch calls an operator for the first time, have locks: a worker that is forked at that moment would
    wait for them without end.
    """
    lock, is_held = _starting, False
    try:
        is_held = lock.acquire(timeout=_PATIENCE_S)
        yield
    finally:
        if is_held:
            lock.release()


def preload_fork_server(context: Any) -> None:
    """Makes the fork server import torch, unless it was started before.

    One server serves the whole process. Where it runs already, or the program has said what it imports
    (``multiprocessing.set_forkserver_preload``), nothing changes.

    No module of the user's: the server looks for it in other places than the program does, ends if the
    module's import raises, and would give what the module opens or draws to all workers alike.

    Args:
        context: The ``multiprocessing`` context that starts the workers.
    """
    if context.get_start_method() != "forkserver":
        return
    server = getattr(forkserver, "_forkserver", None)
    preloaded = getattr(server, "_preload_modules", None)
    if getattr(server, "_forkserver_pid", 0) is None and preloaded == ["__main__"]:
        context.set_forkserver_preload(_PRELOADED)


def kill(process: Any) -> None:
    """Ends a process that was started, whatever it is in, and waits for its end."""
    process.kill()
    process.join()


def start(process: Any, context: Any, fork: str = guard.FORK) -> None:
    """Starts a process, which is continued at exit: ``multiprocessing`` waits for its end without a limit.

    Args:
        process: The process.
        context: The ``multiprocessing`` context that starts it.
        fork: The argument by which it would be forked.
    """
    global _started_by
    with guard.explaining_missing_guard(context, fork):
        process.start()
    if _started_by != os.getpid():
        _started_by = os.getpid()
        _started.clear()
        # Before `multiprocessing` terminates and joins what is left. It keeps this for the process that asks.
        util.Finalize(None, _resume_at_exit, exitpriority=0)
    _started.add(process)


def resume(processes: Iterable[Any]) -> None:
    """Continues processes that a signal has stopped, so that they can end as they were told."""
    for process in processes:
        if proc.state_of(process.pid) == "T":
            _continue(process)


def _continue(process: Any) -> None:
    # A child that has ended keeps its number until it is waited for, so the signal reaches no other.
    if process.is_alive():
        with contextlib.suppress(OSError):
            os.kill(process.pid, signal.SIGCONT)


def _is_left(process: Any) -> bool:
    """True if the process has not ended. ``is_alive`` stays true if other code has waited for it."""
    if not process.is_alive():
        return False
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        # The process has another user now, so it exists.
        return True
    return True


class Group:
    """Processes that have been told to end.

    Args:
        processes: ``multiprocessing``'s process objects, or a pool's.
    """

    def __init__(self, processes: Sequence[Any]) -> None:
        self._processes = processes
        # When it has waited long enough for all of them.
        self._until: float | None = None
        self._is_terminated = False

    def join(self, process: Any, timeout: float) -> None:
        """Waits for one of them as its ``join`` does, and continues the ones that are stopped.

        All of them together have ``timeout`` seconds from the first call, and again once they are terminated.
        """
        if self._until is None:
            self._until = time.monotonic() + timeout
        until = self._until
        process.join(max(min(until - time.monotonic(), _POLL_SECONDS), 0.0))
        while _is_left(process) and (left := until - time.monotonic()) > 0:
            resume(self._processes)
            process.join(min(left, _POLL_SECONDS))

    def terminate(self) -> None:
        """Terminates all that are left, the first time."""
        if self._is_terminated:
            return
        self._is_terminated, self._until = True, None
        for process in self._processes:
            if _is_left(process):
                process.terminate()

    def kill(self) -> None:
        """Kills the ones that are left. Waits for none that survives even that."""
        left = [process for process in self._processes if _is_left(process)]
        for process in left:
            process.kill()
        until = time.monotonic() + _KILLED_WITHIN
        for process in left:
            process.join(max(until - time.monotonic(), 0.0))
        for process in left:
            if _is_left(process):
                _abandon(process)


def _abandon(process: Any) -> None:
    """The process ends once its system call returns. The exit of this one does not wait for that."""
    logger.warning(
        "process %s was killed and has not ended within %s s: it is in a system call that cannot be "
        "interrupted (state %s), and keeps what it has mapped until that returns",
        process.pid,
        _KILLED_WITHIN,
        proc.state_of(process.pid),
    )
    # A pool's stands for one of multiprocessing's.
    behind = getattr(process, "process", process)
    _started.discard(behind)
    getattr(multiprocessing_process, "_children", set()).discard(behind)


def end(process: Any, timeout: float) -> None:
    """Waits until a process that was told to end has done so, and kills it after ``timeout`` seconds."""
    group = Group([process])
    group.join(process, timeout)
    group.kill()


def _resume_at_exit() -> None:
    # Whatever their state: this takes back a signal that was sent to stop one and has not stopped it yet.
    for process in list(_started):
        _continue(process)


class Starter(Protocol):
    """Starts the workers of one iterator.

    Attributes:
        fork: The argument that makes them fork, as an error names it.
    """

    fork: str

    @property
    def context(self) -> Any:
        """The context of ``multiprocessing`` that starts the processes."""

    def worker(self, worker_end: Any, work: Any) -> Handle:
        """Returns the handle of a worker that does not run yet: its end of the transport, and its work."""

    def start(self, handle: Handle) -> None:
        """Starts a worker.

        Raises:
            BaseException: An error of the start. It does not run then.
        """

    def lives_on(self, handle: Handle) -> bool:
        """True if a worker has left the iterator's memory, and its process lives on."""

    def note_all_started(self) -> None:
        """Gives back what workers share as they start: one that starts later gets its own."""

    def close(self) -> None:
        """Ends what is kept for workers that start later."""


class NewProcesses:
    """Starts a process for each worker.

    Args:
        loader: The iterator's loader.
    """

    fork = guard.FORK

    def __init__(self, loader: TorchLoader) -> None:
        self.context = loader.multiprocessing_context or torch.multiprocessing
        guard.refuse_in_import(self.context)
        preload_fork_server(self.context)
        # A forked process is sent nothing.
        self._shared = None if self.context.get_start_method() == "fork" else Shared()

    def worker(self, worker_end: Any, work: Any) -> Any:
        """Returns the process of a worker."""
        args: tuple[Any, Any] = worker_end, work
        if self._shared is not None:
            args = self._shared.for_one(worker_end), SharedWork(self._shared, work)
        made = self.context.Process(target=entry.run_worker, args=args)
        made.daemon = True
        return made

    def start(self, handle: Any) -> None:
        """Starts the process of a worker."""
        start(handle, self.context)

    def lives_on(self, _handle: Handle) -> bool:
        """False: it has ended."""
        return False

    def note_all_started(self) -> None:
        """Gives back the pickled work of all workers."""
        if self._shared is not None:
            self._shared.close()

    close = note_all_started


class Shared:
    """The work of all workers of an iterator, pickled when the first of them starts, until :meth:`close`.

    So what pickling raises is raised where torch's pickling would.
    """

    def __init__(self) -> None:
        self._finds_main = fallback.main_is_found()
        self._pickled: Pickled | None = None
        # True: what is still to start gets a pickle of its own.
        self._is_closed = False

    def pickled(self, work: Any) -> Pickled | ForOne:
        """Returns the work of all, pickled once from the first one, or what is pickled for each process."""
        if self._pickled is None and not self._is_closed and context.get_spawning_popen() is not None:
            try:
                self._pickled = for_all(work, fallback.WITHOUT_PICKLE, finds_main=self._finds_main)
            except NotForAllError:
                self._is_closed = True
        return self._pickled or self.for_one(work)

    def for_one(self, thing: object) -> ForOne:
        """Returns what is pickled for each process."""
        return ForOne(thing, fallback.WITHOUT_PICKLE, finds_main=self._finds_main)

    def close(self) -> None:
        """Gives back what the workers that have started hold themselves."""
        if self._pickled is not None:
            self._pickled.close()
        self._pickled, self._is_closed = None, True


class SharedWork:
    """The work of one worker. Pickled, it is a reference to that of all, with the number of this worker."""

    def __init__(self, shared: Shared, work: Any) -> None:
        self._shared = shared
        self._work = work

    def __reduce__(self) -> tuple[Any, ...]:
        return _with_number, (self._shared.pickled(self._work), self._work.worker)


def _with_number(work: Any, worker: int) -> Any:
    """Returns the work of a worker, in the worker."""
    return work._replace(worker=worker)
