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
from ringloader._dispatch.consumer import WHERE, Consumer
from ringloader._dispatch.holding import Holding
from ringloader._torch import internals

# The time for a source that does not end when it is asked to.
GRACE_SECONDS = 5.0


class _StopError(BaseException):
    """The process is to end. No `Exception`: a source's handler must not take it."""


def run_dispatcher(
    source: Iterable[Any], requests: Any, workers: int, share: int, main_pid: int, most_held: int | None
) -> None:
    """Serves the workers of one iterator until the last of them has ended. The process's main function.

    Args:
        source: What is read.
        requests: The socket on which each worker sends the descriptors of its rings.
        workers: How many there are.
        share: Bytes of shared memory for the items of one worker.
        main_pid: The main process.
        most_held: Bytes of items that may be held here for workers that are full, while another is hungry;
            None where nothing need be held.
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
            _serve(source, consumers, most_held)
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
    time.sleep(GRACE_SECONDS)
    os._exit(1)


def _accept(requests: socket.socket, workers: int, share: int) -> list[Consumer]:
    """Returns the workers in their order, once all have come."""
    found: dict[int, Consumer] = {}
    while len(found) < workers:
        message, fds, _, _ = socket.recv_fds(requests, 1 << 10, 16)
        if not message:
            raise _StopError
        try:
            worker, *names = message.decode().split()
            sent = _native.WorkerFds(**dict(zip(names, fds, strict=True)))
            found[int(worker)] = Consumer(_native.Port.attach(sent, 0, share))
        finally:
            for fd in fds:
                os.close(fd)
    return [found[worker] for worker in range(workers)]


def _serve(source: Iterable[Any], consumers: list[Consumer], most_held: int | None) -> None:
    epoch = 1
    while _all_are_in(consumers, epoch):
        if epoch == 1:
            _seed(max(one.seed for one in consumers) + len(consumers))
        _serve_epoch(source, consumers, epoch, most_held)
        for one in consumers:
            one.send_end(epoch)
        epoch += 1


def _all_are_in(consumers: list[Consumer], epoch: int) -> bool:
    """Waits until each worker has begun the epoch or ended. Returns whether any is there.

    INVARIANT: no worker waits here for another. A worker begins an epoch before it asks for an item of it,
    and one that is still in the epoch before has been sent that one's end.
    """
    for one in consumers:
        while one.epoch < epoch and not one.has_ended:
            one.receive(None)
    return any(not one.has_ended for one in consumers)


def _serve_epoch(source: Iterable[Any], consumers: list[Consumer], epoch: int, most_held: int | None) -> None:
    items = _items(source)
    holding = None if most_held is None else Holding(consumers, epoch, most_held)
    turn = 0
    while any(one.reads_in(epoch) for one in consumers):
        one = consumers[turn % len(consumers)]
        if holding is None:
            while one.allowance == 0 and one.reads_in(epoch) and one.epoch == epoch:
                one.receive(None)
        else:
            holding.wait_for_turn(one)
        if one.epoch > epoch:
            # The epoch was abandoned.
            return
        turn += 1
        if one.reads_in(epoch):
            try:
                item = next(items)
            except StopIteration:
                break
            except Exception:
                item = internals.ExceptionWrapper(where=WHERE)
            if holding is None:
                one.send(epoch, item)
            elif not holding.give(one, item):
                break
            del item
    if holding is not None:
        holding.finish()


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
