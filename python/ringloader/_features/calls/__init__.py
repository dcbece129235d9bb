"""``call_workers``: a function runs in each worker."""

from __future__ import annotations

import contextlib
import functools
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import Pipe, connection
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import get_worker_info

from ringloader._common import pickling
from ringloader._features import rules
from ringloader._torch import internals, stand_ins
from ringloader._transport.overdue import reraise

if TYPE_CHECKING:
    from ringloader._common.protocols import OurWorkersIterator
    from ringloader._torch.protocols import TorchLoader


# Seconds after which it looks again if a worker that has not answered still lives.
_LOOK_SECONDS = 0.1


def call_workers(
    loader: TorchLoader,
    iterators: Sequence[Any],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    timeout: float | None,
) -> list[Any]:
    """Implements ``DataLoader.call_workers``, for the iterators of a loader that are under way."""
    if not callable(function):
        raise TypeError(f"call_workers() needs a callable, not {function!r}")
    rules.seconds_or_none("timeout", timeout)
    if loader.num_workers == 0:
        return [function(loader.dataset, *args)]
    for iterator in iterators:
        # An epoch that was begun before `iter` is given up, so that the call reaches all batches of it.
        for feature in iterator._features:
            feature.give_up_next()
    workers = _living(iterators)
    in_threads = bool(workers) and isinstance(workers[0].handle, threading.Thread)
    # Pickled first: a function that cannot be sent raises also where no worker lives.
    pickled = b"" if in_threads else _pickled(function, args)
    if not workers:
        raise RuntimeError(
            "call_workers() found no living worker: workers live during an epoch, and with "
            "persistent_workers=True from the first iter() on; before that, change the dataset itself"
        )
    asked = _AskedThreads(workers, function, args) if in_threads else _AskedProcesses(workers, pickled)
    with contextlib.closing(asked):
        answers = _collected(asked, workers, timeout or loader.timeout or None)
    if not in_threads:
        answers = [pickle.loads(answer) for answer in answers]
    for answer in answers:
        if isinstance(answer, internals.ExceptionWrapper):
            reraise(answer)
    return answers


