"""Workers of the start method ``spawn``, forked from a server that has imported torch already.

One server for the process, started when the first loader that will spawn is made, and ended with the last
one. A worker has what a spawned one has; where that cannot be promised, it is spawned.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import io
import logging
import os
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Iterator
from multiprocessing import context, popen_spawn_posix, process, reduction, resource_tracker, spawn, util
from typing import Any

from ringloader import _inherited, _spawn_server

SWITCH = "RINGLOADER_SPAWN_SERVER"

_logger = logging.getLogger("ringloader")
# Seconds. A server that was stopped says nothing, and nobody may wait for it for ever.
_IMPORTS_WITHIN = 300.0
_ANSWERS_WITHIN = 30.0

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37

# Servers that are lost in a row, until no more are tried.
_LOST_AT_MOST = 2


class _NoWorkerError(Exception):
    """There is no worker from the server: it must be spawned."""


class _LostError(_NoWorkerError):
    """The server is lost: it ended or fell silent, and nobody had told it to. Another may do better."""


class _UselessError(Exception):
    """The server cannot be used, nor could another one."""


class _RefusedError(_NoWorkerError):
    """Another server could do no better: this one stays."""


class _Server:
    """A running server."""

    def __init__(self) -> None:
        self.state = _inherited.state()
        self._ready = False
        # How it ended, once that is known.
        self._code: int | None = None
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            code = (
                f"import sys; sys.path[:] = {_sys_path()!r}; from ringloader._spawn_server import main; "
                f"main({theirs.fileno()}, {os.getpid()})"
            )
            executable, flags = self.state[:2]
            arguments = [executable, *flags, "-c", code]
            try:
                self._pid: int = util.spawnv_passfds(executable, arguments, [theirs.fileno()])
            except BaseException:
                self._channel.close()
                raise

    def is_running(self) -> bool:
        self._look(os.WNOHANG)
        return self._code is None

    def _look(self, options: int) -> None:
        if self._code is None:
            try:
                pid, status = os.waitpid(self._pid, options)
            except ChildProcessError:
                # `SIGCHLD` is ignored, or somebody waits for any child.
                self._code = 0
            else:
                self._code = os.waitstatus_to_exitcode(status) if pid else None

    def wait_until_ready(self) -> None:
        """Waits while it imports.

        Raises:
            _LostError: If it was killed: another may come up.
            _UselessError: If it cannot be used.
        """
        if self._ready:
            return
        message = b""
        self._channel.settimeout(_IMPORTS_WITHIN)
        try:
            with contextlib.suppress(ConnectionError):
                message = self._channel.recv(_spawn_server.LONGEST)
        except TimeoutError:
            raise _UselessError(f"the server has not started within {_IMPORTS_WITHIN} seconds") from None
        self._channel.settimeout(_ANSWERS_WITHIN)
        self._ready = message == _spawn_server.READY
        if not message:
            self._look(0)
            if (self._code or 0) < 0:
                raise _LostError(f"it was killed by signal {-(self._code or 0)}")
            raise _UselessError("the server cannot import torch, numpy and ringloader")
        if not self._ready:
            missed = message.removeprefix(_spawn_server.REFUSED + b": ").decode(errors="replace")
            raise _UselessError(f"what every interpreter imports starts {missed}, which a fork would miss")

    def fork(self, fds: list[int]) -> int:
        """A new child of this process, that waits for what it shall run.

        Raises:
            _LostError: If there is none.
        """
        pid = 0
        try:
            with _adopting():
                self._send(fds)
                pid = _spawn_server.answered(self._receive())
                self._receive()
        except BaseException as error:
            if pid > 0:
                self._drop(pid)
            if isinstance(error, OSError):
                raise _LostError(f"it was asked for a worker, and then: {error}") from error
            raise
        if pid < 0:
            raise _RefusedError(os.strerror(-pid))
        try:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            self._drop(pid)
            raise _RefusedError("the worker was adopted by another process") from None
        return pid

    def _send(self, fds: list[int]) -> None:
        most = _spawn_server.MOST_FDS
        for begin in range(0, len(fds), most):
            kind = _spawn_server.FORK if begin + most >= len(fds) else _spawn_server.MORE_FDS
            socket.send_fds(self._channel, [kind], fds[begin : begin + most])

    @staticmethod
    def _drop(worker: int) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)

    def _receive(self) -> bytes:
        message = self._channel.recv(64)
        if not message:
            raise ConnectionError("end of file")
        return message

    def forget(self) -> None:
        """In a forked child: it is not this process's."""
        self._channel.close()

    def end(self) -> None:
        self._channel.close()
        if self.is_running():
            # Where `SIGCHLD` is ignored, or others wait for any child, it may be gone already.
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)


