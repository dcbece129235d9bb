"""The dispatching process of an iterator over a `Dispatch`: reads the source, and sends its items in turn."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import random
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.multiprocessing

import ringloader._native as _native
from ringloader._common import held_memory
from ringloader._core.feature import Feature, Setup
from ringloader._features import dispatch, spawn_server
from ringloader._features.dispatch import stream
from ringloader._start import fallback, pickled, processes
from ringloader._torch import internals
from ringloader._worker import entry

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

# The time for a source that does not end when it is asked to.
_GRACE_SECONDS = 5.0


class Dispatching:
    """The dispatching process of one iterator, and what its workers are given to reach it.

    Args:
        source: The loader's dataset.
        context: The ``multiprocessing`` context that starts the workers.
        workers: How many there will be.
        share: Bytes of shared memory for the items of one worker.
        ends_with_error: True if the error of a batch ends the epoch of its worker.

    Raises:
        Exception: What starting a process raises. Nothing is left then.
    """

    def __init__(
        self, source: dispatch.Dispatch, context: Any, workers: int, share: int, ends_with_error: bool
    ) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            arguments: tuple[Any, ...] = (source._source, theirs, workers, share, os.getpid())
            if context.get_start_method() != "fork":
                sent = pickled.ForOne(
                    source._source, fallback.WITHOUT_PICKLE, finds_main=fallback.main_is_found()
                )
                arguments = sent, *arguments[1:]
            made = context.Process(target=run_dispatcher, args=arguments)
            made.daemon = True
            self._process = spawn_server.by_server(made)
            processes.start(self._process, context)
            del made, arguments
        except BaseException:
            self._requests.close()
            raise
        finally:
            # Messages of workers must fail once the process has ended, so only the process has its end.
            theirs.close()
        pid = self._process.pid
        self.option = stream.DispatchEnd(
            source._key, self._requests, pid, source._prefetch, share, ends_with_error
        )

    def close(self) -> None:
        """Ends the process. Its workers have ended."""
        self._requests.close()
        self._process.terminate()
        processes.end(self._process, _GRACE_SECONDS)


def feature_for(loader: TorchLoader, _options: object, setup: Setup) -> Dispatches | None:
    """Returns the feature of a loader with workers over a `Dispatch`.

    Raises:
        ValueError: If workers would take items at different rates, and wait for each other.
    """
    dispatch.check_rates(loader.dataset, setup.workers, loader.in_order)
    return Dispatches(loader, setup.workers)


class Dispatches(Feature):
    """Starts the dispatching process of an iterator.

    Args:
        loader: The loader.
        workers: How many workers there will be.
    """

    def __init__(self, loader: TorchLoader, workers: int) -> None:
        source = loader.dataset
        # The dataset as workers need it.
        self._without_source = dispatch.without_source(source)
        takes_many = loader._auto_collation or not source._keeps_count
        ends_with_error = takes_many and dispatch.are_in_turn(workers, loader.in_order)
        context = loader.multiprocessing_context or torch.multiprocessing
        self._start = functools.partial(
            Dispatching, source, context, workers, ends_with_error=ends_with_error
        )

        self._dispatching: Dispatching | None = None

    def attach(self, transport: Any) -> None:
        self._dispatching = self._start(share=transport.engine.share)
        transport.add(self._dispatching.option)

    def work(self, work: Any) -> Any:
        return work._replace(dataset=self._without_source)

    def close(self) -> None:
        if self._dispatching is not None:
            self._dispatching.close()


class _StopError(BaseException):
    """The process is to end. No `Exception`: a source's handler must not take it."""


def run_dispatcher(
    source: Iterable[Any],
    requests: socket.socket,
    workers: int,
    share: int,
    main_pid: int,
) -> None:
    """Serves the workers of one iterator until the last of them has ended. The process's main function.

    Args:
        source: What is read.
        requests: The socket on which each worker sends the descriptors of its rings.
        workers: How many there are.
        share: Bytes of shared memory for the items of one worker.
        main_pid: The main process.
    """
    entry.drop_what_it_began_with()
    # The main process has the interrupt, and ends this one.
    signal.signal(signal.SIGINT, _do_nothing)
    with contextlib.suppress(_StopError):
        signal.signal(signal.SIGTERM, _stop)
        try:
            held_memory.tell_of_forks()
            if _native.SUPPORTED:
                atexit.register(_native.note_exit)
                held_memory.keep_views()
            torch.set_num_threads(1)
            threading.Thread(target=_end_with, args=(main_pid,), daemon=True).start()
            with requests:
                consumers = _accept(requests, workers, share)
            _serve(source, consumers)
        finally:
            signal.signal(signal.SIGTERM, _do_nothing)


def _do_nothing(*_: object) -> None:
    pass


def _stop(*_: object) -> None:
    signal.signal(signal.SIGTERM, _do_nothing)
    raise _StopError


