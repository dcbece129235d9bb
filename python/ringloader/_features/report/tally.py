"""Sums over each loader of the process. They outlive the loader, and keep nothing alive.

INVARIANT: there is no lock. An end of a loader or an iterator may come between any two steps of a thread, so
each use of a list or dict is one step for the interpreter.
"""

from __future__ import annotations

import collections
import functools
import itertools
import os
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ringloader._core.feature import Feature, StagePosition

if TYPE_CHECKING:
    from ringloader._common.protocols import OurIterator, PathName

# The number of loaders that are remembered: more only while they all live.
MOST = 1000
_SECOND = 1e-9

_tallies: dict[int, Tally] = {}
# The numbers of loaders that are gone, the first one first.
_gone: collections.deque[int] = collections.deque()
_numbers = itertools.count()


# Sums over epochs: the batches that `next` has returned, the seconds for which it had to wait for them, the
# seconds in `iter`, and the seconds from `iter` to the last batch. None: not counted.
Figures = tuple[int | None, float | None, float | None, float | None]
NOTHING: Figures = 0, 0.0, 0.0, 0.0
_UNKNOWN: Figures = None, None, None, None


def plus(one: Figures, other: Figures) -> Figures:
    """Returns the sums; None for each sum with an unknown part."""
    # Written out, since each `iter` adds up.
    batches, waited, starting, seconds = one
    more_batches, more_waited, more_starting, more_seconds = other
    return (
        None if batches is None or more_batches is None else batches + more_batches,
        None if waited is None or more_waited is None else waited + more_waited,
        None if starting is None or more_starting is None else starting + more_starting,
        None if seconds is None or more_seconds is None else seconds + more_seconds,
    )


