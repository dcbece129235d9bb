"""``sample_timeout=``: a sample that takes too long in a worker is an error of that sample.

The worker notes, in memory that it shares with the main process, what it asks the dataset for. If that takes
too long, the process kills itself. Its successor makes the batch again, and raises ``TimeoutError`` for what
took too long.
"""

from __future__ import annotations

import functools
import mmap
import operator
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import reduction
from typing import Any

import ringloader._native as _native
from ringloader._common import memory_file
from ringloader._common.looking import is_of
from ringloader._common.text import shown
from ringloader._late import overdue
from ringloader._torch import collating, internals
from ringloader._worker import gather
from ringloader._worker.options import (
    EpochStart,
    Fetcher,
    InFront,
    Position,
    SeedsInTurn,
    WorkerOption,
)

# Words of a worker's record. EXCEEDED: 1 once a call took too long. BATCH and CALL: the batch that it makes,
# and the call that it makes for it. OF: the batch in which calls took too long. MANY: how many did. Then each
# of them, and how often.
_EXCEEDED, _BATCH, _CALL, _OF, _MANY, _FIRST = range(6)
# Seconds that no run takes: infinity is none that the native side knows.
_LONGEST = 1e9
# Calls of one batch that are known to take too long, at most.
_MOST = 250
_WORDS = _FIRST + 2 * _MOST
# Calls that are no sample's: of ``__getitems__``, of ``collate_fn``. Others are not negative.
_SEVERAL, _COLLATE = -1, -2
# A call in words, where it is not known.
_ANY = "a sample"


class SampleTimeouts:
    """The main process's end: which worker has ended because of a sample, and what its successor must know.

    Args:
        workers: How many there are.
        seconds: The limit.
        shares: True if any worker makes again what one that was ended had not.

    Raises:
        OSError: If there is no memory, or no descriptor.
    """

    def __init__(self, workers: int, seconds: float, shares: bool = False) -> None:
        self._shares = shares
        self.seconds = seconds
        self._fd = _native.OwnFd.memory("ringloader-samples")
        fd = self._fd.fd
        os.write(fd, bytes(8 * _WORDS * workers))
        memory_file.seal_size(fd)
        self._records = _Records(fd)
        timed = _Timed(fd, seconds)
        self.options: tuple[WorkerOption, ...] = timed, _Batches(timed)

    def exceeded(self, worker: int, in_hand: overdue.Late | None) -> str | None:
        """Returns what took too long, in words, if a lost worker has ended because of the limit, or None.

        Called once for each that is lost.

        Args:
            worker: The worker.
            in_hand: What it was in. The successor makes this batch again.
        """
        record = self._records.of(worker)
        if not record[_EXCEEDED]:
            return None
        record[_EXCEEDED] = 0
        batch, call = record[_BATCH], record[_CALL]
        if in_hand is None or not (self._shares or batch == _key(in_hand[2])):
            # A batch of an epoch that was given up: nobody makes it again.
            return _ANY
        words = _in_words_of_main(call, in_hand[2])
        if record[_OF] != batch:
            record[_OF], record[_MANY] = batch, 0
        # A worker may have written anything there.
        record[_MANY] = min(max(record[_MANY], 0), _MOST)
        for at in range(record[_MANY]):
            if record[_FIRST + 2 * at] == call:
                record[_FIRST + 2 * at + 1] += 1
                return words
        if record[_MANY] == _MOST:
            return None
        at = _FIRST + 2 * record[_MANY]
        record[at], record[at + 1] = call, 1
        record[_MANY] += 1
        return words

    def close(self) -> None:
        """Gives the memory back."""
        self._records.close()
        self._fd.close()


