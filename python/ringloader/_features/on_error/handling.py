"""Samples that raise, where batches are made: they are asked for again, left out or replaced.

A batch with bad samples becomes a :class:`~ringloader._worker.fetch.Result`, from which
:class:`~ringloader._features.on_error.collecting.Collecting` takes them in the main process.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from types import GeneratorType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from ringloader._common.attributes import shown
from ringloader._core.feature import Setup
from ringloader._features.on_error import collecting, retries
from ringloader._features.rules import THREAD
from ringloader._features.table import Options
from ringloader._worker.fetch import EMPTY, Parts, Result, SampleFetcher
from ringloader._worker.options import Fetcher, InFront, Position, WorkerOption
from ringloader.bad_samples import RAISE, SKIP, BadSample, OnError

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

_LONGEST_PAUSE_SECONDS = 30.0
# Errors in a row after which an iterator is given up: with no sample between, it would never end.
_MOST_IN_A_ROW = 1000


class Handling(WorkerOption):
    """Handles samples that raise as ``on_error`` says."""

    position = Position.ERRORS

    def __init__(self, on_error: OnError) -> None:
        self._on_error = on_error
        self._made_in = os.getpid()
        # While an epoch begins.
        self._policy: ErrorPolicy | None = None

    def fill(self, samples: SampleFetcher) -> None:
        samples.use("on_error")
        cls = ErrorPolicy if samples.is_by_index else StreamPolicy
        policy = cls(self._on_error, os.getpid() != self._made_in, samples.torchs)
        samples.handler = self._policy = policy
        samples.get = policy.around(samples.get)

    def wrap(self, fetcher: Fetcher) -> Fetcher:
        policy, self._policy = self._policy, None
        assert policy is not None
        return _Reporting(fetcher, policy)


def feature_for(loader: TorchLoader, options: Options, _setup: Setup) -> collecting.Collecting:
    """Returns the feature of ``on_error``, whose first epoch begins."""
    worker = "thread" if options.worker_method == THREAD else "process"
    made = collecting.Collecting(options.max_errors, worker, Handling(options.on_error))
    made.begin_epoch(loader)
    return made


class _Reporting(InFront):
    """In front of a fetcher: gives a batch its bad samples, if it has any.

    Args:
        fetcher: The fetcher.
        policy: Handles samples that raise.
    """

    def __init__(self, fetcher: Fetcher, policy: ErrorPolicy) -> None:
        super().__init__(fetcher)
        self._policy = policy

    def fetch(self, index: Any, /) -> Any:
        policy = self._policy
        policy.outer = sys.exception()
        policy.errors = errors = []
        if type(index) is Parts:
            # Of samples that were made in parts.
            found = [collecting.unsent(part.errors) for part in index.parts if type(part) is Result]
            errors += [bad for many in found for bad in many]
        try:
            batch = self._behind.fetch(index)
        except StopIteration:
            if not errors or not policy.has_ended():
                raise
            # The next call ends the epoch.
            batch = EMPTY
        finally:
            policy.outer, policy.errors = None, []
        return (
            Result(batch.data if batch is EMPTY else batch, policy.sent(errors), is_empty=batch is EMPTY)
            if errors
            else batch
        )


class ErrorPolicy:
    """Handles samples that raise, and batches. Fills the slot ``handler`` of a :class:`SampleFetcher`.

    Args:
        on_error: The option.
        is_sent: True if errors leave the process.
        torchs: torch's fetcher.

    Attributes:
        errors: The bad samples of the batch that is made.
        outer: What the program was handling when it asked for that, which it is left.
    """

    def __init__(self, on_error: OnError, is_sent: bool, torchs: Any) -> None:
        again = retries(on_error)
        # The number of times that a sample is asked for again, and the seconds before the first time.
        self._times, self._pause = (0, 0.0) if again is None else (again.times, again.backoff)
        self._then = on_error if again is None else again.then
        self._is_sent = is_sent
        self._torchs = torchs
        self.errors: list[Any] = []
        self.outer: BaseException | None = None

    def around(self, get: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns ``get``, which asks for one sample, in the form in which it is called."""
        return get

    def has_ended(self) -> bool:
        """True if the dataset has no more samples to give."""
        return False

    def sent(self, errors: list[Any]) -> Any:
        """Returns the bad samples of a batch, as it carries them."""
        return collecting.to_bytes(errors) if self._is_sent else errors

    def failed(self, error: Exception, index: Any, tries: int, is_batch: bool) -> list[Any] | None:
        """Handles an error as :class:`~ringloader._worker.fetch.Handler` has it.

        Raises:
            Exception: The error itself, or what the user's function raises.
        """
        then = self._then
        if is_batch:
            # A function that gives samples gives no batches, and which sample is bad is not known.
            index, then = _listed(index), SKIP if then == SKIP else RAISE
        if tries:
            # The error of the time before.
            self.errors.pop()
        if tries < self._tries(is_batch):
            # Recorded at once: an error that is kept until the next time keeps what its frames have.
            self.errors.append(self._record(error, index, "retried"))
            return None
        if then == RAISE:
            # A local variable would keep this frame, and what the error's own frames have.
            del error
            raise
        if then == SKIP:
            self.errors.append(self._record(error, index, "skipped"))
            return []
        try:
            instead = then(index, error)  # type: ignore[operator]
        except StopIteration as stop:
            # Without this, it would be taken for the end of the epoch.
            raise RuntimeError(
                f"on_error={shown(then)} raised StopIteration for sample {shown(index)}"
            ) from stop
        self.errors.append(self._record(error, index, "replaced"))
        return [instead]

    def pause(self, tries: int) -> float | None:
        """Returns the seconds to wait before a sample that has failed is asked for again; None: it is not."""
        if tries >= self._times:
            return None
        return min(self._pause * 2.0 ** min(tries, 64), _LONGEST_PAUSE_SECONDS)

    def _tries(self, _is_batch: bool) -> int:
        """The number of times that a sample, or a batch, is asked for again."""
        return self._times

    def _record(self, error: Exception, index: Any, handling: str) -> Any:
        """Returns an error that was handled, as the batch carries it."""
        info = get_worker_info()
        text = "".join(traceback.format_exception(error))
        bad = BadSample(index, None if info is None else info.id, error, text, handling)
        if self._is_sent:
            return collecting.packed(bad)
        # Their frames would keep samples and batches.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        return bad

    def several(self, samples: SampleFetcher, index: Any) -> list[Any]:
        """Asks for all samples of a batch at once; if that raises, for each of them."""
        try:
            return [samples.several(index)]
        except Exception as error:
            # The error does not always say which of the samples is bad.
            whole = self._record(error, _listed(index), "retried")
        only = functools.partial(_only, samples.several)
        data: list[Any] = []
        try:
            for samples.turn.number, (at, part) in enumerate(_parts(index)):
                data += samples.tried(only, part, at)
        except _NotApart:
            self.errors.clear()
            found = samples.tried(samples.several, index, index, is_batch=True)
        else:
            found = [data] if data or not self.errors else []
        if not self.errors:
            self.errors.append(whole)
        return found


