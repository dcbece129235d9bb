"""The samples at which workers are lost: they crash their worker, or take too long (``sample_timeout=``).

A worker notes, in memory that it shares with the main process, what it asks the dataset for. Its successor
makes the batch again, and raises an error in place of each call that is known to be bad.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from typing import Any, NamedTuple

import ringloader._native as _native
from ringloader._common.attributes import shown
from ringloader._features.shared_words import SharedWords
from ringloader._torch import collating
from ringloader._transport.overdue import Late
from ringloader._worker.fetch import Ahead, SampleFetcher, Turn, gives_several
from ringloader._worker.options import EpochStart, Fetcher, InFront, Position, WorkerOption

# Words of a worker's record. EXCEEDED: 1 once a call took too long. NOTES: 1 for a worker that succeeds a
# lost one. CALL: what it asks the dataset for. BATCH: the batch that it makes samples of, where all workers
# share their tasks. OF: the batch in which calls are bad. MANY: how many are. Then, for each of them: the
# call, how often it is to raise, and why.
_EXCEEDED, _NOTES, _CALL, _BATCH, _OF, _MANY, _FIRST = range(7)
_WORDS_OF_CALL = 3
# Calls of one batch that are known to be bad, at most.
_MOST = 250
_WORDS = _FIRST + _WORDS_OF_CALL * _MOST
# Seconds that no run takes: infinity is none that the native side knows.
_LONGEST = 1e9
# The call for a sample is the sample's place in its batch. These are of ``__getitems__``, of ``collate_fn``,
# and of nothing.
_SEVERAL, _COLLATE, _NOTHING = -1, -2, -3
# Why a call is bad: it took too long, or what the exit code of its process is, added to this.
_LATE, _CODE = 0, 1 << 32
# A call in words, where it is not known.
_ANY = "a sample"


class Loss(NamedTuple):
    """The known facts of a worker's end.

    Attributes:
        where: What the worker asked the dataset for, in words; None where that is not known.
        is_late: True if the worker was ended because that took too long.
    """

    where: str | None = None
    is_late: bool = False


class Around(InFront):
    """Stands in front of a fetcher, and calls functions before and after each batch.

    Args:
        fetcher: The fetcher.
        before: Gets the index of the batch.
        after: Called also where the batch is an error.
    """

    def __init__(
        self, fetcher: Fetcher, before: Callable[[Any], object], after: Callable[[], object]
    ) -> None:
        super().__init__(fetcher)
        self._before = before
        self._after = after

    def fetch(self, index: Any, /) -> Any:
        self._before(index)
        try:
            return self._behind.fetch(index)
        finally:
            self._after()


class SampleNotes:
    """The main process's end: what a lost worker asked for, and what its successor must know.

    Args:
        workers: How many there are.
        seconds: The limit of ``sample_timeout``; None: there is none.
        crashes: True if a sample that crashes its worker again is an error of that sample.
        batches: True if an index is a batch's.
        shares: True if any worker makes again what one that was lost had not.
        grace: Seconds beyond the limit, in which a coroutine is cancelled and its process lives on.

    Raises:
        OSError: If there is no memory, or no descriptor.
    """

    def __init__(
        self,
        workers: int,
        seconds: float | None,
        crashes: bool,
        batches: bool,
        shares: bool = False,
        grace: float = 0.0,
    ) -> None:
        self.seconds = seconds
        self._crashes = crashes
        self._batches = batches
        self._shares = shares
        self._words = SharedWords.make("ringloader-samples", _WORDS, workers)
        for worker in range(workers):
            self._words.set(worker, _CALL, _NOTHING)
        # By batch of this epoch: the calls at which workers were lost; None where that was not noted.
        self._lost_at: dict[int, set[int | None]] = {}
        # By worker: the batch of this epoch of which its successor knows bad calls.
        self._known_of: dict[int, int] = {}
        noting = _Noting(self._words, seconds, shares, grace)
        self.options: tuple[WorkerOption, ...] = noting, _Batches(noting)

    def begin_epoch(self) -> None:
        """Begins another epoch, whose batches are others."""
        self._lost_at.clear()
        self._known_of.clear()

    def loss(self, worker: int, in_hand: Late | None, code: int | None) -> Loss:
        """Returns what is known of the end of a worker, and tells its successor. Called once for each.

        Args:
            worker: The worker.
            in_hand: What it was in. The successor makes this batch again.
            code: The exit code of its process.
        """
        words = self._words
        call, is_late = words.get(worker, _CALL), words.get(worker, _EXCEEDED) != 0
        words.set(worker, _EXCEEDED, 0)
        words.set(worker, _CALL, _NOTHING)
        words.set(worker, _NOTES, 1)
        if in_hand is None:
            # In no batch, or in one of an epoch that was given up: it is not made again.
            words.set(worker, _MANY, 0)
            return Loss(_ANY, is_late) if is_late else Loss()
        _, number, index = in_hand
        batch = words.get(worker, _BATCH) if self._shares else number
        if self._known_of.get(worker) != batch:
            self._known_of[worker] = batch
            words.set(worker, _OF, batch)
            words.set(worker, _MANY, 0)
        before = self._lost_at.setdefault(batch, set())
        is_again = bool(before & {call, None})
        before.add(None if call == _NOTHING else call)
        if call == _NOTHING:
            return Loss(_ANY, is_late) if is_late else Loss()
        where = self._in_words(call, index)
        if is_late:
            return Loss(where, self._add(worker, call, _LATE))
        if is_again and self._crashes:
            self._add(worker, call, _CODE + (code or 0))
        return Loss(where)

    def _add(self, worker: int, call: int, why: int) -> bool:
        """Adds a call to the calls that raise once more. Returns False if there is no room."""
        words = self._words
        # A worker may have written anything there.
        many = min(max(words.get(worker, _MANY), 0), _MOST)
        words.set(worker, _MANY, many)
        places = range(_FIRST, _FIRST + _WORDS_OF_CALL * _MOST, _WORDS_OF_CALL)
        known = (at for at in places[:many] if words.get(worker, at) == call)
        at = next(known, None)
        if at is None:
            if many == _MOST:
                return False
            at = places[many]
            words.set(worker, at, call)
            words.set(worker, at + 1, 0)
            words.set(worker, _MANY, many + 1)
        words.set(worker, at + 1, words.get(worker, at + 1) + 1)
        words.set(worker, at + 2, why)
        return True

    def _in_words(self, call: int, index: Any) -> str:
        if call in (_SEVERAL, _COLLATE):
            return _in_words(call, index)
        try:
            indices = list(index) if self._batches else [index]
        except TypeError:
            return _ANY
        # A worker may have written anything there.
        return _in_words(call, indices[call]) if 0 <= call < len(indices) else _ANY

    def close(self) -> None:
        """Gives the memory back."""
        self._words.close()


class _Noting(WorkerOption):
    """Notes what a worker asks the dataset and ``collate_fn`` for.

    Without a limit, only workers that succeed lost ones do: it costs nothing where nothing crashes.

    Args:
        words: The records of all workers.
        seconds: The limit; None: there is none.
        shares: True if any worker makes again what one that was lost had not.
        grace: As for :class:`SampleNotes`.
    """

    position = Position.TIME

    def __init__(self, words: SharedWords, seconds: float | None, shares: bool, grace: float) -> None:
        self._words = words
        self._seconds = seconds
        self._shares = shares
        self._grace = grace
        # Makes samples at once, but for the batch that the predecessor was lost in.
        self._ahead: Ahead | None = None
        self._worker = 0
        self._deadline: _native.Deadline | None = None
        self.notes = False
        # True for the batch that the predecessor of this process was lost in; None before the first epoch.
        self._is_first: bool | None = None
        # By call: how often it is to raise, and why.
        self._known: dict[int, list[int]] = {}
        self._turn = Turn()
        # The number in its batch of the first sample of a run; that of the run which is made next.
        self._base = self._first = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _Noting, (self._words, self._seconds, self._shares, self._grace)

    def join(self, worker: int, port: _native.Port | None, start: EpochStart) -> None:  # noqa: ARG002
        """Begins to watch this process."""
        words, self._worker = self._words, worker
        self._at_call = worker * words.size + _CALL
        if self._seconds is not None:
            offset = 8 * worker * words.size
            self._deadline = _native.Deadline(words.fd, offset, min(self._seconds + self._grace, _LONGEST))
        self.notes = self._deadline is not None or self._shares or bool(words.get(worker, _NOTES))

    def leave_process(self) -> None:
        """Watches this process no more."""
        self._deadline = None
        self._words.close()

    def fill(self, samples: SampleFetcher) -> None:
        self._is_first = self._is_first is None
        if not self.notes:
            return
        self._turn, torchs, self._ahead = samples.turn, samples.torchs, samples.ahead
        if self._ahead is not None:
            self._ahead.is_careful = self._is_first and bool(self._words.get(self._worker, _NOTES))
        # Samples of plain arrays are gathered natively: they do not wait, and run no code of the user's.
        if samples.gather is None:
            samples.use("sample_timeout, or restart_workers after the loss of a worker,")
            samples.before_batch.append(self._begin)
            samples.get = functools.partial(self._get, samples.get)
            samples.several = functools.partial(self._several, samples.several)
            samples.asks_each = not gives_several(torchs.dataset)
        # `default_collate` waits for nothing, and is native as long as it stands there itself.
        if not _is_torchs(samples.collate_fn_alone):
            torchs.collate_fn = functools.partial(self.call, _COLLATE, torchs.collate_fn)

    def _begin(self) -> None:
        # A run that cannot be used is made again as the whole batch.
        self._base, self._first = self._first, 0

    def _get(self, get: Callable[[Any], Any], index: Any) -> Any:
        return self.call(self._base + self._turn.number, get, index)

    def _several(self, several: Callable[[Any], Any], indices: Any) -> Any:
        # `on_error` asks for single samples of a batch that has raised.
        if not hasattr(indices, "__len__") or len(indices) != 1:
            return self.call(_SEVERAL, several, indices)
        (one,) = indices
        return self.call(self._base + self._turn.number, lambda _: several(indices), one)

    def begin_batch(self, index: Any) -> None:
        """Begins a batch; where all workers share their tasks, a run of one."""
        self._known.clear()
        words = self._words
        if not isinstance(index, _native.Claimed):
            if self._is_first:
                self._read(self._worker)
            return
        words.set(self._worker, _BATCH, index.seq)
        self._first = index.first
        for worker in range(words.workers):
            # ORDERING: written before the run of the worker that was lost could be claimed again.
            if words.get(worker, _MANY) and words.get(worker, _OF) == index.seq:
                self._read(worker)

    def _read(self, worker: int) -> None:
        words = self._words
        many = min(max(words.get(worker, _MANY), 0), _MOST)
        for at in range(_FIRST, _FIRST + _WORDS_OF_CALL * many, _WORDS_OF_CALL):
            call, times, why = (words.get(worker, at + number) for number in range(_WORDS_OF_CALL))
            self._known[call] = [self._known.get(call, [0])[0] + times, why]

    def end_batch(self) -> None:
        """Ends a batch, or a run."""
        self._is_first = False
        if self._ahead is not None:
            self._ahead.is_careful = False

    def call(self, call: int, function: Callable[[Any], Any], argument: Any) -> Any:
        """Returns what the function returns.

        Raises:
            TimeoutError: If it is known that this takes too long.
            RuntimeError: If it is known that this crashes the process.
        """
        known = self._known.get(call)
        if known is not None and known[0] > 0:
            known[0] -= 1
            raise self._error(_in_words(call, argument), known[1])
        words, deadline = self._words.words, self._deadline
        words[self._at_call] = call
        if deadline is not None:
            deadline.begin()
        try:
            return function(argument)
        finally:
            if deadline is not None:
                deadline.end()
            words[self._at_call] = _NOTHING

    def _error(self, where: str, why: int) -> Exception:
        if why == _LATE:
            return TimeoutError(
                f"{where} took longer than sample_timeout={self._seconds} s; the worker was killed, and "
                "another one continues"
            )
        return RuntimeError(f"the DataLoader worker {_ended(why - _CODE)} in {where}; another one continues")


def _ended(code: int) -> str:
    if code >= 0:
        return f"exited unexpectedly with exit code {code}"
    return f"was killed by signal {-code} ({signal.strsignal(-code)})"


def _is_torchs(collate: Any) -> bool:
    return collating.is_default_collate(collate) or bool(collating.parts_of_convert(collate))


def _in_words(call: int, argument: Any) -> str:
    if call == _COLLATE:
        return "collate_fn"
    return f"the {'samples at indices' if call == _SEVERAL else 'sample at index'} {shown(argument)}"


class _Batches(WorkerOption):
    """Tells the option that notes samples where a batch begins and ends."""

    position = Position.BATCH

    def __init__(self, noting: _Noting) -> None:
        self._noting = noting

    def wrap(self, fetcher: Fetcher) -> Fetcher:
        noting = self._noting
        return Around(fetcher, noting.begin_batch, noting.end_batch) if noting.notes else fetcher
