"""The event loop of a worker, in a thread of its own, and what is awaited there."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from ringloader._common.attributes import is_awaitable
from ringloader._features import worker_info
from ringloader._log import logger
from ringloader._torch import modes

# Seconds in which a loop ends: cancelled coroutines, generators and `aclose` of datasets together.
CLOSES_WITHIN = 3.0


def needs_loop(value: Any, depth: int = 2) -> bool:
    """True for what is to be awaited: an awaitable, or a tuple, list or dict with one in it."""
    kind = type(value)
    if is_awaitable(value):
        return True
    if depth == 0 or kind not in (tuple, list, dict):
        return False
    parts = value.values() if kind is dict else value
    # By their types: a sample may be a long list of numbers.
    kinds = set(map(type, parts))
    if any(hasattr(one, "__await__") for one in kinds):
        return True
    nested = kinds & {tuple, dict}
    return bool(nested) and any(needs_loop(part, depth - 1) for part in parts if type(part) in nested)


async def settled(make: Callable[[Any], Any], index: Any, seconds: float | None = None) -> Any:
    """Makes a call and returns its value, once all of it that is awaitable has come.

    Raises:
        TimeoutError: If that took longer than ``seconds``. The coroutine is cancelled then.
        Exception: The error of the call.
    """
    if seconds is None:
        return await _awaited(make(index))
    try:
        async with asyncio.timeout(seconds) as limit:
            return await _awaited(make(index))
    except TimeoutError:
        if not limit.expired():
            raise
    raise TimeoutError(
        f"the sample at index {index!r:.200} took longer than sample_timeout={seconds} s, and was cancelled"
    )


async def _awaited(value: Any) -> Any:
    while is_awaitable(value):
        value = await value
    return await _with_parts(value) if needs_loop(value) else value


async def _with_parts(value: Any) -> Any:
    parts = list(value.values() if type(value) is dict else value)
    tasks = [asyncio.ensure_future(_awaited(part)) for part in parts]
    try:
        # In order, so that the first error in order is raised.
        found = [await task for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return dict(zip(value, found, strict=True)) if type(value) is dict else type(value)(found)


def start_thread(name: str, function: Callable[[], object], one_thread: bool) -> threading.Thread:
    """Starts a thread that takes over the modes of this one.

    Args:
        name: Its name.
        function: Runs there.
        one_thread: True if operators of torch's use one thread there.
    """
    taken_over, has_begun = modes.OfThread(), threading.Event()

    def run() -> None:
        if one_thread:
            worker_info.use_one_thread()
        has_begun.set()
        taken_over.run(function)

    thread = threading.Thread(target=run, name=name, daemon=True)
    if one_thread:
        with worker_info.threads_put_back():
            thread.start()
            has_begun.wait()
    else:
        thread.start()
    return thread


class EventLoop:
    """An event loop that runs in a thread of its own until it is closed.

    Args:
        one_thread: True if operators of torch's use one thread there.
    """

    def __init__(self, one_thread: bool) -> None:
        self._loop = asyncio.new_event_loop()
        # A loader may be collected, and closed, by what the loop itself calls.
        self._lock = threading.RLock()
        self._is_closed = False
        self._thread = start_thread("ringloader_loop", self._run, one_thread)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Calls a function on the loop. After its end nothing is called."""
        with self._lock:
            if not self._is_closed:
                self._loop.call_soon_threadsafe(function, *args)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        """Begins a coroutine from another thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self, datasets: Iterable[Any]) -> None:
        """Cancels what runs, closes generators, calls ``aclose`` of datasets, and ends the loop.

        Args:
            datasets: Datasets with a coroutine function ``aclose``.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self.run(self._end(list(datasets)))
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSES_WITHIN)

    async def _end(self, datasets: Iterable[Any]) -> None:
        share = CLOSES_WITHIN / 4
        try:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            if others:
                await asyncio.wait(others, timeout=share)
            await _within(share, self._loop.shutdown_asyncgens())
            await asyncio.gather(*(_within(share, dataset.aclose()) for dataset in datasets))
        finally:
            for task in asyncio.all_tasks():
                # One that does not end when it is cancelled: the log would complain of it.
                task._log_destroy_pending = False  # type: ignore[attr-defined]
            self._loop.stop()


async def _within(seconds: float, awaitable: Any) -> None:
    try:
        await asyncio.wait_for(awaitable, seconds)
    except Exception as error:
        logger.warning("worker_concurrency: the end of the event loop: %s: %s", type(error).__name__, error)


def closes(dataset: object) -> bool:
    """True for a dataset that has ``aclose`` as a coroutine function."""
    return inspect.iscoroutinefunction(getattr(type(dataset), "aclose", None))


class Kept:
    """The event loop, the lines and the datasets of a worker, or of a loader without worker processes.

    Args:
        one_thread: True if operators of torch's use one thread there.
    """

    def __init__(self, one_thread: bool) -> None:
        self.one_thread = one_thread
        self._made_in = os.getpid()
        self._lock = threading.RLock()
        self._loop: EventLoop | None = None
        # By their addresses: datasets with `aclose`.
        self._datasets: dict[int, Any] = {}
        self.lines: list[Any] = []

    @property
    def is_of_this_process(self) -> bool:
        """False in a forked child, where the threads are not."""
        return os.getpid() == self._made_in

    def find_loop(self) -> EventLoop:
        """Returns the event loop, which begins with the first call."""
        with self._lock:
            if self._loop is None:
                self._loop = EventLoop(self.one_thread)
            return self._loop

    def add(self, datasets: Iterable[Any]) -> None:
        """Adds datasets, of which those with ``aclose`` are closed at the end."""
        self._datasets |= {id(one): one for one in datasets if closes(one)}

    def close(self) -> None:
        """Ends all lines, closes the datasets, and ends the loop."""
        if not self.is_of_this_process:
            return
        for lines in self.lines:
            lines.close()
        if self._loop is not None or self._datasets:
            self.find_loop().close(self._datasets.values())
        self._loop, self._datasets, self.lines = None, {}, []


class Holder:
    """Holds what a loader and its iterators keep, and closes it once the last of them or the program ends.

    Args:
        kept: It. Leads to no holder.
    """

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        weakref.finalize(self, kept.close)

    def close(self) -> None:
        """Closes it."""
        self.kept.close()
