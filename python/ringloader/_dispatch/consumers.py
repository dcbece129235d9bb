"""The workers as the dispatching process sees them: how far each is, and the items that are held for it.

The loader takes batches in order. A worker whose items are dropped by a filter needs more of them for a
batch, and one whose items raise errors needs fewer: the workers take items at different rates. So the loader
may wait for a batch of one worker while the others are full, and the source's next item is theirs. It is
held, so that the source can be read on, and each item still goes to the worker whose turn it is.
"""

from __future__ import annotations

import collections
import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

import ringloader._native as _native
from ringloader._torch import internals
from ringloader._worker import channel, malloc

# The place of an error, in the words of torch's errors.
WHERE = "in the dispatching process"
# Seconds of a wait for one worker before it looks at the others: at first, and at most.
_SHORTEST, _LONGEST = 0.001, 0.05
# From this number of held items on, the memory is looked at once for as many more.
_LOOK_EVERY = 64


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
        """Sends the end of an epoch, once. The ring has room for it, whatever was allowed."""
        if self._end_sent < epoch and not self.has_ended:
            self._end_sent = epoch
            self._port.put((-epoch, None))


class Holding:
    """The items that are held back in one epoch.

    Args:
        consumers: All workers.
        epoch: The epoch.
        most: Bytes that this process may grow by, through what it holds.
    """

    def __init__(self, consumers: Sequence[Consumer], epoch: int, most: int) -> None:
        self._consumers = consumers
        self._epoch = epoch
        self._most = most
        # Bytes of this process before any was held.
        self._before = _private_bytes()
        # Items that were held since the last look.
        self._unlooked = 0
        for one in consumers:
            # Drops items of an epoch that was abandoned.
            one.held.clear()

    def wait_for_turn(self, one: Consumer) -> None:
        """Waits until an item for ``one`` can be sent, or must be held, or it reads no more."""
        pause = _SHORTEST
        # Each time: the ring of the worker's messages has room for those of a few items only.
        while one.receive(0.0):
            pass
        while one.reads_in(self._epoch) and one.epoch == self._epoch:
            one.send_held(self._epoch)
            if one.allowance and not one.held:
                return
            if self._is_read_on(one):
                return
            one.receive(pause)
            pause = min(2 * pause, _LONGEST)

    def give(self, one: Consumer, item: object) -> bool:
        """Sends an item to ``one``, or holds it. False: no more can be held, and the hungry are told."""
        one.held.append(item)
        while True:
            one.send_held(self._epoch)
            if not one.held or not one.reads_in(self._epoch) or one.epoch != self._epoch:
                return True
            if self._is_read_on(one):
                break
            # No message tells of room.
            one.receive(_SHORTEST)
        # INVARIANT: what is held is this process's own: the source may use the item's memory again.
        one.held[-1] = _copied(item)
        held = sum(len(other.held) for other in self._consumers)
        self._unlooked += 1
        # Each time while there are few items, which may be large.
        if held > _LOOK_EVERY > self._unlooked:
            return True
        self._unlooked = 0
        grown = _private_bytes() - self._before
        if grown > self._most:
            # Between the copies that stay, the allocator has holes where the source's items were.
            malloc.give_back()
            grown = _private_bytes() - self._before
        hungry = [other for other in self._reading() if other.is_hungry]
        # If no worker is hungry, the source is not read on before there is room.
        if grown <= self._most or not hungry:
            return True
        for other in hungry:
            other.held.append(_too_many(held, grown, self._most))
        return False

    def _is_read_on(self, one: Consumer) -> bool:
        """True if the source must be read on, though ``one`` has no room: another worker needs an item."""
        self._look_at_all()
        # A hungry worker takes what it was sent, and then tells, so it is waited for.
        return not one.is_hungry and any(other.is_hungry for other in self._reading())

    def finish(self) -> None:
        """Sends what is held, as there is room, and each worker the end once nothing more is held for it."""
        pause = _SHORTEST
        while True:
            waiting = []
            for one in self._consumers:
                one.send_held(self._epoch)
                if not one.held or one.epoch > self._epoch or not one.reads_in(self._epoch):
                    one.held.clear()
                    one.send_end(self._epoch)
                else:
                    waiting.append(one)
            if not waiting:
                return
            if waiting[0].receive(pause) or self._look_at_all():
                pause = _SHORTEST
            else:
                pause = min(2 * pause, _LONGEST)

    def _reading(self) -> list[Consumer]:
        return [one for one in self._consumers if one.reads_in(self._epoch)]

    def _look_at_all(self) -> bool:
        """Takes the messages that are there. Returns whether there were any."""
        found = False
        for one in self._consumers:
            while one.receive(0.0):
                found = True
        return found


def _too_many(held: int, nbytes: int, most: int) -> object:
    """The error of the batches that wait for an item."""
    try:
        raise RuntimeError(
            f"a Dispatch in order holds {held} items ({nbytes} bytes; at most {most}) for workers that are "
            "full, because this worker takes more items for its batches: filter() drops some, or errors "
            "end batches of the others. Pass in_order=False, filter in the source, or raise max_shared_bytes"
        )
    except RuntimeError:
        return internals.ExceptionWrapper(where=WHERE)


def _copied(item: Any) -> Any:
    """Returns a copy of an item: of a view, only its own elements."""
    if isinstance(item, torch.Tensor):
        return item.detach().clone().requires_grad_(item.requires_grad)
    if type(item) is numpy.ndarray:
        return item.copy()
    if type(item) is dict:
        return {key: _copied(value) for key, value in item.items()}
    if type(item) in (list, tuple):
        return type(item)(map(_copied, item))
    try:
        return copy.deepcopy(item)
    except Exception:
        # Sending it copies it, or says why it cannot be sent.
        return item


def _private_bytes() -> int:
    """Returns the bytes of memory that are this process's own: without its rings, and pages of files."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
