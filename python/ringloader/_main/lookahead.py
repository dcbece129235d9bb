"""Batches that are prepared before their turn: taken from their rings as soon as they are there."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any, Protocol

import ringloader._native as _native
from ringloader._main.failed_arrival import reraise
from ringloader._torch import internals, modes


class Prepared(Protocol):
    """A batch on its way to where it is needed."""

    def result(self) -> Any:
        """The batch, once it is there. What it raises, the caller gets; then it may be asked again."""


class Placement(Protocol):
    """Where an iterator's batches are needed: in pinned memory, on a device."""

    # Batches that are prepared before their turn, at most.
    depth: int

    def prepare(self, arrival: _native.Arrival, /) -> Prepared:
        """Begins to bring a batch there, and does not wait for it.

        Raises:
            BaseException: What interrupts the program. Then it is called again with the same batch, in its
                turn, even if it had begun.
        """

    def place_next(self, take: Callable[[], Any], /) -> Any:
        """Brings a batch there that torch's own iterator hands out, which is asked for it by ``take``."""

    def abandon(self) -> None:
        """Gives up what was prepared and not handed out."""

    def close(self) -> None:
        """Ends it, in the process that made it. Batches that were not handed out are gone before."""


class Lookahead:
    """Hands batches out in their order, and prepares those behind them as far as they are there.

    The sampler is read when a batch is handed out, as without it. Errors, deaths of workers and the end of
    the epoch wait for their turn.

    Args:
        scheduler: Where batches come from. No other code takes any.
        placement: What prepares them.
    """

    def __init__(self, scheduler: _native.Scheduler | _native.ThreadScheduler, placement: Placement) -> None:
        self._scheduler = scheduler
        self._placement = placement
        # Each as it came, until it is prepared.
        self._ahead: collections.deque[Any] = collections.deque()
        # Threads get a batch each. A signal handler that interrupts this thread inside cannot have one.
        self._lock = threading.RLock()
        self._is_busy = False
        # Not in the call after one that failed there: what is first comes, even if what is behind never does.
        self._looks = True
        self._process = _native.process_identity()

    def next(self, callbacks: _native.SchedulerCallbacks) -> Any:
        """The next batch, as ``Scheduler.next`` gives it, and raises."""
        if _native.process_identity() != self._process:
            # Which raises. A thread of the parent may have had the lock at the fork.
            self._scheduler.take(callbacks, self._ahead)
        with self._lock:
            if self._is_busy:
                raise RuntimeError("this iterator is being advanced elsewhere at this moment")
            try:
                # Inside: an interrupt behind it must not leave it set.
                self._is_busy = True
                return self._next(callbacks)
            finally:
                self._is_busy = False

    def _next(self, callbacks: _native.SchedulerCallbacks) -> Any:
        ahead, take = self._ahead, self._scheduler.take
        if not ahead:
            take(callbacks, ahead)
        prepared = self._prepared(0)
        looks, self._looks = self._looks, False
        while looks and len(ahead) <= self._placement.depth and take(callbacks, ahead):
            self._prepared(-1)
        self._looks = True
        data = prepared.result()
        if not ahead or ahead[0] is not prepared:
            raise AssertionError("Invalid iterator state: it was shut down, or reset, by another thread")
        self._scheduler.hand_out(callbacks, ahead)
        # As in the scheduler: `isinstance` would ask every batch for `__class__` too.
        if issubclass(type(data), internals.ExceptionWrapper):
            reraise(data)
        return data

    def _prepared(self, at: int) -> Prepared:
        """What is at this place of those ahead, prepared."""
        found = self._ahead[at]
        if type(found) is _native.Arrival:
            if modes.is_in_modes():
                # Those of the caller's thread are not for what it prepares for later.
                with modes.without_modes():
                    found = self._placement.prepare(found)
            else:
                found = self._placement.prepare(found)
            # From here on, what is prepared decides how long it needs the slot.
            self._ahead[at] = found
        prepared: Prepared = found
        return prepared

    def clear(self) -> None:
        """Forgets what was taken."""
        self._placement.abandon()
        self._ahead.clear()

    def close(self) -> None:
        """Forgets what was taken, and ends the placement."""
        self.clear()
        self._placement.close()
