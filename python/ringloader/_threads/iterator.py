"""torch's iterator with threads for workers, scheduled natively."""

from __future__ import annotations

from typing import NoReturn

from ringloader._main.overdue import Late
from ringloader._main.ring_iterator import RingIterator
from ringloader._main.watching import Watching
from ringloader._threads.transport import ThreadTransport


class ThreadIterator(RingIterator):
    """As over the rings; only how a worker was lost is told in other words."""

    _transport: ThreadTransport
    _path_of_torchs = "threads"

    def _raise_lost(self, worker_id: int, _in_hand: Late | None) -> NoReturn:
        self._transport.sound = False
        self._workers_status[worker_id] = False
        raise self._transport.lost(worker_id)


class WatchedThreadIterator(Watching, ThreadIterator):
    """The same, watched."""