def _pickled(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((function, args), pickle.HIGHEST_PROTOCOL)
    # Pickle's own errors have all three types.
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise pickle.PicklingError(
            f"call_workers() cannot send {function!r} and its arguments to worker processes: {error}. "
            "They are pickled: pass a function at the top level of a module, no lambda or inner one, and "
            "arguments that can be pickled; worker_method='thread' pickles nothing"
        ) from error


class _Living(NamedTuple):
    """A living worker."""

    iterator: OurWorkersIterator
    number: int
    handle: Any


def _living(iterators: Iterable[Any]) -> list[_Living]:
    """Returns the workers of iterators."""
    found = []
    for iterator in iterators:
        workers = getattr(iterator, "_all_workers", None)
        if workers is None:
            if getattr(iterator, "_workers", None) and not getattr(iterator, "_shutdown", True):
                raise RuntimeError(
                    "call_workers() cannot reach workers on torch's own path; ringloader.report() says why "
                    "the loader takes it"
                )
        # In a forked child, they are the parent's.
        elif not workers.transport.is_inherited() and not iterator._shutdown:
            # Workers that were sent the last signal, at the end of an iterable dataset, are about to end.
            found += [_Living(iterator, number, handle) for number, handle in workers.living()]
    return found


def _collected(
    asked: _AskedProcesses | _AskedThreads, workers: Sequence[_Living], timeout: float | None
) -> list[Any]:
    """Returns the answers, in the order of the workers."""
    deadline = None if timeout is None else time.monotonic() + timeout
    answers: dict[int, Any] = {}
    while len(answers) < len(workers):
        left = _LOOK_SECONDS if deadline is None else min(_LOOK_SECONDS, deadline - time.monotonic())
        missing = [number for number in range(len(workers)) if number not in answers]
        # Before the look: its last messages have arrived then.
        lost = [number for number in missing if not workers[number].handle.is_alive()]
        found = asked.answers(0.0 if lost else max(left, 0.0))
        answers.update(found)
        if found:
            continue
        if lost:
            raise RuntimeError(asked.text_of_lost(lost))
        if deadline is not None and time.monotonic() >= deadline:
            silent = ", ".join(map(str, missing))
            raise RuntimeError(
                f"DataLoader timed out after {timeout} seconds: call_workers() has no answer of worker(s) "
                f"{silent}"
            )
    return [answers[number] for number in range(len(workers))]


class _AskedProcesses:
    """Workers that are processes, and the pipes on which they answer.

    Args:
        workers: The workers.
        pickled: The function and its arguments.
    """

    def __init__(self, workers: Sequence[_Living], pickled: bytes) -> None:
        self._workers = workers
        self._pickled = pickled
        self._unsent = dict(enumerate(workers))
        self._pipes: dict[Any, int] = {}

    def answers(self, seconds: float) -> dict[int, Any]:
        """Waits for answers for a number of seconds at most, and returns them by their workers' places."""
        for number, worker in list(self._unsent.items()):
            if self._is_sent(number, worker):
                del self._unsent[number]
        ready: list[Any] = connection.wait(list(self._pipes), seconds)
        found = {}
        for pipe in ready:
            number = self._pipes.pop(pipe)
            with pipe:
                try:
                    found[number] = pipe.recv_bytes()
                except (EOFError, OSError):
                    _check_ended(number, self._workers[number].handle)
        if not ready:
            for worker in self._workers:
                # A worker that waits for room comes to no call.
                worker.iterator._take_committed()
        return found

    def _is_sent(self, number: int, worker: _Living) -> bool:
        """Sends a worker the call. Returns False if there is no room for it yet."""
        reader, writer = Pipe(duplex=False)
        make = functools.partial(_Call, self._pickled)
        with writer:
            try:
                is_sent: bool = worker.iterator._all_workers.transport.call(
                    worker.number, writer.fileno(), make
                )
            except ConnectionError:
                # The worker has ended, and is found among the lost.
                is_sent = False
            except BaseException:
                reader.close()
                raise
        if is_sent:
            self._pipes[reader] = number
        else:
            reader.close()
        return is_sent

    def text_of_lost(self, lost: Sequence[int]) -> str:
        """Returns the error for workers that have ended without an answer."""
        return f"DataLoader worker (pid(s) {self._workers[lost[0]].handle.pid}) exited unexpectedly"

    def close(self) -> None:
        """Closes the pipes of workers that have not answered."""
        for pipe in self._pipes:
            pipe.close()


def _check_ended(number: int, process: Any) -> None:
    """Raises for a worker that lives and will not answer. One that has ended is found among the lost."""
    process.join(1.0)
    if process.is_alive():
        raise RuntimeError(
            f"call_workers() has no answer of worker {number} (pid {process.pid}): it did not get "
            "the address for its answer, perhaps because too many files are open in it"
        )


class _Call:
    """On its way to a worker process, among its tasks.

    Args:
        function: The function and its arguments, pickled.
        tag: Of the descriptor of the pipe for the answer, which is sent to the worker beside it.
    """

    def __init__(self, function: bytes, tag: int) -> None:
        self._tag = tag
        self._function = function

    def __call__(self) -> None:
        answer = self._answer()
        port = stand_ins.port
        assert port is not None
        # Without the descriptor the pipe ends, which tells the main process. The main process may
        # have stopped waiting.
        with (
            contextlib.suppress(OSError, RuntimeError),
            connection.Connection(port.receive_fd(self._tag), readable=False) as pipe,
        ):
            pipe.send_bytes(answer)

    def _answer(self) -> bytes:
        info = get_worker_info()
        assert info is not None
        try:
            function, args = pickle.loads(self._function)
            result = function(info.dataset, *args)
            return pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
        except Exception:
            wrapped = internals.ExceptionWrapper(where=f"in DataLoader worker process {info.id}")
        return pickle.dumps(pickling.whole(wrapped), pickle.HIGHEST_PROTOCOL)


class _AskedThreads:
    """Workers that are threads, and the queue on which they answer.

    Args:
        workers: The workers.
        function: The function.
        args: Its arguments.
    """

    def __init__(
        self, workers: Sequence[_Living], function: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        self._queue: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._function = function
        self._args = args
        for place, worker in enumerate(workers):
            worker.iterator._all_workers.transport.call(worker.number, functools.partial(self._answer, place))

    def _answer(self, place: int) -> None:
        """Calls the function in a worker."""
        info = get_worker_info()
        assert info is not None
        try:
            answer = self._function(info.dataset, *self._args)
        except Exception:
            answer = internals.ExceptionWrapper(where=f"in DataLoader worker thread {info.id}")
        self._queue.put((place, answer))

    def answers(self, seconds: float) -> dict[int, Any]:
        """Waits for an answer for a number of seconds at most, and returns it by its worker's place."""
        try:
            return dict((self._queue.get(timeout=seconds),))
        except queue.Empty:
            return {}

    def text_of_lost(self, lost: Sequence[int]) -> str:
        """Returns the error for workers that have ended without an answer."""
        names = ", ".join(map(str, lost))
        return f"DataLoader worker thread(s) {names} ended, and call_workers() has no answer of theirs"

    def close(self) -> None:
        """Does nothing: there is nothing to give back."""
