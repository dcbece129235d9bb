"""Samples that raise, where batches are made: they are asked for again, left out or replaced.

A batch with bad samples becomes a :class:`~ringloader._worker.result.Result`, from which
:class:`~ringloader._features.on_error.collecting.Collecting` takes them in the main process.
"""

from __future__ import annotations

import functools
import gc
import inspect
import operator
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import GeneratorType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from ringloader._common import errors as kept_errors
from ringloader._common.attributes import is_of, shown
from ringloader._core.checks import THREAD
from ringloader._core.feature import Setup
from ringloader._features.on_error import collecting
from ringloader._features.table import Options
from ringloader._torch import internals
from ringloader._worker.options import (
    CountsSamples,
    Fetcher,
    Position,
    TakesTurns,
    WorkerOption,
    collator_of,
)
from ringloader._worker.result import Result, is_result
from ringloader.bad_samples import RAISE, SKIP, BadSample, OnError, retries

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

_LONGEST_PAUSE_SECONDS = 30.0
# Errors in a row after which an iterator is given up: with no sample between, it would never end.
_MOST_IN_A_ROW = 1000


class Handling(WorkerOption):
    """Handles samples that raise as ``on_error`` says."""

    position = Position.ERRORS

    def __init__(self, on_error: OnError) -> None:
        again = retries(on_error)
        self._pauses = (0, 0.0) if again is None else (again.times, again.backoff)
        self._then = on_error if again is None else again.then
        self._made_in = os.getpid()
        # torch's fetcher, while an epoch begins.
        self._torchs: Any = None

    def meet(self, fetcher: Any) -> None:
        self._torchs = fetcher

    def wrap(self, fetcher: Fetcher) -> Fetcher:
        torchs, self._torchs = self._torchs, None
        # The option inside makes batches without asking for samples.
        first = None if fetcher is torchs else fetcher.fetch
        policy = ErrorPolicy(self._pauses, self._then, is_sent=os.getpid() != self._made_in)
        runs = collator_of(torchs)
        if runs is not torchs:
            runs.handle = policy.joined
        if internals.fetches_by_index(torchs):
            return _ByIndex(torchs, policy, first)
        if internals.fetches_in_turn(torchs):
            return _InTurn(torchs, policy)
        raise RuntimeError("on_error cannot take effect: torch's fetcher was replaced")


def feature_for(loader: TorchLoader, options: Options, _setup: Setup) -> collecting.Collecting:
    """Returns the feature of ``on_error``, whose first epoch begins."""
    worker = "thread" if options.worker_method == THREAD else "process"
    made = collecting.Collecting(options.max_errors, worker, Handling(options.on_error))
    made.begin_epoch(loader)
    return made


