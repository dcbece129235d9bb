"""Starts test programs: forked from a warm server, or cold where a test asks for it."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from programs import NUMBER

TESTS = Path(__file__).resolve().parent.parent

# Set by conftest.py: for a test with the mark `cold`, and by the option --cold.
is_cold = False


class _Server:
    """A warm server with one environment, for the programs of this process."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.process_id = os.getpid()
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        paths = [str(TESTS), environment.get("PYTHONPATH", "")]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "programs.server", str(theirs.fileno())],
                env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def close(self) -> None:
        self.channel.close()
        self._process.wait(20)


# Servers of this process, by their environments; the one used last is last.
_servers: dict[tuple[tuple[str, str], ...], _Server] = {}
# A server takes some 300 MB.
_MOST_SERVERS = 3


@atexit.register
def _close_servers() -> None:
    for server in _servers.values():
        if server.process_id == os.getpid():
            server.close()


def _server(environment: dict[str, str]) -> _Server:
    # pytest's changes with each test.
    environment = {name: value for name, value in environment.items() if name != "PYTEST_CURRENT_TEST"}
    key = tuple(sorted(environment.items()))
    found = _servers.pop(key, None)
    if found is None or found.process_id != os.getpid():
        found = _Server(environment)
    _servers[key] = found
    if len(_servers) > _MOST_SERVERS:
        _servers.pop(next(iter(_servers))).close()
    return found


def start(
    arguments: Sequence[str], *, env: dict[str, str], variables: dict[str, str] | None = None, **options: Any
) -> subprocess.Popen[Any]:
    """Starts ``python ARGUMENTS`` in a session of its own.

    A warm program has imported torch and ringloader before it begins, in ``env``. It ends as any other.

    Args:
        arguments: As after ``python``: a file, ``-c`` with a text, or ``-m`` with a module, and
            the program's own.
        env: The environment. Each needs a server of its own.
        variables: Variables that only this program has, and no import reads.
        options: Of ``Popen``: ``stdin``, ``stdout``, ``stderr``, ``text`` and ``cwd``.
    """
    variables = variables or {}
    if is_cold:
        return subprocess.Popen(
            [sys.executable, *arguments], env=env | variables, start_new_session=True, **options
        )
    folder = str(options.get("cwd", Path.cwd()))
    request = {"arguments": list(arguments), "folder": folder, "variables": variables}
    return _Forked(_server(env), request, **options)


def run(
    arguments: Sequence[str], *, timeout: float, env: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Runs ``python ARGUMENTS`` to its end; kills its session after ``timeout`` seconds."""
    process = start(arguments, env=dict(os.environ) if env is None else env, **options)
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


class _Forked(subprocess.Popen):
    """A program that a warm server has forked, as a ``Popen``: the server's child, not this process's."""

    def __init__(self, server: _Server, request: dict[str, Any], **options: Any) -> None:
        self._server, self._request = server, request
        super().__init__(request["arguments"], **options)

    # MIRRORS CPython subprocess.py::Popen._execute_child, whose pipes come behind nine other arguments.
    def _execute_child(self, _args: Any, *rest: Any) -> None:
        pipes = rest[9:15]
        self._status, status = os.pipe()
        theirs = enumerate((pipes[0], pipes[3], pipes[5]))
        standard = [own if pipe == -1 else pipe for own, pipe in theirs]
        try:
            socket.send_fds(self._server.channel, [json.dumps(self._request).encode()], [*standard, status])
        finally:
            os.close(status)
            self._close_pipe_fds(*pipes)
        self._child_created = True
        self.pid = self._read_number()

    def _read_number(self) -> int:
        data = os.read(self._status, NUMBER.size)
        if len(data) < NUMBER.size:
            raise RuntimeError("the warm server of test programs has ended")
        return NUMBER.unpack(data)[0]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags & os.WNOHANG and not select.select([self._status], [], [], 0)[0]:
            return 0, 0
        status = self._read_number()
        os.close(self._status)
        return self.pid, status

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)
        return self.returncode
