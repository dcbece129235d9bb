"""``DataLoader.call_workers``: a function that runs in each living worker, a process or a thread."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import queue
import selectors
import threading
import time
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from ringloader._iterator import ending
from ringloader._iterator.with_workers import WorkersIterator
from ringloader._placement.failed_arrival import reraise
from ringloader._torch import internals
from ringloader._worker.calls import LENGTH, Call

# Seconds after which it looks again if a worker that has not answered still lives.
_LOOK_SECONDS = 0.1


def call_workers(
    loader: Any, function: Callable[..., Any], args: tuple[Any, ...], timeout: float | None
) -> list[Any]:
    """Implements ``DataLoader.call_workers``."""
    if not callable(function):
        raise TypeError(f"call_workers() needs a callable, not {function!r}")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout must be positive or None, not {timeout!r}")
    if loader.num_workers == 0:
        return [function(loader.dataset, *args)]
    _give_up_next_epochs(loader)
    workers = _living(loader)
    in_threads = bool(workers) and isinstance(workers[0].handle, threading.Thread)
    # Pickled first: a function that cannot be sent raises also where no worker lives.
    pickled = b"" if in_threads else _pickled(function, args)
    if not workers:
        raise RuntimeError(
            "call_workers() found no worker that lives: workers live during an epoch, and with "
            "persistent_workers=True from the first iter() on; before that, change the dataset itself"
        )
    limit = timeout or loader.timeout or None
    if in_threads:
        found = _asked_threads(workers, function, args, limit)
    else:
        answers = _asked_processes(workers, pickled, limit, lambda: _take_committed(loader))
        found = [pickle.loads(answer) for answer in answers]
    for answer in found:
        if isinstance(answer, internals.ExceptionWrapper):
            reraise(answer)
    return found


def _pickled(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((function, args), pickle.HIGHEST_PROTOCOL)
    # Pickle's own errors have all three types.
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise pickle.PicklingError(
            f"call_workers() cannot send {function!r} and its arguments to worker processes: {error}. "
            "They are pickled: pass a function that a module has at its top level, no lambda and none that "
            "is defined in another one, and arguments that can be pickled; with worker_method='thread' "
            "nothing is sent"
        ) from error


class _Living(NamedTuple):
    """A living worker."""

    transport: Any
    number: int
    handle: Any


def _living(loader: Any) -> list[_Living]:
    """Returns the workers of all iterators that are under way."""
    found = []
    for iterator in ending.alive(loader):
        if not isinstance(iterator, WorkersIterator):
            if getattr(iterator, "_workers", None) and not getattr(iterator, "_shutdown", True):
                raise RuntimeError(
                    "call_workers() cannot reach workers on torch's own path; ringloader.report() says why "
                    "the loader takes it"
                )
            continue
        transport = iterator._transport
        # In a forked child, they are the parent's.
        if not transport.is_inherited() and not iterator._shutdown:
            # Workers that were sent the last signal, at the end of an iterable dataset, are about to end.
            found += [
                _Living(transport, number, handle)
                for number, handle in enumerate(iterator._workers)
                if not transport.has_been_ended(number)
            ]
    return found


def _give_up_next_epochs(loader: Any) -> None:
    """Gives up epochs that were begun before ``iter``, so that a call reaches all batches of the next one."""
    for iterator in ending.alive(loader):
        next_epoch = getattr(iterator, "_next_epoch", None)
        if next_epoch is not None:
            next_epoch.give_up()


def _take_committed(loader: Any) -> None:
    """Takes the batches that are there: a worker that waits for room comes to no call."""
    for iterator in ending.alive(loader):
        if isinstance(iterator, WorkersIterator):
            iterator._take_committed()


def _asked_processes(
    workers: list[_Living], pickled: bytes, timeout: float | None, make_room: Callable[[], None]
) -> list[bytes]:
    """The answers, in the order of the workers. Meanwhile ``make_room`` is called now and then."""
    deadline = None if timeout is None else time.monotonic() + timeout
    answers: dict[int, bytes] = {}
    with contextlib.ExitStack() as ends, selectors.DefaultSelector() as selector:
        unsent = dict(enumerate(workers))
        while len(answers) < len(workers):
            for number, worker in list(unsent.items()):
                reader = _sent(worker, pickled)
                if reader is not None:
                    ends.callback(os.close, reader)
                    selector.register(reader, selectors.EVENT_READ, (number, bytearray()))
                    del unsent[number]
            # Before the look: what a worker said before it ended is there then.
            lost = [
                worker.handle
                for number, worker in enumerate(workers)
                if number not in answers and not worker.handle.is_alive()
            ]
            ready = selector.select(0 if lost else _left(deadline))
            for key, _ in ready:
                number, answer = key.data
                if _is_read(key.fd, answer):
                    selector.unregister(key.fd)
                    if _is_whole(answer):
                        answers[number] = bytes(answer[LENGTH.size :])
                    else:
                        _check_ended(number, workers[number].handle)
            if lost and not ready:
                pid = lost[0].pid
                raise RuntimeError(f"DataLoader worker (pid(s) {pid}) exited unexpectedly")
            if not ready:
                make_room()
            if not ready and deadline is not None and time.monotonic() >= deadline:
                raise _timed_out(timeout, _silent(workers, answers))
    return [answers[number] for number in range(len(workers))]


def _sent(worker: _Living, pickled: bytes) -> int | None:
    """Sends a worker a call. Returns where its answer comes; None: there is no room for it yet."""
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        # The worker's end blocks.
        os.set_blocking(writer, True)
        if worker.transport.call(worker.number, writer, functools.partial(Call, pickled)):
            return reader
    except ConnectionError:
        # The worker has ended, and is found among the lost.
        pass
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    os.close(reader)
    return None


def _silent(workers: Sequence[_Living], answers: Container[int]) -> str:
    """Returns the numbers of workers without an answer."""
    return ", ".join(str(number) for number in range(len(workers)) if number not in answers)


def _timed_out(timeout: float | None, silent: str) -> RuntimeError:
    return RuntimeError(
        f"DataLoader timed out after {timeout} seconds: call_workers() has no answer of worker(s) {silent}"
    )


def _left(deadline: float | None) -> float:
    if deadline is None:
        return _LOOK_SECONDS
    return max(0.0, min(_LOOK_SECONDS, deadline - time.monotonic()))


def _check_ended(number: int, process: Any) -> None:
    """Raises for a worker that lives and will not answer. One that has ended is found among the lost."""
    process.join(1.0)
    if process.is_alive():
        raise RuntimeError(
            f"call_workers() has no answer of worker {number} (pid {process.pid}): it could not be told "
            "where to answer, as where too many files are open in it"
        )


def _is_read(reader: int, answer: bytearray) -> bool:
    """Reads what is there of an answer. Returns whether it is whole, or has ended before."""
    try:
        part = os.read(reader, 1 << 20)
    except BlockingIOError:
        return False
    answer += part
    return not part or _is_whole(answer)


def _is_whole(answer: bytearray) -> bool:
    return len(answer) >= LENGTH.size and len(answer) - LENGTH.size >= LENGTH.unpack_from(answer)[0]


def _asked_threads(
    workers: list[_Living], function: Callable[..., Any], args: tuple[Any, ...], timeout: float | None
) -> list[Any]:
    """The answers, or torch's wrappers of errors, in the order of the workers. Nothing is copied."""
    deadline = None if timeout is None else time.monotonic() + timeout
    answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    for number, worker in enumerate(workers):
        worker.transport.call(worker.number, _ThreadCall(function, args, number, answers))
    found: dict[int, Any] = {}
    while len(found) < len(workers):
        # Before the look: what a worker said before it ended is there then.
        lost = [number for number, worker in enumerate(workers) if not worker.handle.is_alive()]
        try:
            number, answer = answers.get(timeout=_left(deadline))
        except queue.Empty:
            missing = _silent(workers, found)
            if any(number not in found for number in lost):
                raise RuntimeError(
                    f"DataLoader worker thread(s) {missing} ended, and call_workers() has no answer of theirs"
                ) from None
            if deadline is not None and time.monotonic() >= deadline:
                raise _timed_out(timeout, missing) from None
            continue
        found[number] = answer
    return [found[number] for number in range(len(workers))]


class _ThreadCall:
    """Among the tasks of a worker that is a thread."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        number: int,
        answers: queue.SimpleQueue[tuple[int, Any]],
    ) -> None:
        self._function = function
        self._args = args
        self._number = number
        self._answers = answers

    def __call__(self) -> None:
        info = get_worker_info()
        assert info is not None
        try:
            answer = self._function(info.dataset, *self._args)
        except Exception:
            answer = internals.ExceptionWrapper(where=f"in DataLoader worker thread {info.id}")
        self._answers.put((self._number, answer))