class ErrorPolicy:
    """Handles a sample, or a batch, that raises.

    Args:
        pauses: How often it is asked for again, and the seconds before the first time.
        then: What to do with it after that.
        is_sent: True if errors leave the process.
    """

    def __init__(self, pauses: tuple[int, float], then: Any, is_sent: bool) -> None:
        self._pauses = pauses
        self._then = then
        self._is_sent = is_sent

    def of_batches(self) -> ErrorPolicy:
        """Returns the policy for a whole batch: a function that gives samples gives no batches."""
        return ErrorPolicy(self._pauses, self._then if self._then == SKIP else RAISE, self._is_sent)

    def pauses(self) -> Iterator[float | None]:
        """Yields the seconds before each further time, and None for the last time."""
        times, pause = self._pauses
        for _ in range(times):
            yield min(pause, _LONGEST_PAUSE_SECONDS)
            pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)
        yield None

    def record(self, error: Exception, index: Any, handling: str, outer: BaseException | None) -> Any:
        """Returns an error that was handled, as the batch carries it.

        Args:
            error: What was raised.
            index: Of the sample.
            handling: What was done.
            outer: What the program was handling when it asked for the batch, which it is left.
        """
        kept_errors.cut(error, outer)
        info = get_worker_info()
        text = "".join(traceback.format_exception(error))
        bad = BadSample(index, None if info is None else info.id, error, text, handling)
        if self._is_sent:
            return collecting.packed(bad)
        kept_errors.drop_frames(error)
        return bad

    def batch(self, batch: Any, errors: list[Any]) -> Any:
        """Returns a batch, with its bad samples if it has any."""
        return Result(batch, self._sent(errors)) if errors else batch

    def nothing(self, errors: list[Any]) -> Result:
        """Returns a batch of which nothing is left."""
        return Result(None, self._sent(errors), is_empty=True)

    def _sent(self, errors: list[Any]) -> Any:
        return collecting.to_bytes(errors) if self._is_sent else errors

    def tried(self, make: Callable[[Any], Any], given: Any, index: Any, errors: list[Any]) -> list[Any]:
        """Returns ``[make(given)]``. If that raises: ``[replacement]``, or ``[]`` to skip.

        Raises:
            Exception: What ``make``, or the user's function, raises in the end.
        """
        outer = sys.exception()
        # Noted at once: an error that is kept until the next time keeps what its frames have.
        retried: list[Any] = []
        for pause in self.pauses():
            try:
                made = make(given)
            except Exception as error:
                if pause is None:
                    return self.handled(error, index, errors, outer)
                retried = [self.record(error, index, "retried", outer)]
                time.sleep(pause)
                continue
            errors += retried
            return [made]
        raise AssertionError("unreachable")

    def handled(
        self, error: Exception, index: Any, errors: list[Any], outer: BaseException | None
    ) -> list[Any]:
        """Returns ``[replacement]``, or ``[]`` to skip. Call it inside an ``except`` block."""
        if self._then == RAISE:
            # A local variable would keep this frame, and what the error's own frames have.
            del error
            raise
        if self._then == SKIP:
            errors.append(self.record(error, index, "skipped", outer))
            return []
        try:
            instead = self._then(index, error)
        except StopIteration as stop:
            # Without this, it would be taken for the end of the epoch.
            raise RuntimeError(
                f"on_error={shown(self._then)} raised StopIteration for sample {shown(index)}"
            ) from stop
        errors.append(self.record(error, index, "replaced", outer))
        return [instead]

    def joined(self, fetcher: Any, parts: list[Any], index: Any) -> Any:
        """Returns the batch of samples that were made in parts, as that of samples made at once."""
        data: list[Any] = []
        errors: list[Any] = []
        for part in parts:
            if is_result(part):
                errors += collecting.unsent(part.errors)
                data += part.data or ()
            else:
                data += part
        del parts
        if errors and not data:
            return self.nothing(errors)
        return self.collated(fetcher, data, _listed(index), errors)

    def collated(self, fetcher: Any, data: Any, index: Any, errors: list[Any]) -> Any:
        """Returns a batch of samples, or nothing if collation raises: which sample is bad is not known."""
        made = self.of_batches().tried(fetcher.collate_fn, data, index, errors)
        return self.batch(made[0], errors) if made else self.nothing(errors)


class _ByIndex:
    """In front of torch's fetcher of datasets with indices. MIRRORS torch fetch.py::_MapDatasetFetcher.

    Args:
        fetcher: torch's.
        policy: Handles samples that raise.
        first: What may make a batch without asking for samples.
    """

    def __init__(self, fetcher: Any, policy: ErrorPolicy, first: Callable[[Any], Any] | None) -> None:
        self._fetcher = fetcher
        self._policy = policy
        self._first = first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fetcher, name)

    def fetch(self, index: Any, /) -> Any:
        if self._first is not None:
            try:
                return self._first(index)
            except Exception:
                # Sample by sample then. What makes such batches calls no code of the user's.
                pass
        fetcher, policy = self._fetcher, self._policy
        errors: list[Any] = []
        if not fetcher.auto_collation:
            found = policy.tried(_one_of(fetcher.dataset), index, index, errors)
            if not found:
                return policy.nothing(errors)
        elif hasattr(fetcher.dataset, "__getitems__") and fetcher.dataset.__getitems__:
            found = self._several(fetcher.dataset, index, errors)
            if not found:
                return policy.nothing(errors)
        else:
            one = _one_of(fetcher.dataset)
            # An index that is no list may allow only one iteration.
            index = index if isinstance(index, (list, tuple)) else list(index)
            turns = _turns(fetcher.dataset, index)
            found = [[sample for at in turns for sample in policy.tried(one, at, at, errors)]]
            if errors and not found[0]:
                return policy.nothing(errors)
        return policy.collated(fetcher, found[0], _listed(index), errors)

    def _several(self, dataset: Any, index: Any, errors: list[Any]) -> list[Any]:
        """Returns the samples of a batch in a list, or what is left of them; an empty list for nothing."""
        policy, outer, make = self._policy, sys.exception(), dataset.__getitems__
        try:
            return [make(index)]
        except Exception as error:
            # The error does not always say which of the samples is bad.
            whole = policy.record(error, _listed(index), "retried", outer)
        apart: list[Any] = []
        try:
            samples = [
                sample
                for at, part in _turns(dataset, _parts(index))
                for sample in policy.tried(functools.partial(_only, make), part, at, apart)
            ]
        except _NotApart:
            apart = []
            made = policy.of_batches().tried(make, index, _listed(index), apart)
        else:
            made = [samples] if samples or not apart else []
        errors += apart or [whole]
        return made


