"""The dispatching process: reads the source, and sends its items to the workers in turn."""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

import ringloader._native as _native
from ringloader._common import forks, moved_storages
from ringloader._torch import internals
from ringloader._worker import queues

# For a source that does not end when it is asked to.
GRACE_SECONDS = 5.0

_WHERE = "in the dispatching process"


class _StopError(BaseException):
    """The process is to end. No `Exception`: a source's handler must not take it."""


def run_dispatcher(source: Iterable[Any], requests: Any, workers: int, share: int, main_pid: int) -> None:
    """Serves the workers of one iterator until the last of them has ended. The process's main function.

    Args:
        source: What is read.
        requests: The socket on which each worker sends the descriptors of its rings.
        workers: How many there are.
        share: Bytes of shared memory for the items of one worker.
        main_pid: The main process.
    """
    # The main process has the interrupt, and ends this one.
    signal.signal(signal.SIGINT, _do_nothing)
    with contextlib.suppress(_StopError):
        signal.signal(signal.SIGTERM, _stop)
        try:
            forks.tell_native()
            if _native.SUPPORTED:
                atexit.register(_native.note_exit)
                moved_storages.keep_views()
            torch.set_num_threads(1)
            threading.Thread(target=_end_with, args=(main_pid,), daemon=True).start()
            with socket.socket(fileno=requests.detach()) as theirs:
                consumers = _accept(theirs, workers, share)
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
        poll = select.poll()
        poll.register(main, select.POLLIN)
        poll.poll()
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os._exit(1)


class _Consumer:
    """A worker, and how far it is."""

    def __init__(self, port: _native.Port) -> None:
        self._port = port
        self._results = queues.Results(port, _WHERE)
        self.epoch = 0
        self.seed = 0
        # Items that it may be sent now.
        self.allowance = 0
        # The last epoch in which it reads no more.
        self.left = 0
        self.has_ended = False

    def receive(self) -> None:
        """Waits for a message, or the worker's end."""
        task = self._port.get(None)
        if task is None:
            self.has_ended = True
            return
        epoch, (allowance, seed) = task[0]
        self.epoch = abs(epoch)
        if epoch < 0:
            self.left = -epoch
            return
        self.allowance += allowance
        self.seed = seed

    def reads_in(self, epoch: int) -> bool:
        """Whether items of that epoch are for it."""
        return not self.has_ended and self.left < epoch

    def send(self, epoch: int, item: object) -> None:
        """Sends an item that was allowed."""
        self.allowance -= 1
        self._results.put((epoch, item))

    def send_end(self, epoch: int) -> None:
        """Sends the end of an epoch, for which the ring has room beside all that was allowed."""
        if not self.has_ended:
            self._port.put((-epoch, None))


def _accept(requests: socket.socket, workers: int, share: int) -> list[_Consumer]:
    """The workers in their order, once all have come."""
    found: dict[int, _Consumer] = {}
    while len(found) < workers:
        message, fds, _, _ = socket.recv_fds(requests, 1 << 10, 16)
        if not message:
            raise _StopError
        try:
            worker, *names = message.decode().split()
            sent = _native.WorkerFds(**dict(zip(names, fds, strict=True)))
            found[int(worker)] = _Consumer(_native.Port.attach(sent, 0, share))
        finally:
            for fd in fds:
                os.close(fd)
    return [found[worker] for worker in range(workers)]


def _serve(source: Iterable[Any], consumers: list[_Consumer]) -> None:
    epoch = 1
    while _all_are_in(consumers, epoch):
        if epoch == 1:
            _seed(max(one.seed for one in consumers) + len(consumers))
        _serve_epoch(source, consumers, epoch)
        for one in consumers:
            one.send_end(epoch)
        epoch += 1


def _all_are_in(consumers: list[_Consumer], epoch: int) -> bool:
    """Waits until each worker has begun the epoch or ended. Returns whether any is there.

    INVARIANT: no worker waits here for another. A worker begins an epoch before it asks for an item of it,
    and one that is still in the epoch before has been sent that one's end.
    """
    for one in consumers:
        while one.epoch < epoch and not one.has_ended:
            one.receive()
    return any(not one.has_ended for one in consumers)


def _serve_epoch(source: Iterable[Any], consumers: list[_Consumer], epoch: int) -> None:
    items = _items(source)
    turn = 0
    while any(one.reads_in(epoch) for one in consumers):
        one = consumers[turn % len(consumers)]
        while one.allowance == 0 and one.reads_in(epoch) and one.epoch == epoch:
            one.receive()
        if one.epoch > epoch:
            # The epoch was abandoned.
            return
        turn += 1
        if one.reads_in(epoch):
            try:
                item = next(items)
            except StopIteration:
                return
            except Exception:
                item = internals.ExceptionWrapper(where=_WHERE)
            one.send(epoch, item)
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