def _sys_path() -> list[str]:
    """Where this process finds modules. MIRRORS multiprocessing spawn.py::get_preparation_data."""
    path = [entry for entry in sys.path if isinstance(entry, str)]
    directory = getattr(process, "ORIGINAL_DIR", None)
    if "" in path and directory is not None:
        path[path.index("")] = directory
    return path


@functools.cache
def _prctl() -> Any:
    return ctypes.CDLL(None, use_errno=True).prctl


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """This process takes what its descendants leave behind, as the first process of a system does."""
    before = ctypes.c_int()
    number, no = ctypes.c_ulong, ctypes.c_ulong(0)
    _prctl()(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), no, no, no)
    if _prctl()(_PR_SET_CHILD_SUBREAPER, number(1), no, no, no) != 0:
        raise _RefusedError(os.strerror(ctypes.get_errno()))
    try:
        yield
    finally:
        _prctl()(_PR_SET_CHILD_SUBREAPER, number(before.value), no, no, no)


class _Servers:
    """The server of this process, and the loaders for whom it is there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None
        self._server: _Server | None = None
        self._users: dict[int, weakref.finalize[Any, Any]] = {}
        # Since the last worker that came from one.
        self._lost = 0
        # One that did not come to work at all is not tried again.
        self._useless = False

    def keep_for(self, loader: Any) -> None:
        """Starts the server, if there is none. It stays for as long as the loader does."""
        with self._held():
            if id(loader) not in self._users:
                ended = weakref.finalize(loader, self._drop, id(loader))
                ended.atexit = False
                self._users[id(loader)] = ended
            self._current()

    def _drop(self, user: int) -> None:
        self._users.pop(user, None)
        self._end_if_unused()

    def _end_if_unused(self) -> None:
        # Garbage is collected anywhere, also where the lock is held: whoever holds it looks afterwards.
        if not self._users and self._lock.acquire(blocking=False):
            try:
                if not self._users:
                    self._end()
            finally:
                self._lock.release()

    def end_at_exit(self) -> None:
        """No loader starts workers any more; if one does nevertheless, there is a server again."""
        self._users.clear()
        self._end_if_unused()

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        if self._holder == threading.get_ident():
            # In a signal's handler, while this thread waits for the server.
            raise _RefusedError("the server is being asked already")
        try:
            with self._lock:
                self._holder = threading.get_ident()
                try:
                    yield
                finally:
                    self._holder = None
        finally:
            self._end_if_unused()

    def _current(self) -> _Server | None:
        """The server with this process's environment, which may still import."""
        if self._useless:
            return None
        try:
            state = _inherited.state()
            server = self._server
            if server is not None and not server.is_running():
                # While it was idle; if while it started, it may have said why.
                if self._check(server):
                    self._note_lost("it has ended")
            elif server is not None and server.state != state:
                self._end()
            if self._server is None and not self._useless:
                self._server = _Server()
        except OSError as error:
            self._give_up(str(error))
        return self._server

    def _check(self, server: _Server) -> bool:
        """Waits until the server can be used. False: it cannot, and is not there any more."""
        try:
            server.wait_until_ready()
        except _UselessError as error:
            self._give_up(str(error))
        except _LostError as error:
            self._note_lost(str(error))
        else:
            return True
        return False

    def _note_lost(self, why: str) -> None:
        self._end()
        self._lost += 1
        if self._lost >= _LOST_AT_MOST:
            self._give_up(f"{self._lost} servers in a row were lost, the last one thus: {why}")

    def _give_up(self, why: str) -> None:
        _logger.info("workers are spawned one by one: %s", why)
        self._useless = True
        self._end()

    def _end(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.end()

    def fork(self, fds: list[int]) -> int:
        """A new child of this process from the server, or `_NoWorkerError`."""
        with self._held():
            while (server := self._current()) is not None:
                try:
                    if self._check(server):
                        worker = server.fork(fds)
                        self._lost = 0
                        return worker
                except _RefusedError:
                    raise
                except _LostError as error:
                    self._note_lost(str(error))
                except BaseException:
                    self._end()
                    raise
            raise _NoWorkerError

    def forget(self) -> None:
        """In a forked child."""
        if self._server is not None:
            self._server.forget()
        self.__init__()  # type: ignore[misc]


_servers = _Servers()
atexit.register(lambda: _servers.end_at_exit())
os.register_at_fork(after_in_child=_servers.forget)


class _Popen(popen_spawn_posix.Popen):
    """A worker from the server, as `Process` objects know it: as one that was spawned."""

    DupFd = _spawn_server.SentFd  # type: ignore[assignment]

    def duplicate_for_child(self, fd: int) -> int:
        self._fds: list[int]
        self._fds.append(fd)
        return len(self._fds) - 1

    def _launch(self, process_obj: Any) -> None:
        """MIRRORS multiprocessing popen_spawn_posix.py::_launch."""
        tracker = resource_tracker.getfd()
        assert tracker is not None
        preparation = spawn.get_preparation_data(process_obj._name)
        data = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(preparation, data)
            reduction.dump(process_obj, data)
        finally:
            context.set_spawning_popen(None)
        with contextlib.ExitStack() as ours:
            sentinel, ended = os.pipe()
            close_ours = ours.enter_context(_closed_on_error(sentinel))
            with _closed(ended):
                theirs, feed = os.pipe()
                close_ours.append(feed)
                with _closed(theirs):
                    self.pid = _servers.fork([0, 1, 2, theirs, ended, tracker, *self._fds])
        self.sentinel = sentinel
        self.finalizer = util.Finalize(self, util.close_fds, (sentinel, feed))  # type: ignore[attr-defined]
        with open(feed, "wb", closefd=False) as file:
            file.write(data.getbuffer())


@contextlib.contextmanager
def _closed(fd: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _closed_on_error(*fds: int) -> Iterator[list[int]]:
    all_fds = list(fds)
    try:
        yield all_fds
    except BaseException:
        for fd in all_fds:
            os.close(fd)
        raise


def _spawns(kind: Any) -> bool:
    """Whether processes of this class are spawned by nothing but multiprocessing's own code."""
    if kind is context.Process:
        # Of the default context, whatever that is by now.
        kind = getattr(context._default_context._actual_context, "Process", None)  # type: ignore[attr-defined]
    return (
        kind is context.SpawnProcess
        and kind._Popen.__module__ == context.__name__
        and popen_spawn_posix.Popen.__module__ == popen_spawn_posix.__name__
        and popen_spawn_posix.Popen._launch.__module__ == popen_spawn_posix.__name__  # type: ignore[attr-defined]
    )


def _is_allowed() -> bool:
    me = process.current_process()
    return (
        os.environ.get(SWITCH) != "0"
        and not getattr(sys, "frozen", False)
        # The main module of a child, while it is imported, may start nothing; a daemon never.
        and not getattr(me, "_inheriting", False)
        and not me.daemon
    )


def prepare(loader: Any) -> None:
    """Has the server ready when the loader's workers start, if they are to be spawned."""
    if loader.num_workers > 0 and _is_allowed():
        found = loader.multiprocessing_context
        if _spawns(context.Process if found is None else getattr(found, "Process", None)):
            with contextlib.suppress(_RefusedError):
                _servers.keep_for(loader)


def by_server(process_obj: Any) -> Any:
    """Has a process that would be spawned started by the server, if there is one."""
    if _spawns(type(process_obj)) and _is_allowed():

        def popen(_process: Any) -> Any:
            # An attribute of the instance would travel with it.
            del process_obj._Popen
            try:
                return _Popen(process_obj)
            except _NoWorkerError:
                return process_obj._Popen(process_obj)

        process_obj._Popen = popen
    return process_obj
