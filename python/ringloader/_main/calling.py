"""``DataLoader.call_workers``: a function that runs in each living worker."""

from __future__ import annotations

import pickle
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from ringloader._main import ending, thread_calls
from ringloader._main.iterator import RingIterator, TransportIterator
from ringloader._torch import internals
from ringloader._worker.calls import LENGTH, Call

# How often is looked whether a worker that has not answered still lives.
_LOOK_SECONDS = 0.1
_CREDENTIALS = struct.Struct("3i")


def call_workers(
    loader: Any, function: Callable[..., Any], args: tuple[Any, ...], timeout: float | None
) -> list[Any]:
    """What ``DataLoader.call_workers`` does."""
    if not callable(function):
        raise TypeError(f"call_workers() needs a callable, not {function!r}")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout must be positive or None, not {timeout!r}")
    if loader.num_workers == 0:
        return [function(loader.dataset, *args)]
    workers = _living(loader)
    in_threads = bool(workers) and isinstance(workers[0][1], threading.Thread)
    # What cannot be sent is said also where no worker lives.
    pickled = b"" if in_threads else pickle.dumps((function, args), pickle.HIGHEST_PROTOCOL)
    if not workers:
        raise RuntimeError(
            "call_workers() found no worker that lives: workers live during an epoch, and with "
            "persistent_workers=True from the first iter() on; before that, change the dataset itself"
        )
    limit = timeout or loader.timeout or None
    if in_threads:
        found = thread_calls.asked(workers, function, args, limit)
    else:
        answers = _asked(workers, pickled, limit, lambda: _take_committed(loader))
        found = [pickle.loads(answer) for answer in answers]
    for answer in found:
        if isinstance(answer, internals.ExceptionWrapper):
            answer.reraise()
    return found


def _living(loader: Any) -> list[tuple[Any, Any]]:
    """The task queue and the process of each worker, of all iterators that are under way."""
    found = []
    for iterator in ending.alive(loader):
        if isinstance(iterator, TransportIterator) and iterator._transport.is_inherited():
            # In a forked child: they are the parent's.
            continue
        workers = getattr(iterator, "_workers", None)
        if not workers or getattr(iterator, "_shutdown", True):
            continue
        if not isinstance(iterator, TransportIterator):
            raise RuntimeError(
                "call_workers() cannot reach workers on torch's own path; ringloader.report() says why the "
                "loader takes it"
            )
        pairs = zip(iterator._index_queues, workers, strict=True)
        # Workers that were sent the last signal, at the end of an iterable dataset, are about to end.
        found += [(index_queue, process) for index_queue, process in pairs if not index_queue.ended]
    return found


def _take_committed(loader: Any) -> None:
    """Takes the batches that are there: a worker that waits for room comes to no call."""
    for iterator in ending.alive(loader):
        if isinstance(iterator, RingIterator):
            iterator._take_committed()


def _asked(
    workers: list[tuple[Any, Any]], pickled: bytes, timeout: float | None, make_room: Callable[[], None]
) -> list[bytes]:
    """The answers, in the order of the workers. Meanwhile ``make_room`` is called now and then."""
    deadline = None if timeout is None else time.monotonic() + timeout
    answers: dict[int, bytes] = {}
    pids = [process.pid for _, process in workers]
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        # A name without a file, that the system makes up.
        listener.bind("")
        listener.listen(len(workers))
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)
        parts: dict[socket.socket, list[bytes]] = {}
        try:
            for index_queue, _ in workers:
                index_queue.call(Call(listener.getsockname(), pickled))
            while len(answers) < len(workers):
                # Before the look: what a worker said before it ended is there then.
                lost = [
                    process for _, process in workers if process.pid not in answers and not process.is_alive()
                ]
                ready = selector.select(0 if lost else _left(deadline))
                for key, _ in ready:
                    if key.fileobj is listener:
                        _accept(listener, selector, parts)
                    else:
                        _read(key.fileobj, selector, parts, answers, pids)
                if lost and not ready:
                    pid = lost[0].pid
                    raise RuntimeError(f"DataLoader worker (pid(s) {pid}) exited unexpectedly")
                if not ready:
                    make_room()
                if not ready and deadline is not None and time.monotonic() >= deadline:
                    silent = [number for number, pid in enumerate(pids) if pid not in answers]
                    raise RuntimeError(
                        f"DataLoader timed out after {timeout} seconds: call_workers() has no answer of "
                        f"worker(s) {', '.join(map(str, silent))}"
                    )
        finally:
            for connection in parts:
                connection.close()
    return [answers[pid] for pid in pids]


def _left(deadline: float | None) -> float:
    if deadline is None:
        return _LOOK_SECONDS
    return max(0.0, min(_LOOK_SECONDS, deadline - time.monotonic()))


def _accept(
    listener: socket.socket, selector: selectors.BaseSelector, parts: dict[socket.socket, list[bytes]]
) -> None:
    try:
        connection, _ = listener.accept()
    except OSError:
        return
    connection.setblocking(False)
    parts[connection] = []
    selector.register(connection, selectors.EVENT_READ)


def _read(
    connection: Any,
    selector: selectors.BaseSelector,
    parts: dict[socket.socket, list[bytes]],
    answers: dict[int, bytes],
    pids: list[int],
) -> None:
    try:
        part = connection.recv(1 << 20)
    except BlockingIOError:
        return
    except OSError:
        part = b""
    if part:
        parts[connection].append(part)
        return
    selector.unregister(connection)
    whole = b"".join(parts.pop(connection))
    # By the system's word: only a worker's answer is unpickled.
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    connection.close()
    pid = _CREDENTIALS.unpack(credentials)[0]
    # A worker that ended while it answered has said nothing whole.
    if pid in pids and len(whole) >= LENGTH.size and LENGTH.unpack_from(whole)[0] == len(whole) - LENGTH.size:
        answers[pid] = whole[LENGTH.size :]
