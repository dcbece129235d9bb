"""The bytes behind a batch, with the state of a worker's dataset, and how the main process reads them.

With ``Snapshots`` the result of a batch is a list: ``[batch, sent]``. The bytes say which worker it is,
how many batches it was asked for in this epoch, and its state, if one was due.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from ringloader._state.parts import Snapshot

# Before the bytes of the results of this process's workers: no batch of a program's own begins so.
MARK = secrets.token_bytes(16)
HEADER = struct.Struct("<16sIQQB")
HAS_STATE, IS_ENDED, OUTLIVES, HAS_FAILED = 1, 2, 4, 8


class Sent(NamedTuple):
    """The bytes behind a batch.

    Attributes:
        worker: The worker.
        asked: Batches that it was asked for in this epoch.
        outlives: As of a :class:`~ringloader._state.parts.Part`.
        snapshot: The state behind the batch, if one was due.
    """

    worker: int
    asked: int
    outlives: bool
    snapshot: Snapshot | None


def is_sent(found: Any) -> bool:
    """True for the result of a batch that :class:`Snapshots` has made."""
    return type(found) is list and len(found) == 2 and type(found[1]) is bytes and found[1].startswith(MARK)


def read(sent: bytes) -> Sent:
    """Reads the bytes behind a batch."""
    _, worker, asked, samples, flags = HEADER.unpack_from(sent)
    outlives = bool(flags & OUTLIVES)
    if not flags & HAS_STATE:
        return Sent(worker, asked, outlives, None)
    rest = sent[HEADER.size :]
    failure = rest.decode() if flags & HAS_FAILED else None
    return Sent(worker, asked, outlives, Snapshot(rest, bool(flags & IS_ENDED), samples, failure))


def through(transform: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns ``transform`` for the results of workers that send states, or none."""

    def transformed(found: Any) -> Any:
        return [transform(found[0]), found[1]] if is_sent(found) else transform(found)

    return transformed