class _NotApart(BaseException):
    """The samples of a batch cannot be told apart. No ``Exception``, which would be handled as a sample's."""


def _parts(index: Any) -> Iterable[tuple[Any, Any]]:
    """Returns each index of a batch, and the batch of it alone."""
    try:
        indices = list(index)
    except Exception:
        raise _NotApart from None
    if isinstance(index, (list, tuple, np.ndarray, torch.Tensor)):
        return [(at, index[number : number + 1]) for number, at in enumerate(indices)]
    return [(at, [at]) for at in indices]


def _only(make: Callable[[Any], Any], part: Any) -> Any:
    """The sample of a batch of one."""
    samples = make(part)
    if not isinstance(samples, (list, tuple)) or len(samples) != 1:
        raise _NotApart
    return samples[0]


def _listed(index: Any) -> Any:
    """Returns the indices of a batch, as errors have them."""
    return index.tolist() if isinstance(index, (np.ndarray, torch.Tensor)) else index


class StreamPolicy(ErrorPolicy):
    """Handles errors of an iterable dataset, whose samples cannot be asked for again."""

    def __init__(self, on_error: OnError, is_sent: bool, torchs: Any) -> None:
        super().__init__(on_error, is_sent, torchs)
        # The number of its last calls that raised, and the last one.
        self._in_a_row = 0
        self._bad = -1
        # The error that ended a generator which is kept. The rest of it is lost: the next call says so.
        self._ended_by: Exception | None = None

    def around(self, get: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return functools.partial(self._next, get)

    def _next(self, get: Callable[[Any], Any], number: int) -> Any:
        if self._ended_by is not None:
            raise self._end()
        return get(number)

    def has_ended(self) -> bool:
        return bool(self._torchs.ended)

    def _tries(self, is_batch: bool) -> int:
        return self._times if is_batch else 0

    def failed(self, error: Exception, index: Any, tries: int, is_batch: bool) -> list[Any] | None:
        try:
            if not is_batch and self._is_final(error, index):
                raise
            return super().failed(error, index, tries, is_batch)
        finally:
            # This frame must not keep the error.
            del error

    def _is_final(self, error: Exception, number: int) -> bool:
        """True if the error ends the epoch."""
        if isinstance(error, StopIteration) or self.has_ended():
            return True
        if _has_ended_a_generator(error, self.outer):
            self._ended_by = error
        self._in_a_row = self._in_a_row + 1 if number == self._bad + 1 else 1
        self._bad = number
        if self._in_a_row < _MOST_IN_A_ROW:
            return False
        error.add_note(f"on_error: the dataset's iterator has raised {self._in_a_row} times in a row")
        return True

    def _end(self) -> Exception:
        error, self._ended_by = self._ended_by, None
        assert error is not None
        self._torchs.ended = True
        error.add_note(
            "on_error cannot continue: an error ends a generator, and the rest of its samples is lost. Catch "
            "the error in the generator, or give the dataset an iterator whose __next__ may be called again"
        )
        return error


def _has_ended_a_generator(error: BaseException | None, outer: BaseException | None) -> bool:
    """True if the program holds a generator that has ended with an error: its next call looks like its end.

    A generator of a single call is gone. If one is kept, it cannot be known whether it had more to give.
    """
    tracebacks, at, seen = [], error, {id(outer)}
    # An error may be its own cause.
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        tracebacks.append(at.__traceback__)
        at = at.__cause__ or at.__context__
    frames = (frame.f_code for one in tracebacks for frame, _ in traceback.walk_tb(one))
    ended = {code for code in frames if code.co_flags & inspect.CO_GENERATOR}
    if not ended:
        return False
    for one in tracebacks:
        # Drops what the frames of that call have.
        traceback.clear_frames(one)
    return any(
        # Nothing but its type is asked: of some objects the rest warns, or imports.
        type(found) is GeneratorType and found.gi_code in ended and found.gi_frame is None
        for found in gc.get_objects()
    )
