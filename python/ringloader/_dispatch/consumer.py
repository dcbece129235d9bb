"""A worker as the dispatching process sees it: how far it is, and what it may be sent."""

from __future__ import annotations

import collections
from typing import Any

import ringloader._native as _native
from ringloader._worker import channel

# The place of an error, in the words of torch's errors.
WHERE = "in the dispatching process"


class Consumer:
    """A worker, and how far it is.

    Args:
        port: The end of its rings.
    """

    def __init__(self, port: _native.Port) -> None:
        self._port = port
        self._results = channel.Results(port, WHERE)
        self.epoch = 0
        self.seed = 0
        # The number of items that the worker may be sent now.
        self.allowance = 0
        # True if a batch of the worker waits for an item, and the worker has none left.
        self.is_hungry = False
        # The last epoch that the worker has left: it reads no more of it.
        self.left = 0
        self.has_ended = False
        # The last epoch whose end it was sent.
        self._end_sent = 0
        # Items for the worker that it may not be sent yet, or has no room for.
        self.held: collections.deque[Any] = collections.deque()

    def receive(self, timeout: float | None) -> bool:
        """Takes a message, or notes the worker's end. Returns whether there was one in time."""
        if self.has_ended:
            return False
        task = self._port.get(timeout)
        if task is None:
            self.has_ended = timeout is None or self._port.parent_ended
            return self.has_ended
        epoch, (allowance, seed, is_hungry) = task[0]
        self.epoch = abs(epoch)
        if epoch < 0:
            self.left = -epoch
            self.is_hungry = False
            return True
        self.allowance += allowance
        self.seed = seed
        self.is_hungry = bool(is_hungry)
        return True

    def reads_in(self, epoch: int) -> bool:
        """True if the worker still takes items of that epoch."""
        return not self.has_ended and self.left < epoch

    def send(self, epoch: int, item: object) -> None:
        """Sends an item that was allowed. Waits for room."""
        self.allowance -= 1
        self._results.put((epoch, item))

    def send_held(self, epoch: int) -> None:
        """Sends the items that are held, while the worker may be sent more and there is room."""
        while self.held and self.allowance and self._results.put_now((epoch, self.held[0])):
            self.held.popleft()
            self.allowance -= 1

    def send_end(self, epoch: int) -> None:
        """Sends the end of an epoch, once. The ring has room for it beside all that was allowed."""
        if self._end_sent < epoch and not self.has_ended:
            self._end_sent = epoch
            self._port.put((-epoch, None))
