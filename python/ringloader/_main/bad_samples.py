"""``on_error=`` in the main process: batches without their errors, and the list of those."""

from __future__ import annotations

import dataclasses
import functools
import logging
import reprlib
from collections.abc import Callable
from typing import Any

from ringloader._common import sent_bad_samples, whole_errors
from ringloader._common.weak_registry import WeakRegistry
from ringloader._options import THREAD, Options
from ringloader._torch import internals
from ringloader._worker.bad_samples import Handling
from ringloader.bad_samples import RAISE, BadSample

_logger = logging.getLogger("ringloader")

# Of the epoch that a loader began last.
_listed: WeakRegistry[list[BadSample]] = WeakRegistry()


def step_for(options: Options) -> Handling | None:
    """The step of a loader's fetchers, if its options say so."""
    return None if options.on_error == RAISE else Handling(options.on_error)


def collecting_for(loader: Any, options: Options) -> Collecting | None:
    """What takes the batches of an iterator apart. Its first epoch begins by it."""
    if options.on_error == RAISE:
        return None
    made = Collecting(options.max_errors, "thread" if options.worker_method == THREAD else "process")
    made.begin_epoch(loader)
    return made


def listed(loader: object) -> list[BadSample]:
    """Those of a loader's epoch."""
    return list(_listed.get(loader) or ())


def through(transform: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    """A function of batches, for batches as :class:`Handling` makes them."""
    return None if transform is None else functools.partial(_transformed, transform)


def _transformed(transform: Callable[[Any], Any], found: list[Any]) -> list[Any]:
    return found if len(found) == 3 else [transform(found[0]), *found[1:]]


class Collecting:
    """Takes the batches of an iterator apart.

    Args:
        most: Bad samples of an epoch that are skipped or replaced; None for any number.
        worker: What a worker is: ``"process"`` or ``"thread"``.
    """

    def __init__(self, most: int | None, worker: str) -> None:
        self._most = most
        self._worker = worker
        self._bad: list[BadSample] = []
        # Of those, how many are not good after all.
        self.number = 0
        # Whether the epoch has given a batch.
        self._has_given = False
        # Where the list is to be had.
        self._hint = ""

    def begin_epoch(self, loader: Any) -> None:
        """The loader's list is that of this epoch."""
        self._hint = "; loader.errors lists them" if hasattr(type(loader), "errors") else ""
        self._bad = []
        self.number = 0
        self._has_given = False
        _listed.put(loader, self._bad)

    def next(self, take: Callable[..., Any], *args: Any) -> Any:
        """The next batch of those that ``take(*args)`` gives.

        Raises:
            Exception: What the bad sample raised that is one too many; the first, if the epoch ends and all
                of its samples were skipped.
        """
        while True:
            try:
                found = take(*args)
            except StopIteration:
                if not self.number or self._has_given:
                    raise
                break
            too_many = self._note(found[1]) if len(found) > 1 else None
            if too_many is None and len(found) != 3:
                self._has_given = True
                return found[0]
            # An error in a local variable, once it is raised, would keep this frame and the iterator.
            del found
            if too_many is not None:
                raise self._error_of(*too_many)
        self._has_given = True
        first = next(at for at, bad in enumerate(self._bad) if bad.handling != "retried")
        raise self._error_of(first, "on_error: nothing is left of the epoch, whose samples were all bad")

    def _note(self, errors: Any) -> tuple[int, str] | None:
        """Lists the bad samples of a batch. Returns the place of one too many, and a note for its error."""
        many = sent_bad_samples.from_bytes(errors) if isinstance(errors, bytes) else errors
        too_many: tuple[int, str] | None = None
        for bad in many:
            if bad.handling != "retried":
                self.number += 1
                if self._most is not None and self.number > self._most:
                    # Its batch does not come.
                    bad = dataclasses.replace(bad, handling="raised")
                    note = f"max_errors={self._most} is exceeded: bad sample {self.number} of this epoch"
                    too_many = too_many or (len(self._bad), note)
                elif _is_power_of_ten(self.number):
                    self._say(bad)
            self._bad.append(bad)
        return too_many

    def _say(self, bad: BadSample) -> None:
        _logger.warning(
            "on_error: the %s %s was %s: %s: %.500s (bad samples of this epoch so far: %d%s)",
            "batch of indices" if isinstance(bad.index, list) else "sample at index",
            reprlib.repr(bad.index),
            bad.handling,
            type(bad.error).__name__,
            bad.error,
            self.number,
            self._hint,
        )

    def _error_of(self, at: int, note: str) -> BaseException:
        """The error to raise for the bad sample at this place of the list, in torch's words."""
        bad = self._bad[at]
        if bad.worker_id is None:
            # What is raised gets frames, which the list must not keep.
            self._bad[at] = sent_bad_samples.copied(bad)
            sent_bad_samples.note(bad.error, f"Original {bad.traceback}", note)
            return bad.error
        where = f"in DataLoader worker {self._worker} {bad.worker_id}"
        wrapper = internals.ExceptionWrapper(exc_info=(type(bad.error), bad.error, None), where=where)
        wrapper.exc_msg = bad.traceback
        try:
            whole_errors.whole(wrapper, is_sent=False).reraise()
        except Exception as error:
            error.add_note(note)
            # Without the frame of torch's method, which has the error in a local variable.
            return error.with_traceback(None)
        raise AssertionError("unreachable")


def _is_power_of_ten(number: int) -> bool:
    return str(number).rstrip("0") == "1"
