"""A worker's end of what the dispatching process sends.

Messages come in their order, and each epoch has one end: so they name no epoch. Those to the dispatching
process are `(message, [allowance, seed])`: the worker may be sent so many items more, and has the loader's
base seed. Those from there are `(ITEM, item)` and `(END, None)`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any, NoReturn

import torch.utils.data

import ringloader._native as _native
from ringloader._torch import internals
from ringloader._worker.options import EpochStart, Fetcher, Position, WorkerOption

# The worker begins an epoch; begins one in which it takes no items; takes one; takes no more in its epoch.
BEGINS, MISSES, TAKES, LEAVES = range(1, 5)
# An item; the end of an epoch.
ITEM, END = range(1, 3)

# Seconds after which a worker that waits for an item looks again whether one is still wanted.
_POLL_SECONDS = 0.1

# The ends in a worker, by the key of the dataset and the worker's number.
_ends: dict[tuple[str, int], DispatchEnd] = {}


def items_for(key: str, worker: int) -> Iterator[Any]:
    """Returns the items that the dispatching process sends to a worker.

    Raises:
        RuntimeError: If that dataset has no dispatching process.
    """
    found = _ends.get((key, worker))
    if found is None:
        raise RuntimeError(
            "a ringloader.Dispatch in a worker has no dispatching process: with workers, it must be the "
            "dataset of a ringloader.DataLoader itself, whose workers are processes and whose path "
            "(ringloader.report) is not 'torch'; use ringloader.install() or convert() for torch's loader, "
            "or num_workers=0"
        )
    return found


class _Leaving:
    """Tells where a worker ends its epoch before the items do: the others must not wait for it."""

    def __init__(self, fetcher: Fetcher, end: DispatchEnd) -> None:
        self._fetcher = fetcher
        self._end = end

    def fetch(self, index: Any, /) -> Any:
        if self._end.has_failed:
            self._end.raise_ended()
        try:
            return self._fetcher.fetch(index)
        except StopIteration:
            self._end.leave()
            raise
        except Exception:
            self._end.fail()
            raise


class DispatchEnd(WorkerOption):
    """A worker's end: iterates over the items of one epoch after those of another.

    Args:
        key: Of the dataset.
        requests: The socket to which each worker sends the descriptors of its rings.
        pid: The dispatching process.
        prefetch: Items on their way to one worker, at most.
        share: Bytes of shared memory for them.
        ends_with_error: True if the error of a batch ends the epoch of its worker.
    """

    position = Position.DISPATCH

    def __init__(
        self, key: str, requests: socket.socket, pid: int, prefetch: int, share: int, ends_with_error: bool
    ) -> None:
        self._key = key
        self._requests = requests
        self._pid = pid
        self._share = share
        self._ends_with_error = ends_with_error
        self._allowance = prefetch
        # Not for each item: a message each would cost as much as the item.
        self._tell_from = (prefetch + 1) // 2
        self._taken = prefetch
        self._seed = 0
        # Epochs that have begun here, and whose end has not come. Only items of the last one are taken.
        self._open = 0
        self._is_reading = False
        # True between the error of a batch, and the error which says that it has ended the epoch here.
        self.has_failed = False
        self._has_died = False

    def join(self, worker: int, port: _native.Port | None, start: EpochStart) -> None:  # noqa: ARG002
        """Reaches the dispatching process."""
        assert port is not None
        _ends[self._key, worker] = self
        self._port = port
        self._engine = _native.Engine(1, self._allowance, self._share)
        *fds, engines = self._engine.worker_fds(0)
        # The engine keeps its own socket for as long as it is not watched.
        fds.append(os.dup(engines))
        try:
            with self._requests as requests:
                # Before the request: if the process has ended, and another one has its number, sending fails.
                self._engine.watch_worker(0, self._pid)
                socket.send_fds(requests, [str(worker).encode()], fds)
        except (BrokenPipeError, ConnectionError):
            self._has_died = True
        finally:
            os.close(fds[-1])

    def wrap(self, fetcher: Fetcher) -> Fetcher:
        """Begins the next epoch. What is left of the one before is dropped."""
        info = torch.utils.data.get_worker_info()
        self._seed = 0 if info is None else info.seed - info.id
        self._open += 1
        self._is_reading = True
        self.has_failed = False
        self._tell(BEGINS)
        return _Leaving(fetcher, self)

    def leave(self) -> None:
        """Takes no more items in this epoch."""
        if self._is_reading:
            self._is_reading = False
            self._tell(LEAVES)

    def fail(self) -> None:
        """Takes no more items in this epoch after the error of a batch, if errors end it."""
        if self._ends_with_error and self._is_reading:
            self.has_failed = True
            self.leave()

    def raise_ended(self) -> NoReturn:
        """Raises the error of an epoch that another error has ended in this worker."""
        self.has_failed = False
        # The dispatching process may wait for room for one more.
        self._drop()
        raise RuntimeError(
            "after the error of a batch a worker takes no more items of a Dispatch in order: it has taken "
            "fewer than the others, which might wait for it. Pass in_order=False, or catch errors in the "
            "source and in its functions"
        )

    def miss(self, has_begun: bool) -> None:
        """Begins the next epoch, unless that has been done, and takes no items in it."""
        if has_begun:
            self.leave()
        else:
            self._open += 1
            self._is_reading = False
            self._drop()
            self._tell(MISSES)

    def _drop(self) -> None:
        """Takes all that has come: each epoch leaves its end, for which there must be room."""
        while not self._has_died and (found := self._engine.next(0.0)) is not None:
            self._note(found[0])

    def _note(self, message: int) -> None:
        if message == END:
            self._open -= 1
        else:
            self._taken += 1

    def _tell(self, message: int) -> None:
        if not self._has_died:
            self._engine.put(0, (message, [self._taken, self._seed]))
            self._taken = 0

    def __iter__(self) -> DispatchEnd:
        return self

    def __next__(self) -> Any:
        item = self._take()
        if isinstance(item, internals.ExceptionWrapper):
            item.reraise()
        return item

    def _take(self) -> Any:
        while self._is_reading:
            if self._has_died:
                raise RuntimeError(
                    f"the dispatching process (pid {self._pid}) that reads the source of a "
                    "ringloader.Dispatch exited unexpectedly"
                )
            found = self._engine.next(_POLL_SECONDS)
            if found is None and self._engine.has_ended(0):
                # Items that the process sent before its end come first.
                found = self._engine.next(0.0)
                self._has_died = found is None
            if found is None:
                if self._port.is_done():
                    break
                continue
            message, item = found
            self._note(message)
            if self._taken >= self._tell_from:
                self._tell(TAKES)
            if message == END:
                self._is_reading = self._open > 0
            elif self._open == 1:
                return item
        raise StopIteration
