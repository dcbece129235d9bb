"""The lines on which a worker makes samples, several at once: an event loop, or threads."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ringloader._features.concurrency.event_loop import EventLoop, needs_loop, settled, start_thread
from ringloader._features.worker_info import enter


@dataclasses.dataclass(slots=True, eq=False)
class Call:
    """A call of the dataset: for a sample, or for the samples of a batch by ``__getitems__``.

    Attributes:
        make: The function.
        index: Its argument.
        size: The number of samples.
        seed: The seed of its random numbers; None: it has none.
        pause: Returns the seconds after which it is made again when it has failed; None: it is not.
        batch: All calls of the batch, if nobody wants later ones once this one has failed.
        number: Its number among these.
        is_over: True once the call has ended.
        is_taken: True once its last outcome was taken.
        is_unwanted: True once nobody waits for it.
        task: Its task on an event loop.
        waiter: Is given something once the call has ended.
    """

    make: Callable[[Any], Any]
    index: Any
    size: int = 1
    seed: int | None = None
    pause: Callable[[int], float | None] | None = None
    batch: Sequence[Call] = ()
    number: int = 0
    is_over: bool = False
    is_taken: bool = False
    is_unwanted: bool = False
    task: Any = None
    waiter: queue.SimpleQueue[None] | None = None
    _failures: list[BaseException] = dataclasses.field(default_factory=list)
    _value: Any = None
    _has_value: bool = False

    def end(self, value: Any) -> None:
        """Notes what it has returned."""
        self._value, self._has_value = value, True
        self.is_over = True

    def fail(self, error: BaseException) -> float | None:
        """Notes an error. Returns the seconds after which the call is made again; None: it has ended."""
        if isinstance(error, asyncio.CancelledError) and not self.is_unwanted:
            # Raised as it is, it would end the worker.
            made = RuntimeError("the coroutine of a sample was cancelled")
            made.__cause__, error = error, made
        self._failures.append(error)
        again = self.pause is not None and isinstance(error, Exception) and not self.is_unwanted
        seconds = self.pause(len(self._failures) - 1) if again and self.pause is not None else None
        if seconds is None:
            self.is_over = True
        return seconds

    @property
    def has_failed(self) -> bool:
        """True if the call ended with an error."""
        return self.is_over and not self._has_value

    def take(self) -> Any:
        """Returns what the call has returned; before that, raises its errors, one at a time."""
        if self._failures:
            error = self._failures.pop(0)
            self.is_taken = not self._failures and not self._has_value
            try:
                raise error
            finally:
                # In a local variable the error would keep this frame.
                del error
        value, self._value = self._value, None
        self.is_taken = True
        return value


def _given(awaitable: Any, _index: Any) -> Any:
    return awaitable


class Limits(NamedTuple):
    """The limits of lines.

    Attributes:
        samples: Samples that may be under way at once. A call for more has all lines.
        seconds: The longest time that one try of a coroutine may take; None: any.
        one_thread: True if operators of torch's use one thread there, as in a worker.
    """

    samples: int
    seconds: float | None
    one_thread: bool


class Lines:
    """Makes calls in the order in which they come, as many at once as have room.

    Args:
        limits: The limits.
        info: The info of the worker; None: that of the process.

    Attributes:
        info: The same.
        most_under_way: The most samples that were under way at once.
    """

    def __init__(self, limits: Limits, info: Any) -> None:
        self._limits = limits
        self.info = info
        self._waiting: collections.deque[Call] = collections.deque()
        # The calls that are under way, and their samples.
        self._calls: set[Call] = set()
        self._under_way = 0
        self.most_under_way = 0
        self._waits_for_room: queue.SimpleQueue[None] | None = None

    @property
    def _have_room(self) -> bool:
        return not self._waiting and self._under_way < self._limits.samples

    def has_room(self, waiter: queue.SimpleQueue[None]) -> bool:
        """True if a line would begin another call; else the waiter is given something once one would."""
        # ORDERING: sets the waiter before it reads the room; `_next` changes the room, then reads the waiter.
        self._waits_for_room = waiter
        if has_room := self._have_room:
            self._waits_for_room = None
        return has_room

    def add(self, calls: Sequence[Call]) -> None:
        """Adds calls after the waiting ones."""
        raise NotImplementedError

    def drop(self, calls: Iterable[Call]) -> None:
        """Gives up unwanted calls: waiting ones are not made, and coroutines are cancelled."""
        raise NotImplementedError

    def close(self) -> None:
        """Gives up all calls."""
        raise NotImplementedError

    def _next(self) -> Call | None:
        """Returns the next call that has room, and counts it."""
        call = self._first()
        waiter = self._waits_for_room
        if waiter is not None and self._have_room:
            self._waits_for_room = None
            waiter.put(None)
        return call

    def _first(self) -> Call | None:
        while self._waiting:
            call = self._waiting[0]
            has_room = not self._under_way or self._under_way + call.size <= self._limits.samples
            if not has_room and not call.is_unwanted:
                return None
            self._waiting.popleft()
            if not call.is_unwanted:
                self._calls.add(call)
                self._under_way += call.size
                self.most_under_way = max(self.most_under_way, self._under_way)
                return call
        return None

    def _note_end(self, call: Call) -> None:
        """Counts a call that has ended no more."""
        self._calls.discard(call)
        self._under_way -= call.size

    def _tell(self, call: Call) -> None:
        """Wakes the worker if it waits for a call that has ended."""
        if call.has_failed and (rest := call.batch[call.number + 1 :]):
            self.drop(rest)
        if call.waiter is not None:
            call.waiter.put(None)


class LoopLines(Lines):
    """Lines on an event loop, for a dataset whose calls are coroutines.

    Args:
        limits: As for :class:`Lines`.
        info: As for :class:`Lines`.
        loop: The event loop.
    """

    def __init__(self, limits: Limits, info: Any, loop: EventLoop) -> None:
        super().__init__(limits, info)
        self._loop = loop

    def add(self, calls: Sequence[Call]) -> None:
        self._loop.call(self._add, calls)

    def _add(self, calls: Iterable[Call]) -> None:
        self._waiting.extend(calls)
        self._fill()

    def _fill(self) -> None:
        while (call := self._next()) is not None:
            call.task = asyncio.create_task(self._make(call))

    async def _make(self, call: Call) -> None:
        enter(call.seed, self.info)
        try:
            while True:
                try:
                    call.end(await settled(call.make, call.index, self._limits.seconds))
                    break
                except BaseException as error:
                    pause = call.fail(error)
                if pause is None:
                    break
                await asyncio.sleep(pause)
        finally:
            call.task = None
            self._note_end(call)
            self._tell(call)
            self._fill()

    def drop(self, calls: Iterable[Call]) -> None:
        for call in calls:
            call.is_unwanted = True
        self._loop.call(self._cancel, calls)

    def _cancel(self, calls: Iterable[Call]) -> None:
        for call in calls:
            if call.task is not None:
                call.task.cancel()

    def close(self) -> None:
        self._loop.call(self._close)

    def _close(self) -> None:
        self._waiting.clear()
        self.drop(list(self._calls))


class ThreadLines(Lines):
    """Lines that are threads, for a dataset whose calls wait where they are made.

    Args:
        limits: As for :class:`Lines`.
        info: As for :class:`Lines`.
        find_loop: Returns the event loop for what calls return that is to be awaited.
    """

    def __init__(self, limits: Limits, info: Any, find_loop: Callable[[], EventLoop]) -> None:
        super().__init__(limits, info)
        self._find_loop = find_loop
        self._changed = threading.Condition()
        self._threads = self._idle = 0
        self._is_closed = False

    def add(self, calls: Sequence[Call]) -> None:
        with self._changed:
            self._waiting.extend(calls)
            more = min(len(self._waiting) - self._idle, self._limits.samples - self._threads)
            self._changed.notify(len(calls))
        for _ in range(more):
            start_thread("ringloader_line", self._work, self._limits.one_thread)
            self._threads += 1

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                while (call := self._next()) is None and not self._is_closed:
                    self._changed.wait()
                self._idle -= 1
            if call is None:
                return
            self._make(call)
            with self._changed:
                self._note_end(call)
                if call.size > 1:
                    self._changed.notify_all()
            self._tell(call)
            # A call that has ended must not live on here until the next one comes.
            del call

    def _make(self, call: Call) -> None:
        enter(call.seed, self.info)
        while True:
            try:
                value = call.make(call.index)
                if needs_loop(value):
                    awaitable, value = value, None
                    call.task = self._find_loop().run(
                        settled(functools.partial(_given, awaitable), call.index, self._limits.seconds)
                    )
                    value = call.task.result()
                call.end(value)
                return
            except BaseException as error:
                pause = call.fail(error)
            finally:
                call.task = value = None
            if pause is None:
                return
            time.sleep(pause)

    def drop(self, calls: Iterable[Call]) -> None:
        for call in calls:
            call.is_unwanted = True
            task = call.task
            if task is not None:
                task.cancel()

    def close(self) -> None:
        """Gives up all calls, and ends the threads, those in the dataset once it returns."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            under_way = list(self._calls)
            self._changed.notify_all()
        self.drop(under_way)