def _turns(dataset: Any, items: Iterable[Any]) -> Iterable[Any]:
    """Returns what a batch is asked for, each in its turn where the dataset knows of turns."""
    return dataset.in_turn(items) if is_of(dataset, TakesTurns) else items


def _one_of(dataset: Any) -> Callable[[Any], Any]:
    """Returns the function that asks a dataset for a sample, the first time and again."""
    if is_of(dataset, TakesTurns):
        return dataset.current
    return functools.partial(operator.getitem, dataset)


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


class _InTurn(CountsSamples):
    """In front of torch's fetcher of iterable datasets. MIRRORS torch fetch.py::_IterableDatasetFetcher."""

    def __init__(self, fetcher: Any, policy: ErrorPolicy) -> None:
        self._fetcher = fetcher
        self._policy = policy
        self.samples_asked = 0
        # The number of its last calls that raised.
        self._in_a_row = 0
        # The error that ended a generator which is kept. The rest of it is lost: the next call says so.
        self._ended_by: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fetcher, name)

    def fetch(self, index: Any, /) -> Any:
        fetcher, policy = self._fetcher, self._policy
        if fetcher.ended:
            raise StopIteration
        errors: list[Any] = []
        if not fetcher.auto_collation:
            found = self._next(errors)
            if not found:
                return policy.nothing(errors)
            return policy.collated(fetcher, found[0], self.samples_asked - 1, errors)
        data: list[Any] = []
        numbers: list[int] = []
        asked = 0
        for _ in index:
            try:
                found = self._next(errors)
            except StopIteration:
                fetcher.ended = True
                break
            asked += 1
            numbers += [self.samples_asked - 1] * len(found)
            data += found
        is_short = fetcher.ended and (asked == 0 or (fetcher.drop_last and asked < len(index)))
        if is_short and not errors:
            raise StopIteration
        if is_short or (errors and not data):
            # The next call ends it.
            return policy.nothing(errors)
        return policy.collated(fetcher, data, numbers, errors)

    def _next(self, errors: list[Any]) -> list[Any]:
        """The next sample, or nothing for a bad one."""
        outer = sys.exception()
        if self._ended_by is not None:
            raise self._end()
        try:
            sample = next(self._fetcher.dataset_iter)
        except StopIteration:
            raise
        except Exception as error:
            if _has_ended_a_generator(error, outer):
                self._ended_by = error
            at, self.samples_asked = self.samples_asked, self.samples_asked + 1
            self._in_a_row += 1
            if self._in_a_row >= _MOST_IN_A_ROW:
                error.add_note(f"on_error: the dataset's iterator has raised {self._in_a_row} times in a row")
                raise
            return self._policy.handled(error, at, errors, outer)
        self.samples_asked += 1
        self._in_a_row = 0
        return [sample]

    def _end(self) -> Exception:
        error, self._ended_by = self._ended_by, None
        assert error is not None
        self._fetcher.ended = True
        error.add_note(
            "on_error cannot go on: a generator ends with its error, and what it would have given after that "
            "is lost. Catch the error in the generator, or give the dataset an iterator with a __next__ that "
            "may be called again"
        )
        return error


def _has_ended_a_generator(error: Exception, outer: BaseException | None) -> bool:
    """True if the program holds a generator that has ended with an error: its next call looks like its end.

    A generator of a single call is gone. If one is kept, it cannot be known whether it had more to give.
    """
    tracebacks = [one.__traceback__ for one in kept_errors.linked(error, outer)]
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
