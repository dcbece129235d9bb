"""Workers of the start method ``spawn``, forked from a server that has imported torch already.

The server is a fork server of ``multiprocessing``'s own, which imports nothing of the user's. A worker begins
and ends as a spawned one does. Where no server can be had, workers are spawned.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib.metadata
import io
import os
import signal
import sys
import weakref
from multiprocessing import (
    connection,
    context,
    forkserver,
    popen_forkserver,
    popen_spawn_posix,
    reduction,
    resource_tracker,
    spawn,
    util,
)
from multiprocessing.process import current_process
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch

from ringloader._common.weak_registry import WeakRegistry
from ringloader._core.make_transport import WorkerKind
from ringloader._log import logger
from ringloader._start.processes import NewProcesses

if TYPE_CHECKING:
    from ringloader._start.processes import Starter
    from ringloader._torch.protocols import TorchLoader

SWITCH = "RINGLOADER_SPAWN_SERVER"

# All that may be sent to the program's group. A server has them blocked from its first moment: it ends by
# none, and a worker that has not begun loses none. The rest tell of faults, and of its children.
_BLOCKED = signal.valid_signals() - {
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGCHLD,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGSEGV,
    signal.SIGSYS,
    signal.SIGTRAP,
}
# Seconds in which a server tells the exit code of a worker that has ended. One that was stopped does not.
_TOLD_WITHIN = 2.0
# Of a worker whose server was killed, as multiprocessing has it.
_NOT_TOLD = 255

# Others' code that torch imports. It may start threads or a device, which a fork misses.
_backends = functools.cache(functools.partial(importlib.metadata.entry_points, group="torch.backends"))
_servers: weakref.WeakSet[_Server] = weakref.WeakSet()
# Each loader keeps its server alive.
_servers_of: WeakRegistry[_Server] = WeakRegistry()
# Why no server is asked any more.
_failures: list[str] = []


def _inherited() -> tuple[Any, ...]:
    """Returns what a child of this process begins with. A server begins with the same as a worker must."""
    limits, status = (Path("/proc/thread-self", name).read_text() for name in ("limits", "status"))
    kept = (
        "Umask",
        "Uid",
        "Gid",
        "Groups",
        "NSpgid",
        "NSsid",
        "SigBlk",
        "SigIgn",
        "Cap",
        "NoNewPrivs",
        "Seccomp",
        "Cpus_allowed",
    )
    lines = [line for line in status.splitlines() if line.startswith(kept)]
    priority = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)
    command = spawn.get_executable(), util._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return dict(os.environb), limits, lines, priority, command


class _Modules(list[str]):
    """Modules that a server imports. In its command they come with the ``sys.path`` of this process."""

    def __repr__(self) -> str:
        # Python does this itself since 3.12.4.
        return f"[__import__('sys').path.__setitem__(slice(None), {sys.path!r}), {super().__repr__()}][1]"


class _Server(forkserver.ForkServer):
    """A running server. It ends with the last loader and the last living worker that have it, and at exit."""

    def __init__(self) -> None:
        super().__init__()
        self.inherited = _inherited()
        self.set_forkserver_preload(_Modules(["torch", "numpy.random", "ringloader._worker.entry", __name__]))
        self.ensure_running()
        _servers.add(self)
        # After `multiprocessing` has joined the workers.
        util.Finalize(None, _end_servers, exitpriority=-100)

    def ensure_running(self) -> None:
        # Before signals are blocked: its own start blocks some and unblocks them.
        resource_tracker.ensure_running()
        # Signals that come meanwhile reach the main process in another thread, or once they are unblocked.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        try:
            super().ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __del__(self) -> None:
        if self._forkserver_pid is not None:  # type: ignore[has-type]
            with contextlib.suppress(ChildProcessError), contextlib.ExitStack() as at_last:
                at_last.callback(self._stop_unlocked)  # type: ignore[attr-defined]
                # Raises where it is not this process's child: after a fork; if other code has waited for it.
                os.waitid(os.P_PID, self._forkserver_pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # type: ignore[has-type]
                # While it imports, it ends by nothing else.
                os.kill(self._forkserver_pid, signal.SIGKILL)  # type: ignore[has-type]
            self._forkserver_pid = None


class _NotServedError(Exception):
    """The server could not start a process."""


class _Popen(popen_forkserver.Popen):
    """A worker from the server, as a process object that would be spawned has it.

    A pidfd tells that it has ended, also where the server was killed, which tells its exit code.

    Raises:
        _NotServedError: If the server cannot be reached, or has ended.
    """

    def __init__(self, server: _Server, process_obj: Any) -> None:
        # The attribute would travel with the process object.
        del process_obj._Popen
        # The worker's exit code comes from the server.
        self._server: Any = server
        self._own_fds: list[int] = []
        super().__init__(process_obj)

    def _launch(self, process_obj: Any) -> None:
        """MIRRORS multiprocessing popen_forkserver.py::_launch."""
        data, preparation = io.BytesIO(), spawn.get_preparation_data(process_obj._name)
        context.set_spawning_popen(self)
        try:
            # The call comes before the rest is looked at. Signals are blocked in a worker that are so here.
            blocked = list(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))
            reduction.dump({"_begin": _Call((_begin, blocked))} | preparation, data)
            reduction.dump(process_obj, data)
        finally:
            context.set_spawning_popen(None)
        try:
            self._own_fds += self._server.connect_to_new_process([*self._fds, 0, 1, 2])  # type: ignore[attr-defined]
            self.finalizer = util.Finalize(self, _close_all, (self._own_fds,))
            self._status, feed = self._own_fds
            self.pid = forkserver.read_signed(self._status)
            # The worker waits for its data, so the number is still its own.
            self.sentinel = os.pidfd_open(self.pid)
            self._own_fds.append(self.sentinel)
            with open(feed, "wb", closefd=False) as file:
                file.write(data.getbuffer())
        except (OSError, EOFError, ValueError) as error:
            _close_all(self._own_fds)
            raise _NotServedError(str(error)) from None

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        has_ended = self.returncode is None and connection.wait(
            [self.sentinel], 0 if flag == os.WNOHANG else None
        )
        if has_ended:
            with contextlib.suppress(OSError, EOFError):
                if connection.wait([self._status], _TOLD_WITHIN):
                    self.returncode = forkserver.read_signed(self._status)
            # Another thread may have read it.
            self.returncode = _NOT_TOLD if self.returncode is None else self.returncode
            self._server = None
        return self.returncode

    def _send_signal(self, sig: int) -> None:
        # The number may be another process's where the server was killed.
        if self.returncode is None:
            try:
                signal.pidfd_send_signal(self.sentinel, sig)
            except ProcessLookupError:
                pass
            except OSError:
                # A sandbox may refuse the call.
                super()._send_signal(sig)  # type: ignore[misc]


def _popen(server: _Server, process_obj: Any) -> Any:
    """Starts a process by the server, or spawns it, as all later ones, if the server cannot."""
    try:
        return _Popen(server, process_obj)
    except _NotServedError as error:
        # The error itself would keep its frames, and the worker.
        _failures.append(str(error))
    logger.info("workers are spawned one by one: %s", _failures[-1])
    return popen_spawn_posix.Popen(process_obj)


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


class _Call(tuple[Any, ...]):
    """Unpickles to the result of calling its first item with the others."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self[0], self[1:]


