"""The channel of a worker that begins its tasks before their turn."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

from ringloader._features.concurrency.lines import Call
from ringloader._worker.loop import Channel
from ringloader._worker.options import EpochStart, Fetcher

# Seconds after which a worker that waits for a sample looks around; the same where a task that comes would
# begin at once.
LOOK_SECONDS, _READ_SECONDS = 0.1, 0.002


class EndedError(BaseException):
    """Nothing more is wanted of the worker. No ``Exception``, which would be handled as a sample's."""


class Begun(NamedTuple):
    """A batch whose samples have begun.

    Attributes:
        index: Its index.
        calls: The calls for its samples, in order; one for all of them by ``__getitems__``.
    """

    index: Any
    calls: list[Call]


class AheadChannel:
    """A :class:`~ringloader._worker.loop.Channel` that begins tasks as soon as they arrive.

    Args:
        channel: The worker's channel.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        # Messages before their turn. Each task has what was begun of it, or an error.
        self._messages: collections.deque[tuple[Any, Begun | Exception | None]] = collections.deque()
        # The fetcher of the epoch; None until it has begun.
        self._fetcher: Any = None
        self._has_room: Callable[[], bool] = bool
        self._close: Callable[[], object] = bool
        # The begun batch of the task whose turn it is, or an error.
        self._begun: Begun | Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def follow(self, fetcher: Fetcher, has_room: Callable[[], bool], close: Callable[[], object]) -> None:
        """Begins the tasks of an epoch from now on, and the tasks that were read before.

        Args:
            fetcher: The fetcher of the epoch.
            has_room: Returns True if another sample would begin at once.
            close: Ends what makes the samples.
        """
        self._fetcher, self._has_room, self._close = fetcher, has_room, close
        self._begin_all()

    def get(self) -> Any:
        is_ahead = bool(self._messages)
        if not is_ahead:
            self._append(self._channel.get())
        self._read()
        if any(begun is None for _, begun in self._messages):
            # Tasks of an epoch that has begun now, or of which nothing could begin before.
            self._begin_all()
        message, self._begun = self._messages.popleft()
        if message is None:
            self._close()
        elif isinstance(message, EpochStart):
            self._fetcher = None
        elif is_ahead:
            self._channel.begin_task()
        return message

    def take_begun(self) -> Begun | None:
        """Returns what was begun of the task whose turn it is.

        Raises:
            Exception: The error of its index.
        """
        begun, self._begun = self._begun, None
        if isinstance(begun, Exception):
            raise begun
        return begun

    def _read(self) -> None:
        while (found := self._channel.ahead()) is not None:
            self._append(found[0])
            if found[0] is None:
                break

    def _append(self, message: Any, begun: Begun | Exception | None = None) -> None:
        is_task = message is not None and not isinstance(message, EpochStart)
        if begun is None and is_task and self._fetcher is not None and not self._has_start():
            try:
                begun = self._fetcher.begin(message[1])
            except Exception as error:
                # Raised when the batch is fetched.
                begun = error
        self._messages.append((message, begun))

    def _begin_all(self) -> None:
        messages = list(self._messages)
        self._messages.clear()
        for message, begun in messages:
            self._append(message, begun)

    def _has_start(self) -> bool:
        return any(isinstance(message, EpochStart) for message, _ in self._messages)

    def look(self) -> float:
        """Begins the tasks that have come. Returns the seconds until the worker is to look again.

        Raises:
            EndedError: If nothing more is wanted of the worker.
        """
        self._read()
        if self._channel.is_done() or (self._messages and self._messages[-1][0] is None):
            raise EndedError
        return _READ_SECONDS if self._has_room() else LOOK_SECONDS