class _Records:
    """The records of all workers, in this process.

    Args:
        fd: The memory file, which stays the caller's.
    """

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, 0)
        self._words = memoryview(self._map).cast("q")

    def of(self, worker: int) -> memoryview:
        """Returns the record of a worker."""
        return self._words[worker * _WORDS : (worker + 1) * _WORDS]

    def all(self) -> list[memoryview]:
        """Returns the records of all workers."""
        return [self.of(worker) for worker in range(len(self._words) // _WORDS)]

    def close(self) -> None:
        self._words.release()
        self._map.close()


def _key(thing: Any) -> int:
    """Returns a number of an index, or of a batch of indices, which is the same in every process."""
    if type(thing) is int and 0 <= thing < 1 << 62:
        return thing
    # Without addresses.
    return 1 << 62 | zlib.crc32(re.sub(r"\b0x[0-9a-f]+\b", "", repr(thing)).encode(errors="replace"))


class _Timed(WorkerOption):
    """Times what a worker asks the dataset and ``collate_fn`` for.

    Args:
        fd: The memory file; how to get it, on its way to a worker.
        seconds: The limit.
    """

    position = Position.TIME

    def __init__(self, fd: Any, seconds: float) -> None:
        self._fd = fd
        self._seconds = seconds
        self._deadline: _native.Deadline
        self._records: _Records
        self._record: memoryview
        # Calls of this batch that are known to take too long, and how often each still is to raise.
        self._known: Counter[int] = Counter()
        # The records in which they may stand: of all workers, where these share their tasks.
        self._others: list[memoryview] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return _Timed, (reduction.DupFd(self._fd), self._seconds)

    def join(self, worker: int, port: _native.Port | None) -> None:  # noqa: ARG002
        """Begins to watch this process."""
        fd = self._fd if isinstance(self._fd, int) else self._fd.detach()
        try:
            self._records = _Records(fd)
            self._record = self._records.of(worker)
            self._deadline = _native.Deadline(fd, 8 * _WORDS * worker, min(self._seconds, _LONGEST))
        finally:
            os.close(fd)

    def leave_process(self) -> None:
        """Watches this process no more."""
        del self._deadline
        for record in (self._record, *self._others):
            record.release()
        self._others = []
        self._records.close()

    def begin(self, dataset: Any, start: EpochStart) -> Any:  # noqa: ARG002
        # Samples of plain arrays are gathered natively, and need no time.
        if gather.is_gathered(dataset):
            return dataset
        timed = _InTurn if is_of(dataset, SeedsInTurn) else _Dataset
        return timed(dataset, self)

    def meet(self, fetcher: Any) -> None:
        collate: Any = getattr(fetcher, "collate_fn", None)
        if internals.fetches_by_index(fetcher) and not _is_torchs(collate):
            # `default_collate` waits for nothing, and is native as long as it stands there itself.
            fetcher.collate_fn = functools.partial(self.call, _COLLATE, collate)

    def begin_batch(self, index: Any) -> None:
        """Begins a batch with these indices."""
        self._begin(_key(index), [self._record])

    def begin_run(self, run: _native.Claimed) -> None:
        """Begins a run of a batch, of which other workers may have been ended."""
        self._others = self._others or self._records.all()
        self._begin(_key(run.seq), self._others)

    def _begin(self, batch: int, records: list[memoryview]) -> None:
        self._record[_BATCH] = batch
        self._known.clear()
        for record in records:
            # ORDERING: written before the run of the worker that was ended could be claimed again.
            if record[_MANY] and record[_OF] == batch:
                for at in range(_FIRST, _FIRST + 2 * record[_MANY], 2):
                    self._known[record[at]] += record[at + 1]

    def end_batch(self) -> None:
        """Ends a batch: the next one may have the same indices."""
        self._record[_MANY] = 0

    def call(self, call: int, function: Callable[[Any], Any], argument: Any) -> Any:
        """Returns what the function returns.

        Raises:
            TimeoutError: If it is known that this takes too long.
        """
        if self._known and self._known[call] > 0:
            self._known[call] -= 1
            raise TimeoutError(
                f"{_in_words(call, argument)} took longer than sample_timeout={self._seconds} s; the worker "
                "was ended, and another one goes on"
            )
        self._record[_CALL] = call
        self._deadline.begin()
        try:
            return function(argument)
        finally:
            self._deadline.end()


def _is_torchs(collate: Any) -> bool:
    return collating.is_default_collate(collate) or bool(collating.parts_of_convert(collate))


def _in_words(call: int, argument: Any) -> str:
    if call == _COLLATE:
        return "collate_fn"
    return (
        f"the samples at indices {shown(argument)}"
        if call == _SEVERAL
        else f"the sample at index {shown(argument)}"
    )


def _in_words_of_main(call: int, index: Any) -> str:
    """Returns a call in words, in the main process, which knows the indices of the batch."""
    if call in (_SEVERAL, _COLLATE):
        return _in_words(call, index)
    for one in index if isinstance(index, list) else [index]:
        if _key(one) == call:
            return _in_words(call, one)
    # A worker may have written anything there.
    return _ANY


class _Dataset(InFront):
    """Stands in front of a dataset with indices, and times its samples."""

    def __init__(self, dataset: Any, timed: _Timed) -> None:
        super().__init__(dataset)
        self._timed = timed
        self._get = functools.partial(operator.getitem, dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._timed.call(_key(index), self._get, index)

    @property
    def __getitems__(self) -> Any:
        several = self._behind.__getitems__
        return several and functools.partial(self._several, several)

    def _several(self, several: Callable[[Any], Any], indices: Any) -> Any:
        # `on_error` asks for single samples of a batch that has raised.
        call = _key(indices[0]) if len(indices) == 1 else _SEVERAL
        return self._timed.call(call, several, indices)

    def __len__(self) -> int:
        return len(self._behind)


class _InTurn(_Dataset, SeedsInTurn):
    """Stands in front of a dataset that sets generators for each sample, and times its samples."""

    def in_turn(self, index: Iterable[Any]) -> Iterator[Any]:
        found: Iterator[Any] = self._behind.in_turn(index)
        return found

    def current(self, index: Any) -> Any:
        return self._timed.call(_key(index), self._behind.current, index)


class _Batches(WorkerOption):
    """Tells the option that times samples where a batch begins and ends."""

    position = Position.BATCH

    def __init__(self, timed: _Timed) -> None:
        self._timed = timed

    def wrap(self, fetcher: Fetcher) -> Fetcher:
        return _Telling(fetcher, self._timed)


class _Telling:
    def __init__(self, fetcher: Fetcher, timed: _Timed) -> None:
        self._fetcher = fetcher
        self._timed = timed

    def fetch(self, index: Any, /) -> Any:
        if isinstance(index, _native.Claimed):
            # No other task has its number, which is kept until the next sample takes too long.
            self._timed.begin_run(index)
            return self._fetcher.fetch(index)
        self._timed.begin_batch(index.index if isinstance(index, _native.Placed) else index)
        try:
            return self._fetcher.fetch(index)
        finally:
            self._timed.end_batch()
