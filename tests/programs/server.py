"""A warm server: has imported torch and ringloader, and forks a test program for each request.

``python -m programs.server FD`` serves the socket ``FD`` until its other end closes.
"""

from __future__ import annotations

import array
import contextlib
import gc
import json
import multiprocessing.process
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch  # noqa: F401

from programs import NUMBER, huge_pages
from ringloader import DataLoader  # noqa: F401

# A request is at most so long: the arguments, the folder and the variables of a program.
REQUEST_BYTES = 1 << 18
# Descriptors that come with a request: standard input, output, error, and the pipe for pid and status.
DESCRIPTORS = 4

Program = Callable[[], None]


def serve(channel: socket.socket) -> Program | None:
    """Forks a process for each request and reports its end.

    Returns:
        The program, in a forked process; None in the server, once the test process is gone.
    """
    selector = selectors.DefaultSelector()
    selector.register(channel, selectors.EVENT_READ)
    # Process and status pipe of each program that runs, by its pidfd.
    running: dict[int, tuple[int, int]] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is not channel:
                _report_end(selector, key.fd, *running.pop(key.fd))
                continue
            request, received = _receive(channel)
            if not request:
                _kill_sessions(pid for pid, _ in running.values())
                return None
            standard, status = received[:3], received[3]
            pid = os.fork()
            if pid == 0:
                selector.close()
                channel.close()
                for pidfd, (_, other) in running.items():
                    os.close(pidfd)
                    os.close(other)
                os.close(status)
                return _prepare(json.loads(request), standard)
            for fd in standard:
                os.close(fd)
            os.write(status, NUMBER.pack(pid))
            pidfd = os.pidfd_open(pid)
            running[pidfd] = pid, status
            selector.register(pidfd, selectors.EVENT_READ)


def _receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    found = array.array("i")
    request, ancillary, _, _ = channel.recvmsg(REQUEST_BYTES, socket.CMSG_SPACE(DESCRIPTORS * found.itemsize))
    for _, _, data in ancillary:
        found.frombytes(data)
    return request, found.tolist()


def _report_end(selector: selectors.BaseSelector, pidfd: int, pid: int, status: int) -> None:
    selector.unregister(pidfd)
    os.close(pidfd)
    _, ended = os.waitpid(pid, 0)
    # The test may have given the program up.
    with contextlib.suppress(BrokenPipeError):
        os.write(status, NUMBER.pack(ended))
    os.close(status)


def _kill_sessions(leaders: object) -> None:
    for pid in leaders:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _prepare(request: dict[str, object], standard: list[int]) -> Program:
    """Gives this forked process the surroundings of a program that was just started."""
    os.setsid()
    for target, fd in enumerate(standard):
        os.dup2(fd, target)
        os.close(fd)
    os.environ.update(request["variables"])
    os.chdir(request["folder"])
    # Spawned workers look for the main module there.
    multiprocessing.process.ORIGINAL_DIR = request["folder"]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    # Python's own generator is seeded by the fork.
    np.random.seed(random.getrandbits(32))
    sys.excepthook = _print_error
    # Spawned workers look for it here, and the interpreter tears it down at its end.
    main = sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
    first, *rest = request["arguments"]
    sys.argv = [first, *rest[first in ("-c", "-m") :]]
    if first == "-m":
        sys.path[0] = str(Path.cwd())
        return lambda: runpy._run_module_as_main(rest[0])
    if first == "-c":
        source, sys.path[0] = rest[0], ""
    else:
        source, sys.path[0] = Path(first).read_text(), str(Path(first).resolve().parent)
        main.__file__ = first
    return lambda: exec(compile(source, "<string>" if first == "-c" else first, "exec"), main.__dict__)


def _print_error(kind: type[BaseException], error: BaseException, traceback: object) -> None:
    """Prints an uncaught error without the frames of this file, as of a program that was started."""
    frame = traceback
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == __file__:
            traceback = frame.tb_next
        frame = frame.tb_next
    sys.__excepthook__(kind, error.with_traceback(traceback), traceback)


if __name__ == "__main__":
    gc.collect()
    gc.freeze()
    huge_pages.collapse()
    # The program runs below the last frame of the interpreter, so that what follows is a real exit of it.
    _program = serve(socket.socket(fileno=int(sys.argv[1])))
    if _program is not None:
        _program()
