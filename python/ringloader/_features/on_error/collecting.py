"""Bad samples in the main process: taken off batches, listed, counted, logged; and how they travel there.

Their errors are kept beyond their handling: without frames, causes and contexts, whose text is kept.
"""

from __future__ import annotations

import dataclasses
import functools
import pickle
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ringloader._common import pickling
from ringloader._common.attributes import shown
from ringloader._common.weak_registry import WeakRegistry
from ringloader._core.feature import Feature, StagePosition
from ringloader._log import logger
from ringloader._torch import internals
from ringloader._worker.fetch import Result
from ringloader.bad_samples import BadSample

if TYPE_CHECKING:
    from ringloader._common.protocols import OurIterator
    from ringloader._torch.protocols import TorchLoader
    from ringloader._worker.options import WorkerOption

# A bad sample in parts that always arrive: index and error pickled, or None where that cannot be; text of the
# index and name of the error's type; the worker's number, traceback and handling.
Packed = tuple[bytes | None, bytes | None, str, str, int | None, str, str]
# The bad samples of the epoch that a loader began last.
_bad_samples_of: WeakRegistry[list[BadSample]] = WeakRegistry()


def listed(loader: object | None) -> list[BadSample]:
    """Returns the bad samples of a loader's epoch; none for no loader."""
    return list(_bad_samples_of.get(loader) or ())


class Collecting(Feature):
    """Takes the bad samples off an iterator's batches.

    Args:
        most: Bad samples of an epoch that are skipped or replaced; None for any number.
        worker: What a worker is: ``"process"`` or ``"thread"``.
        handling: The option that handles them where batches are made.
    """

    position = StagePosition.ERRORS

    def __init__(self, most: int | None, worker: str, handling: WorkerOption) -> None:
        self._most = most
        self._handling = handling
        self._worker = worker
        self._bad: list[BadSample] = []
        # Bad samples other than successful retries.
        self.number = 0
        # True once the epoch has given a batch.
        self.has_given = False
        # The end of a warning: where to find the list.
        self._hint = ""
        # Called when a batch is left out, because all of its samples were skipped.
        self.leave_out: Callable[[], object] | None = None

    def begin_epoch(self, loader: TorchLoader) -> None:
        """Begins the loader's list of this epoch."""
        self._hint = "; loader.errors lists them" if hasattr(type(loader), "errors") else ""
        self._bad = []
        self.number = 0
        self.has_given = False
        _bad_samples_of.put(loader, self._bad)

    def begun(self, loader: TorchLoader, iterator: OurIterator) -> None:  # noqa: ARG002
        if iterator._plan.tracked is not None:
            iterator._plan.tracked.count_errors(self)

    def workers(self) -> Iterable[WorkerOption]:
        return (self._handling,)

    def around(self, take: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns ``take`` for batches without their bad samples."""
        return functools.partial(self._next, take)

    def _next(self, take: Callable[[Any], Any], iterator: OurIterator) -> Any:
        """Returns the next batch.

        Raises:
            Exception: The error of the sample that exceeded ``max_errors``; the first one, if the epoch ends
                and all of its samples were skipped.
        """
        while True:
            try:
                found = take(iterator)
            except StopIteration:
                if not self.number or self.has_given:
                    raise
                break
            if type(found) is not Result:
                self.has_given = True
                return found
            too_many = self._record(found.errors)
            if too_many is None and not found.is_empty:
                self.has_given = True
                return found.data
            # An error in a local variable, once it is raised, would keep this frame and the iterator.
            del found
            if too_many is not None:
                raise self._error_of(*too_many)
            if self.leave_out is not None:
                self.leave_out()
        self.has_given = True
        first = next(at for at, bad in enumerate(self._bad) if bad.handling != "retried")
        raise self._error_of(first, "on_error: nothing is left of the epoch, whose samples were all bad")

    def _record(self, errors: Any) -> tuple[int, str] | None:
        """Lists the bad samples of a batch. Returns the place of one too many, and a note for its error."""
        many = from_bytes(errors) if isinstance(errors, bytes) else errors
        too_many: tuple[int, str] | None = None
        for bad in many:
            if bad.handling != "retried":
                self.number += 1
                if self._most is not None and self.number > self._most:
                    # The batch of this sample does not come.
                    bad = dataclasses.replace(bad, handling="raised")
                    note = f"max_errors={self._most} is exceeded: bad sample {self.number} of this epoch"
                    too_many = too_many or (len(self._bad), note)
                elif _is_power_of_ten(self.number):
                    self._log(bad)
            self._bad.append(bad)
        return too_many

    def _log(self, bad: BadSample) -> None:
        logger.warning(
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
            # An error that is raised gets frames, which the list must not keep.
            self._bad[at] = dataclasses.replace(bad, error=_unpacked(packed(bad)).error)
            bad.error.add_note(f"Original {bad.traceback}")
            bad.error.add_note(note)
            return bad.error
        where = f"in DataLoader worker {self._worker} {bad.worker_id}"
        wrapper = internals.ExceptionWrapper(exc_info=(type(bad.error), bad.error, None), where=where)
        wrapper.exc_msg = bad.traceback
        try:
            pickling.whole(wrapper, is_sent=False).reraise()
        except Exception as error:
            error.add_note(note)
            # Drops the frame of torch's method, which has the error in a local variable.
            return error.with_traceback(None)
        raise AssertionError("unreachable")


def _is_power_of_ten(number: int) -> bool:
    return str(number).rstrip("0") == "1"


def packed(bad: BadSample) -> Packed:
    """Returns a bad sample that leaves the process, in parts."""
    texts = shown(bad.index), type(bad.error).__name__
    return _pickled(bad.index), _pickled(bad.error), *texts, bad.worker_id, bad.traceback, bad.handling


def _pickled(thing: Any) -> bytes | None:
    try:
        return pickle.dumps(thing)
    except Exception:
        return None


def to_bytes(errors: Sequence[Packed]) -> bytes:
    """Returns the bad samples of a batch as bytes."""
    return pickle.dumps(list(errors))


def unsent(errors: Any) -> Sequence[Any]:
    """Returns the bad samples of a part of a batch, as a batch's are sent."""
    packed_errors: Sequence[Any] = pickle.loads(errors) if isinstance(errors, bytes) else errors
    return packed_errors


def from_bytes(sent: bytes) -> list[BadSample]:
    """Returns the bad samples of a batch from the bytes that a worker has sent."""
    return [_unpacked(one) for one in pickle.loads(sent)]


def _unpacked(packed: Packed) -> BadSample:
    index, error, text, kind, worker_id, traceback, handling = packed
    where = "" if worker_id is None else f" in DataLoader worker process {worker_id}"
    stands_for = RuntimeError(f"Caught {kind}{where}.\nOriginal {traceback}")
    found = _unpickled(error, stands_for)
    if not isinstance(found, BaseException):
        found = stands_for
    return BadSample(_unpickled(index, text), worker_id, found, traceback, handling)


def _unpickled(pickled: bytes | None, otherwise: Any) -> Any:
    if pickled is None:
        return otherwise
    try:
        return pickle.loads(pickled)
    except Exception:
        return otherwise
