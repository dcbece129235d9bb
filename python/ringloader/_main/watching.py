"""Iterators whose waits a watchdog says, also where torch schedules."""

from __future__ import annotations

import time
from typing import Any

from ringloader._main.ring_iterator import RingIterator
from ringloader._main.transport_iterator import TransportIterator
from ringloader._torch import internals


class Watching:
    """In front of an iterator's class: has torch's own scheduling say how long it waits."""

    _transport: Any
    _workers: list[Any]
    _late: Any
    # When the wait for this batch began, and the length at which it is said next.
    _waits_since = 0.0
    _said_next = 0.0

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        # In it torch waits for workers that go on to their next epoch.
        self._waits_since = time.monotonic()
        self._said_next = self._transport.watchdog.seconds
        super()._reset(loader, first_iter)  # type: ignore[misc]

    def _next_data(self) -> Any:
        self._waits_since = time.monotonic()
        self._said_next = self._transport.watchdog.seconds
        return super()._next_data()  # type: ignore[misc]

    def _try_get_data(self, timeout: float = internals.JOIN_SECONDS) -> Any:
        until = time.monotonic() + timeout
        while True:
            left = until - time.monotonic()
            until_said = self._waits_since + self._said_next - time.monotonic()
            found = super()._try_get_data(max(min(left, until_said), 0.0))  # type: ignore[misc]
            now = time.monotonic()
            if found[0] or now >= until:
                return found
            waited = now - self._waits_since
            if waited >= self._said_next:
                while waited >= self._said_next:
                    self._said_next = max(self._said_next, 0.001) * 2
                self._transport.watchdog.say(waited, self._workers, self._late(every=True))


class WatchedTransportIterator(Watching, TransportIterator):
    """torch's scheduling, watched."""


class WatchedRingIterator(Watching, RingIterator):
    """Native scheduling, which says its waits itself, and torch's where that takes over."""