class Clock(Feature):
    """Notes the times of an iterator's epochs. The ``iter`` of the first one begins now."""

    position = StagePosition.CLOCK

    def __init__(self) -> None:
        self._before = self._starting = self._waited = 0
        self._begun = self._last = time.monotonic_ns()

    def begin_times(self) -> None:
        """Notes the beginning of the ``iter`` of another epoch."""
        self._before += self._last - self._begun
        self._begun = self._last = time.monotonic_ns()

    def has_begun(self) -> None:
        """Notes the end of an ``iter``."""
        self._last = time.monotonic_ns()
        self._starting += self._last - self._begun

    def reported(self) -> Mapping[str, Any]:
        return {"clock": self}

    def around(self, take: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns ``take`` with the clock read before and after each batch."""

        def timed(iterator: OurIterator) -> Any:
            begun = time.monotonic_ns()
            batch = take(iterator)
            self._last = time.monotonic_ns()
            self._waited += self._last - begun
            return batch

        return timed

    @property
    def waited(self) -> float:
        """Returns the seconds in ``next``."""
        return self._waited * _SECOND

    @property
    def starting(self) -> float:
        """Returns the seconds in ``iter``."""
        return self._starting * _SECOND

    @property
    def seconds(self) -> float:
        """Returns the seconds from ``iter`` to the last batch, over all epochs."""
        return (self._before + self._last - self._begun) * _SECOND


class Count:
    """The batches of one iterator. It does not lead to the iterator.

    Args:
        clock: The clock of its epochs, if a report is asked for.
        iterator: The iterator, if it is one of ringloader's, which calls :meth:`settle` when it goes.
    """

    __slots__ = ("_batches", "_before", "_clock", "_iterator", "_process", "_waited")

    def __init__(self, clock: Clock | None, iterator: OurIterator | None) -> None:
        self._clock = clock
        self._iterator = None if iterator is None else weakref.ref(iterator)
        self._process = os.getpid()
        # Batches of the epochs before, and of this one.
        self._before = self._batches = 0
        self._waited: float | None = None

    def follow(self, iterator: OurIterator) -> None:
        """Counts what ``iterator`` returns, one of ringloader's that stands in front of another one."""
        self._iterator = weakref.ref(iterator)

    @property
    def is_of_this_process(self) -> bool:
        """True where it was made; false in a forked child."""
        return self._process == os.getpid()

    @property
    def iterator(self) -> OurIterator | None:
        """Returns the iterator while it lives, if it is one of ringloader's."""
        return None if self._iterator is None else self._iterator()

    def end(self, batches: int) -> None:
        """Notes how many batches an iterator without workers has returned, which goes."""
        self._batches = batches

    def end_epoch(self, returned: int) -> None:
        """Notes the end of an epoch of ``returned`` batches, after which the iterator counts from 0."""
        self._before += returned

    def settle(self, iterator: OurIterator) -> None:
        """Reads what the iterator counts."""
        self._batches = iterator._batches_returned
        self._waited = iterator._seconds_waited()

    def figures(self) -> Figures:
        """Returns the sums of its epochs."""
        if self._iterator is None:
            return _UNKNOWN
        iterator = self._iterator()
        if iterator is not None:
            self.settle(iterator)
        clock, waited = self._clock, self._waited
        batches = self._before + self._batches
        if clock is None:
            return batches, waited, None, None
        return batches, clock.waited if waited is None else waited, clock.starting, clock.seconds


class Tally:
    """The sums over one loader.

    Args:
        loader: The loader.
        number: Its number, in the order of first use.
        path: The path of its first iterator.
        reason: The reason for that.

    Attributes:
        name: The name of its class.
        loader: Returns the loader, or None once it is gone.
        path: The path of its last iterator.
        reason: The reason for that.
        used_at: File and line of the program where it was iterated first, with a report at exit; else None.
        dataset: Class and length of its dataset, with a report at exit; else nothing.
        is_workers: True for a loader of a dataset, in a worker process.
        workers: Returns the number of workers that get tasks, with ``num_workers="auto"``; else None.
        recording: Has the times of its last epoch, with ``stats`` and a report at exit; else None.
    """

    def __init__(self, loader: object, number: int, path: PathName, reason: str) -> None:
        cls = type(loader)
        self.number, self.path, self.reason = number, path, reason
        self.name = f"{cls.__module__}.{cls.__qualname__}"
        # In a variable: a loader may go while modules are torn down.
        gone = _gone
        self.loader: Callable[[], object | None] = weakref.ref(loader, lambda _: gone.append(number))
        self.used_at: str | None = None
        self.dataset = ""
        self.is_workers = False
        self.workers: Callable[[], int] | None = None
        self.recording: Any = None
        self._sums = NOTHING
        self._counts: list[Count] = []

    def begin(self, count: Count) -> None:
        """Adds an iterator, and adds up iterators that are gone."""
        counts = self._counts
        for one in counts[:]:
            # The iterator is gone, or was never counted. In place of its property: each `iter` asks.
            if one._iterator is None or one._iterator() is None:
                try:
                    counts.remove(one)
                except ValueError:
                    # Another thread has added it up.
                    continue
                self._sums = plus(self._sums, one.figures())
        counts.append(count)

    def iterators(self) -> list[OurIterator]:
        """Returns the iterators that this process has made and that are still there, the oldest first."""
        found = [one.iterator for one in self._counts[:] if one.is_of_this_process]
        return [iterator for iterator in found if iterator is not None]

    def figures(self) -> Figures:
        """Returns the sums of all its epochs."""
        return functools.reduce(plus, [one.figures() for one in self._counts[:]], self._sums)


def tally_of(loader: object, before: Tally | None, path: PathName, reason: str) -> Tally | None:
    """Returns the tally of a loader; None for one without weak references.

    Args:
        loader: The loader.
        before: Its tally so far. That of the parent process does not count.
        path: The path of the iterator that it makes.
        reason: The reason for that.
    """
    # A forked child has none of its parent's.
    if before is not None and before.number in _tallies:
        before.path, before.reason = path, reason
        return before
    number = next(_numbers)
    try:
        made = Tally(loader, number, path, reason)
    except TypeError:
        return None
    _tallies[number] = made
    _drop_oldest()
    return made


def all_tallies() -> list[Tally]:
    """Returns the tallies of the process, in the order of first use."""
    _drop_oldest()
    return list(_tallies.values())


def dropped() -> int:
    """Returns the number of loaders that were forgotten."""
    return _dropped[0]


_dropped = [0]


def _drop_oldest() -> None:
    while len(_tallies) > MOST:
        try:
            oldest = _gone.popleft()
        except IndexError:
            return
        # A forked child may see the end of its parent's loaders.
        if _tallies.pop(oldest, None) is not None:
            _dropped[0] += 1


def _forget() -> None:
    _tallies.clear()
    _gone.clear()
    _dropped[0] = 0


if hasattr(os, "register_at_fork"):
    # Loaders of the parent process are not the child's.
    os.register_at_fork(after_in_child=_forget)
