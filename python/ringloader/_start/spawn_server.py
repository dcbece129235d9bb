"""The server from which spawned workers are forked: a fresh interpreter that has imported torch, and no more.

No module of the user's, no thread, no device. A worker becomes a child of the main process, so for both
of them it is as if it had been spawned: parent, exit code, signals.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import gc
import io
import os
import select
import signal
import socket
import struct
import sys
import time
import warnings
from multiprocessing import process, resource_tracker, spawn
from pathlib import Path
from typing import Any

FORK, MORE_FDS = b"f", b"m"
READY, REFUSED, REAPED = b"ready", b"refused", b"reaped"
# What the kernel takes in one message is 253.
MOST_FDS = 250
# Descriptors that come with every request, before those of the process: standard streams, the pipe with the
# process, the pipe that ends with it, the resource tracker.
_OWN_FDS = 6
_ANSWER = struct.Struct("q")
# Bytes of the longest message of the server.
LONGEST = 200
# Seconds. A thread that was joined is gone from /proc a moment later.
_THREADS_END_WITHIN = 0.5


class SentFd:
    """A descriptor on its way to a worker. MIRRORS multiprocessing popen_forkserver.py::_DupFd."""

    def __init__(self, number: int) -> None:
        self.number = number

    def detach(self) -> int:
        return _received[self.number]


# In a worker.
_received: list[int] = []


def main(channel_fd: int, parent: int) -> None:
    """Runs the server, in a new interpreter; and in each worker, the worker.

    Args:
        channel_fd: The socket by which the main process asks for workers.
        parent: The main process.
    """
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A reader of the main process's streams waits for their end. Workers are sent the streams.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    os.close(nowhere)
    with socket.socket(fileno=channel_fd) as channel:
        if not _import_quietly():
            # The worker that is spawned instead says why.
            return
        missed = missed_after_fork()
        if missed is not None:
            channel.send(b": ".join((REFUSED, missed.encode()))[:LONGEST])
            return
        # The main process's directory may be removed; a worker goes to it by itself.
        os.chdir("/")
        try:
            channel.send(READY)
            fds = _serve(channel, parent)
        except ConnectionError:
            return
    if fds is not None:
        signal.signal(signal.SIGINT, on_interrupt)
        _work(fds)


def _import_quietly() -> bool:
    gc.disable()
    try:
        import numpy.random  # noqa: F401
        import torch  # noqa: F401

        from ringloader._worker import entry  # noqa: F401
    except Exception:
        return False
    finally:
        gc.enable()
    # A worker that looked through all this for garbage would copy every page of it.
    gc.collect()
    gc.freeze()
    return True


def missed_after_fork() -> str | None:
    """What a process that is forked from this one could not use, or None. It is tried.

    A device that was initialised is known only to the child. A thread that this process still has after the
    fork is one that the child has not: the threads of numpy's pool end before each fork, by a handler of the
    pool's own, and come back when they are needed.
    """
    from ringloader._torch import accelerator

    told, tell = os.pipe()
    child = _fork()
    if child == 0:
        try:
            device = accelerator.device_in_bad_fork()
            os.write(tell, b"-" if device is None else b"the device " + device.encode())
        finally:
            os._exit(0)
    os.close(tell)
    device = os.read(told, LONGEST).decode()
    os.close(told)
    # There is nothing to wait for where `SIGCHLD` is ignored.
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)
    if device != "-":
        return device or "a device"
    others = _other_threads()
    return f"threads ({', '.join(others)})" if others else None


def _other_threads() -> list[str]:
    """The names of all threads but this one, native ones too, that do not end at once."""
    until = time.monotonic() + _THREADS_END_WITHIN
    while True:
        others = []
        for task in Path("/proc/self/task").iterdir():
            # It may have ended meanwhile.
            with contextlib.suppress(OSError):
                if int(task.name) != os.getpid():
                    others.append((task / "comm").read_text().strip())
        if not others or time.monotonic() > until:
            return others
        time.sleep(0.001)


def _fork() -> int:
    with warnings.catch_warnings():
        # Of threads: see `missed_after_fork`.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _serve(channel: socket.socket, parent: int) -> list[int] | None:
    """Forks workers until the main process wants no more, or is gone. Returns the descriptors in a worker."""
    try:
        parent_ended = os.pidfd_open(parent)
    except ProcessLookupError:
        return None
    try:
        if os.getppid() != parent:
            return None
        while True:
            fds = _next_request(channel, parent_ended)
            if fds is None:
                return None
            if _fork_for_parent(channel):
                return fds
            for fd in fds:
                os.close(fd)
    finally:
        os.close(parent_ended)


def _next_request(channel: socket.socket, parent_ended: int) -> list[int] | None:
    """The descriptors for a worker; None if the main process wants no more, or is gone."""
    fds: list[int] = []
    missing = False
    # `select` takes no descriptor above 1,023, and the channel's is as high as it was in the main process.
    waiting = select.poll()
    for fd in (channel.fileno(), parent_ended):
        waiting.register(fd, select.POLLIN)
    while True:
        # Forked children of the main process hold its end of the channel too.
        if parent_ended in dict(waiting.poll()):
            return None
        message, more, flags, _ = socket.recv_fds(channel, 1, MOST_FDS)
        if not message:
            return None
        fds += more
        # Where the limit of descriptors is reached.
        missing = missing or bool(flags & socket.MSG_CTRUNC)
        if message == FORK:
            if not missing:
                return fds
            while fds:
                os.close(fds.pop())
            missing = False
            _refuse(channel, errno.EMFILE)


def _fork_for_parent(channel: socket.socket) -> bool:
    """Forks a worker whose parent is the server's parent. Returns whether this is the worker.

    The process between ends at once, and its child goes to the main process, which has said that it takes
    such children (`PR_SET_CHILD_SUBREAPER`).
    """
    try:
        between = _fork()
    except OSError as error:
        _refuse(channel, error.errno)
        return False
    if between:
        # There is nothing to wait for where `SIGCHLD` is ignored, once it has ended.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(between, 0)
        channel.send(REAPED)
        return False
    try:
        worker = _fork()
    except OSError as error:
        worker = -(error.errno or errno.EAGAIN)
    if worker:
        try:
            channel.send(_ANSWER.pack(worker))
        finally:
            os._exit(0)
    return True


def _refuse(channel: socket.socket, number: int | None) -> None:
    channel.send(_ANSWER.pack(-(number or errno.EAGAIN)))
    channel.send(REAPED)


def answered(message: bytes) -> int:
    """The process id in an answer; a negative error number where there is no process."""
    number: int = _ANSWER.unpack(message)[0]
    return number


def _work(fds: list[int]) -> None:
    """The worker, from where a spawned one begins. MIRRORS multiprocessing spawn.py::spawn_main."""
    for number in range(3):
        os.dup2(fds[number], number)
        os.close(fds[number])
    # The end of this pipe tells the main process that the worker has ended, so it stays open.
    data, _ended, tracker = fds[3:_OWN_FDS]
    _received[:] = fds[_OWN_FDS:]
    resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]
    # Python does the same for `random` after each fork.
    import numpy
    import torch

    numpy.random.seed()
    torch.default_generator.seed()
    waiting = select.poll()
    waiting.register(data, select.POLLIN)
    if not waiting.poll()[0][1] & select.POLLIN:
        # The main process has gone, or lost interest.
        os._exit(1)
    code: int = spawn._main(data, os.dup(data))
    _leave(code)


def _leave(code: int) -> None:
    """Ends the worker as an interpreter does, but for its hundred thousands of objects of torch's."""
    atexit._run_exitfuncs()
    # torch's older worker loops leave the dataset there.
    vars(process.current_process()).pop("_args", None)
    gc.collect()
    _flush_open_files()
    os._exit(code)


def _flush_open_files() -> None:
    files: tuple[type[Any], ...] = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    for stream in (sys.stdout, sys.stderr, *(it for it in gc.get_objects() if issubclass(type(it), files))):
        with contextlib.suppress(Exception):
            stream.flush()
    # What libraries written in C have printed.
    ctypes.CDLL(None).fflush(None)