def _end_with(main_pid: int) -> None:
    """Ends this process once the main process has ended, also where the source does not return."""
    with contextlib.suppress(ProcessLookupError):
        main = os.pidfd_open(main_pid)
        with contextlib.suppress(OSError):
            # Ends the process also where the source keeps this thread from running.
            _native.end_with_parent(main)
        poll = select.poll()
        poll.register(main, select.POLLIN)
        poll.poll()
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
    time.sleep(_GRACE_SECONDS)
    os._exit(1)


def _accept(requests: socket.socket, workers: int, share: int) -> list[Consumer]:
    """Returns the workers in their order, once all have come."""
    found: dict[int, Consumer] = {}
    while len(found) < workers:
        message, fds, _, _ = socket.recv_fds(requests, 1 << 10, 16)
        if not message:
            raise _StopError
        try:
            found[int(message)] = Consumer(_native.Port.attach(fds, 0, share))
        finally:
            for fd in fds:
                os.close(fd)
    return [found[worker] for worker in range(workers)]


def _serve(source: Iterable[Any], consumers: list[Consumer]) -> None:
    is_seeded = False
    while _all_are_in(consumers):
        if not is_seeded:
            _seed(max(one.seed for one in consumers) + len(consumers))
            is_seeded = True
        _serve_epoch(source, consumers)
        for one in consumers:
            one.send_end()


def _all_are_in(consumers: list[Consumer]) -> bool:
    """Waits until each worker has begun the next epoch or ended. Returns True if any is left.

    INVARIANT: no worker waits here for another. A worker begins an epoch before it asks for an item of it,
    and one that is still in the epoch before has been sent that one's end.
    """
    for one in consumers:
        while not one.begun and not one.has_ended:
            one.receive()
        one.begun = max(0, one.begun - 1)
    return any(not one.has_ended for one in consumers)


def _serve_epoch(source: Iterable[Any], consumers: list[Consumer]) -> None:
    items = _items(source)
    turn = 0
    while any(one.is_reading for one in consumers):
        one = consumers[turn % len(consumers)]
        one.wait_for_turn()
        if one.begun:
            # The epoch was abandoned.
            return
        turn += 1
        if one.is_reading:
            try:
                item = next(items)
            except StopIteration:
                return
            except Exception:
                item = internals.ExceptionWrapper(where=WHERE)
            one.send(item)
            del item


def _items(source: Iterable[Any]) -> Iterator[Any]:
    try:
        return iter(source)
    except Exception as error:
        return _raising(error)


def _raising(error: Exception) -> Iterator[Any]:
    raise error
    yield


def _seed(seed: int) -> None:
    """Seeds what torch seeds in a worker."""
    seed &= (1 << 63) - 1
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed([seed & 0xFFFFFFFF, seed >> 32])


# The place of an error, in the words of torch's errors.
WHERE = "in the dispatching process"


class Consumer:
    """A worker, and how far it is.

    Args:
        port: The end of its rings.

    Attributes:
        begun: Epochs that it has begun after the one that is served.
        seed: The loader's base seed.
        has_ended: True once the worker has ended.
    """

    def __init__(self, port: _native.Port) -> None:
        self._port = port
        self.begun = 0
        self.seed = 0
        # The number of items that the worker may be sent now.
        self._allowance = 0
        # True if it reads no more in the epoch that it has begun last.
        self._has_left = False
        self.has_ended = False

    def receive(self, waits: bool = True) -> bool:
        """Takes a message, or notes the worker's end. Returns whether there was one."""
        found = None if self.has_ended else (self._port.get(),) if waits else self._port.ahead()
        if found is None:
            return False
        if found[0] is None:
            self.has_ended = True
            return True
        message, (allowance, self.seed) = found[0]
        self._allowance += allowance
        if message != stream.TAKES:
            self.begun += message != stream.LEAVES
            self._has_left = message != stream.BEGINS
        return True

    def wait_for_turn(self) -> None:
        """Waits until the worker may be sent an item, or reads no more in this epoch."""
        # Each time: a worker that has left takes nothing, and an item for it might find no room.
        while self.receive(waits=False):
            pass
        while self._allowance == 0 and self.is_reading:
            self.receive()

    @property
    def is_reading(self) -> bool:
        """True if the worker still takes items of the epoch that is served."""
        return not (self.has_ended or self._has_left or self.begun)

    def send(self, item: object) -> None:
        """Sends an item that was allowed. Waits for room."""
        self._allowance -= 1
        try:
            self._port.put((stream.ITEM, item))
        except Exception:
            self._port.put((stream.ITEM, internals.ExceptionWrapper(where=WHERE)))

    def send_end(self) -> None:
        """Sends the end of an epoch. The ring has room for it, whatever was allowed."""
        if not self.has_ended:
            self._port.put((stream.END, None))
