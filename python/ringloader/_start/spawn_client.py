"""The main process's end of one server for ``spawn``: started, asked for workers, ended."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import socket
import sys
from collections.abc import Iterator
from multiprocessing import process, util
from typing import Any

from ringloader._start import inherited, spawn_server

# Seconds. A server that was stopped says nothing, and the caller may not wait for it for ever.
_IMPORTS_WITHIN = 300.0
_ANSWERS_WITHIN = 30.0

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


class NoWorkerError(Exception):
    """There is no worker from the server: it must be spawned."""


class LostError(NoWorkerError):
    """The server is lost: it ended or fell silent without being told to. Another may do better."""


class UselessError(Exception):
    """The server cannot be used, nor could another one."""


class RefusedError(NoWorkerError):
    """Another server could do no better: this one stays."""


class Server:
    """A running server."""

    def __init__(self) -> None:
        self.state = inherited.state()
        self._ready = False
        # How it ended, once that is known.
        self._code: int | None = None
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            code = (
                f"import sys; sys.path[:] = {_sys_path()!r}; "
                "from ringloader._start.spawn_server import main; "
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
                # `SIGCHLD` is ignored, or other code waits for any child.
                self._code = 0
            else:
                self._code = os.waitstatus_to_exitcode(status) if pid else None

    def wait_until_ready(self) -> None:
        """Waits while it imports.

        Raises:
            LostError: If it was killed: another may come up.
            UselessError: If it cannot be used.
        """
        if self._ready:
            return
        message = b""
        self._channel.settimeout(_IMPORTS_WITHIN)
        try:
            with contextlib.suppress(ConnectionError):
                message = self._channel.recv(spawn_server.LONGEST)
        except TimeoutError:
            raise UselessError(f"the server has not started within {_IMPORTS_WITHIN} seconds") from None
        except OSError as error:
            raise UselessError(f"the server cannot be heard: {error}") from error
        self._channel.settimeout(_ANSWERS_WITHIN)
        self._ready = message == spawn_server.READY
        if not message:
            self._look(0)
            if (self._code or 0) < 0:
                raise LostError(f"it was killed by signal {-(self._code or 0)}")
            raise UselessError("the server cannot import torch, numpy and ringloader")
        if not self._ready:
            missed = message.removeprefix(spawn_server.REFUSED + b": ").decode(errors="replace")
            raise UselessError(f"what every interpreter imports starts {missed}, which a fork would miss")

    def fork(self, fds: list[int]) -> int:
        """A new child of this process, that waits for what it shall run.

        Raises:
            LostError: If there is none.
        """
        pid = 0
        try:
            with _adopting():
                self._send(fds)
                pid = spawn_server.answered(self._receive())
                self._receive()
        except BaseException as error:
            if pid > 0:
                self._drop(pid)
            if isinstance(error, OSError):
                raise LostError(f"it was asked for a worker, and then: {error}") from error
            raise
        if pid < 0:
            raise RefusedError(os.strerror(-pid))
        try:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            self._drop(pid)
            raise RefusedError("the worker was adopted by another process") from None
        return pid

    def _send(self, fds: list[int]) -> None:
        most = spawn_server.MOST_FDS
        for begin in range(0, len(fds), most):
            kind = spawn_server.FORK if begin + most >= len(fds) else spawn_server.MORE_FDS
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
        raise RefusedError(os.strerror(ctypes.get_errno()))
    try:
        yield
    finally:
        _prctl()(_PR_SET_CHILD_SUBREAPER, number(before.value), no, no, no)
