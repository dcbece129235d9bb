"""Bad samples on their way to the main process, in parts that always arrive."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from typing import Any

from ringloader.bad_samples import BadSample


class Note(str):
    """A note of ringloader's at an error that is the program's."""

    __slots__ = ()


def note(error: BaseException, *texts: str) -> None:
    """Puts these at an error that is raised, in place of those of the last time."""
    _drop_notes(error)
    for text in texts:
        error.add_note(Note(text))


def _drop_notes(error: BaseException) -> None:
    if hasattr(error, "__notes__"):
        error.__notes__ = [note for note in error.__notes__ if type(note) is not Note]


@dataclasses.dataclass(frozen=True)
class Packed:
    """A bad sample in parts."""

    # Pickled, or None where that cannot be.
    index: bytes | None
    index_text: str
    worker_id: int | None
    error: bytes | None
    kind: str
    traceback: str
    handling: str


def packed(bad: BadSample) -> Packed:
    """A bad sample that leaves the process."""
    kind, text = type(bad.error).__name__, repr(bad.index)
    index, error = _pickled(bad.index), _pickled(bad.error)
    return Packed(index, text, bad.worker_id, error, kind, bad.traceback, bad.handling)


def _pickled(thing: Any) -> bytes | None:
    try:
        return pickle.dumps(thing)
    except Exception:
        return None


def to_bytes(errors: Sequence[Packed]) -> bytes:
    """Returns the bad samples of a batch as bytes."""
    return pickle.dumps(list(errors))


def from_bytes(sent: bytes) -> list[BadSample]:
    """Returns the bad samples of a batch from the bytes that a worker has sent."""
    return [_unpacked(one) for one in pickle.loads(sent)]


def _unpacked(packed: Packed) -> BadSample:
    index = _unpickled(packed.index, packed.index_text)
    where = "" if packed.worker_id is None else f" in DataLoader worker process {packed.worker_id}"
    stands_for = RuntimeError(f"Caught {packed.kind}{where}.\nOriginal {packed.traceback}")
    error = _unpickled(packed.error, stands_for)
    if not isinstance(error, BaseException):
        error = stands_for
    return BadSample(index, packed.worker_id, error, packed.traceback, packed.handling)


def _unpickled(pickled: bytes | None, otherwise: Any) -> Any:
    if pickled is None:
        return otherwise
    try:
        return pickle.loads(pickled)
    except Exception:
        return otherwise


def cut(error: BaseException, outer: BaseException | None) -> None:
    """Takes an error out of the handling of ``outer``, which stays the program's, with its traceback.

    It loses what was noted at it before, where a dataset raises the same error again.
    """
    _drop_notes(error)
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        if one.__context__ is outer:
            one.__context__ = None
        one = one.__context__


def copied(bad: BadSample) -> BadSample:
    """Returns the bad sample with a copy of its error, made as if it was sent."""
    error = _unpacked(packed(bad)).error
    error.__cause__, error.__context__ = bad.error.__cause__, bad.error.__context__
    error.__suppress_context__ = bad.error.__suppress_context__
    return dataclasses.replace(bad, error=error)


def kept(bad: BadSample) -> BadSample:
    """A bad sample that stays in the process. Its error loses the frames, which keep samples and batches."""
    drop_frames(bad.error)
    return bad


def drop_frames(error: BaseException) -> None:
    """Drops the tracebacks of an error that is kept, whose frames would keep samples and batches."""
    todo: list[BaseException | None] = [error]
    seen: set[int] = set()
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            todo += [one.__cause__, one.__context__]
            if isinstance(one, BaseExceptionGroup):
                todo += one.exceptions