def _begin(blocked: list[int]) -> None:
    """Gives a worker the surroundings of a spawned one, before it imports the main module."""
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    for number, fd in enumerate((forkserver.get_inherited_fds() or [])[-3:]):
        os.dup2(fd, number)
        os.close(fd)
    # Python does the same for `random` after each fork.
    numpy.random.seed()
    torch.default_generator.seed()
    # Looking through all that for garbage would copy every page of it.
    gc.freeze()
    util.Finalize(None, _leave, exitpriority=-1000)


def _leave() -> None:
    """Does in a worker what else the end of an interpreter does."""
    atexit._run_exitfuncs()
    # torch's older worker loops leave the dataset there.
    vars(current_process()).pop("_args", None)
    gc.collect()
    for file in [it for it in gc.get_objects() if issubclass(type(it), io.IOBase)]:
        with contextlib.suppress(Exception):
            file.flush()
    # The output of libraries written in C.
    ctypes.CDLL(None).fflush(None)


def _end_servers() -> None:
    """Ends this process's servers. A forked child only closes what keeps its parent's alive."""
    while _servers:
        _servers.pop().__del__()


os.register_at_fork(after_in_child=_end_servers)


def _is_served(kind: Any) -> bool:
    """Tells whether a server may start processes of this class: else they are spawned, or not at all."""
    if kind is context.Process:
        # Of the default context, whatever that is by now.
        kind = getattr(context._default_context._actual_context, "Process", None)  # type: ignore[attr-defined]
    return (
        kind is context.SpawnProcess
        and kind._Popen.__module__ == context.__name__
        and popen_spawn_posix.Popen.__module__ == popen_spawn_posix.__name__
        and not (_failures or os.environ.get(SWITCH) == "0" or hasattr(sys, "frozen") or _backends())
        # The main module of a child, while it is imported, may start nothing; a daemon never.
        and not (current_process().daemon or hasattr(current_process(), "_inheriting"))
    )


def _running() -> _Server | None:
    """Returns a server that began with what workers begin with now."""
    with contextlib.suppress(OSError):
        inherited = _inherited()
        return next((server for server in list(_servers) if server.inherited == inherited), None)
    return None


def prepare(loader: TorchLoader) -> None:
    """Starts the server before the loader's workers, if these are spawned."""
    if loader.num_workers > 0:
        start_server(loader, loader.multiprocessing_context or context)


def start_server(owner: Any, of: Any) -> None:
    """Starts the server if it may start a context's processes. It lives as long as ``owner``."""
    if _is_served(getattr(of, "Process", None)):
        with contextlib.suppress(OSError):
            _servers_of.put(owner, _running() or _Server())


def forget(loader: TorchLoader) -> None:
    """Lets the server go for this loader, until its next workers start."""
    _servers_of.pop(loader)


def by_server(process_obj: Any) -> Any:
    """Makes the server, if there is one, start a process that would be spawned."""
    if _is_served(type(process_obj)) and (server := _running()) is not None:
        process_obj._Popen = functools.partial(_popen, server)
    return process_obj


class _Served(NewProcesses):
    """Starts a process for each worker, by the server if there is one."""

    def __init__(self, loader: TorchLoader) -> None:
        super().__init__(loader)
        prepare(loader)

    def worker(self, worker_end: Any, work: Any) -> Any:
        return by_server(super().worker(worker_end, work))


class ServedKind(WorkerKind):
    """The workers of an iterator that the server forks, if there is one."""

    def starter(self, loader: TorchLoader, running: int, most: int) -> Starter:  # noqa: ARG002
        return _Served(loader)


def kind_for(_loader: TorchLoader, _options: object) -> ServedKind:
    """Returns the kind of the workers that would be spawned."""
    return ServedKind()
