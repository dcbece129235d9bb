"""The workers as the dispatching process sees them: how far each is."""

from __future__ import annotations

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
        self._allowance = 0
        # The last epoch that the worker has left: it reads no more of it.
        self._left = 0
        self.has_ended = False
        # The last epoch whose end it was sent.
        self._end_sent = 0

    def receive(self, timeout: float | None = None) -> bool:
        """Takes a message, or notes the worker's end. Returns whether there was one in time."""
        if self.has_ended:
            return False
        task = self._port.get(timeout)
        if task is None:
            self.has_ended = timeout is None or self._port.parent_ended
            return self.has_ended
        epoch, (allowance, seed) = task[0]
        self.epoch = abs(epoch)
        if epoch < 0:
            self._left = -epoch
            return True
        self._allowance += allowance
        self.seed = seed
        return True

    def wait_for_turn(self, epoch: int) -> None:
        """Waits until the worker may be sent an item, or reads no more in that epoch."""
        # Each time: a worker that has left takes nothing, and an item for it might find no room.
        while self.receive(0.0):
            pass
        while self._allowance == 0 and self.reads_in(epoch) and self.epoch == epoch:
            self.receive()

    def reads_in(self, epoch: int) -> bool:
        """True if the worker still takes items of that epoch."""
        return not self.has_ended and self._left < epoch

    def send(self, epoch: int, item: object) -> None:
        """Sends an item that was allowed. Waits for room."""
        self._allowance -= 1
        self._results.put((epoch, item))

    def send_end(self, epoch: int) -> None:
        """Sends the end of an epoch, once. The ring has room for it, whatever was allowed."""
        if self._end_sent < epoch and not self.has_ended:
            self._end_sent = epoch
            self._port.put((-epoch, None))
