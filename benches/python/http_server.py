"""An HTTP server in a process of its own, whose answers take a while, as a store's over a network.

    python -m benches.python.http_server 0.02 100000

``GET /7`` has a body of so many bytes, each of them 7, after so many seconds. It prints its address, and ends
when its standard input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n"


class _Connection(asyncio.Protocol):
    """Answers the requests of one connection, each after the pause."""

    def __init__(self, seconds: float, size: int) -> None:
        self._seconds = seconds
        self._size = size
        self._asked = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        *requests, self._asked = (self._asked + data).split(b"\r\n\r\n")
        for request in requests:
            number = int(request.split(b" ", 2)[1].rpartition(b"/")[2])
            asyncio.get_running_loop().call_later(self._seconds, self._answer, number)

    def _answer(self, number: int) -> None:
        assert isinstance(self._transport, asyncio.Transport)
        if not self._transport.is_closing():
            self._transport.write(HEAD % self._size + bytes([number % 256]) * self._size)


async def serve(seconds: float, size: int) -> None:
    """Answers until standard input ends."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(seconds, size), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    print(f"http://{host}:{port}", flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


@contextlib.contextmanager
def server(seconds: float, size: int) -> Iterator[str]:
    """Runs a server, and gives its address."""
    command = [sys.executable, __file__, str(seconds), str(size)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        # Workers that were forked meanwhile have the other end of its standard input too.
        process.kill()
        process.stdin.close()
        process.wait()
        process.stdout.close()


if __name__ == "__main__":
    asyncio.run(serve(float(sys.argv[1]), int(sys.argv[2])))
