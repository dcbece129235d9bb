"""The path that a loader took, the reason for it, and counters of what went over it."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

from ringloader._common import weak_registry
from ringloader._common.looking import attribute
from ringloader._report import asked, made_at, rank, tally
from ringloader._torch import hook, internals

if TYPE_CHECKING:
    from ringloader._common.protocols import OurIterator

PathName = Literal["native", "threads", "ray", "single-process", "torch"]

# A line of ``str(report)`` for each counter that is not zero.
_LINES = {
    "batches": "{} batches made by workers",
    "in_place": "{} tensors written in shared memory by collation",
    "copied": "{} tensors copied into shared memory",
    "pickled": "{} batches pickled",
    "oversize": "{} batches too large for a slot",
    "received_bytes": "{} bytes received from other machines",
    "replaced_workers": "{} lost workers replaced",
    "copied_out": "{} batches copied out of shared memory, because you hold many",
    "device_batches": "{} batches moved to the device",
    "device_copies": "{} copies to the device",
    "device_staged_bytes": "{} bytes copied to pinned memory first",
    "device_registered_bytes": "{} bytes of shared memory registered with the device's driver",
}


@dataclasses.dataclass(frozen=True)
class PathReport:
    """The path of the batches of one iterator.

    Attributes:
        path: ``"native"``: ringloader schedules, over shared-memory rings; ``"threads"``: the workers are
            threads, and batches are handed over as they are; ``"single-process"``: without workers, the
            caller makes the batches; ``"ray"``: the workers are actors of a Ray cluster; ``"torch"``: torch's
            own loader.
        reason: The reason, in a sentence.
        counters: Counts of the epoch that runs or ran last. ``batches`` that workers have made; storages that
            collation wrote ``in_place``, and storages that were ``copied`` into shared memory once; batches
            whose tree was ``pickled``; ``oversize`` batches, in shared memory of their own; batches
            ``copied_out`` because the caller held too many. Threads have ``batches`` only. On the paths
            ``"single-process"`` and ``"torch"`` there are none of these. On the path ``"ray"`` there are
            ``received_bytes`` too, and ``replaced_workers``. With ``device``: ``device_batches``
            that were moved, ``device_copies`` that this took, ``device_staged_bytes`` that were copied to
            pinned memory before, and ``device_registered_bytes`` of shared memory that the device's driver
            has now.
    """

    path: PathName
    reason: str
    counters: Mapping[str, int]

    # The text that a prompt and a notebook show, and that `str` gives.
    def __repr__(self) -> str:
        lines = [_LINES[name].format(f"{count:,}") for name, count in self.counters.items() if count]
        return "\n  ".join([f"{self.path}: {self.reason}", *lines])


@dataclasses.dataclass(slots=True)
class Record:
    """The notes of an iterator: how it gets its batches, and what counts them."""

    path: PathName
    reason: str
    counters: Callable[[], Mapping[str, int]]
    # Notes the times of its epochs; None without ``stats=True``.
    recording: Any
    # The sums over the loader; None for one without weak references.
    counted: tally.Tally | None
    count: tally.Count
    # The class of the iterator, if nothing that is noted tells it from the loader's next one of that class.
    plain: Any = None


class Kept:
    """The record of a loader's last iterator, and how many it has made; or that of another's iterator."""

    __slots__ = ("record", "times")

    def __init__(self, record: Record) -> None:
        self.record = record
        self.times = 1


_records: weak_registry.WeakRegistry[Kept] = weak_registry.WeakRegistry()


def record(
    loader: object,
    iterator: object,
    path: PathName,
    reason: str,
    counters: Callable[[], Mapping[str, int]] = dict,
    recording: Any = None,
    clock: tally.Clock | None = None,
    plain: Any = None,
) -> None:
    """Notes how ``iterator``, made by ``loader``, gets its batches, and what notes their times.

    Args:
        loader: The loader.
        iterator: The iterator, of any class.
        path: Its path.
        reason: The reason for that.
        counters: Returns what a report counts.
        recording: Notes times, with ``stats``.
        clock: Notes times, for a report at exit.
        plain: The class of the iterator, if nothing that is noted tells it from the loader's next one.
    """
    noted = _begin(loader, iterator, path, reason, counters, recording, clock)
    noted.plain = plain
    if _is_ours(iterator):
        iterator._noted = noted
    else:
        _records.put(iterator, Kept(noted))


def plain(loader: object) -> Kept | None:
    """Returns the record of a loader's last iterator, if that was a plain one.

    For the next one like it, the caller adds to ``times``.
    """
    kept = _records.get(loader)
    return None if kept is None or kept.record.plain is None else kept


def _begin(
    loader: object,
    iterator: object,
    path: PathName,
    reason: str,
    counters: Callable[[], Mapping[str, int]],
    recording: Any,
    clock: tally.Clock | None,
) -> Record:
    """Notes that a loader begins an iterator."""
    kept = _records.get(loader)
    counted = tally.tally_of(loader, None if kept is None else kept.record.counted, path, reason)
    count = tally.Count(clock)
    if _is_ours(iterator):
        count.follow(iterator)
    if counted is not None:
        counted.begin(count)
        if asked.mode():
            rank.note()
            counted.recording = recording
            counted.made_at = made_at.place_of(loader)
            counted.is_workers = internals.is_in_worker() and multiprocessing.parent_process() is not None
    noted = Record(path, reason, counters, recording, counted, count)
    if kept is None:
        _records.put(loader, Kept(noted))
    else:
        kept.record = noted
        kept.times += 1
    return noted


def _is_ours(iterator: object) -> TypeGuard[OurIterator]:
    return hasattr(type(iterator), "_seconds_waited")


def pass_on(loader: object, iterator: object, other: OurIterator) -> None:
    """Notes for ``other``, which stands in front of an iterator of a loader, what was noted for that."""
    # Other code may have put an iterator of its own in the place of the one that was noted.
    found = noted(iterator) or noted(loader)
    if found is not None:
        found.count.follow(other)
        other._noted = found


def add(loader: object, text: str) -> None:
    """Adds ``text`` to the reason that was noted last for ``loader``, and for the iterator it made then."""
    found = noted(loader)
    if found is not None:
        found.reason += f"; {text}"
        found.plain = None
        if found.counted is not None:
            found.counted.reason = found.reason


def noted(key: Any) -> Record | None:
    """Returns the record that was noted last for an iterator or a loader."""
    if _is_ours(key):
        found: Record | None = key._noted
        return found
    kept = _records.get(key)
    return None if kept is None else kept.record


def times(loader: object) -> int:
    """Returns how many iterators of a loader have been noted."""
    kept = _records.get(loader)
    return 0 if kept is None else kept.times


def iterators_of(loader: object) -> list[Any]:
    """Returns the iterators that a loader has made in this process and that live, the oldest first.

    One that other code has made is not among them: it is that code's to end.
    """
    found = noted(loader)
    return [] if found is None or found.counted is None else found.counted.iterators()


def is_of_this_process(loader: object) -> bool:
    """False for a loader whose last iterator is one of the parent process."""
    found = noted(loader)
    return found is None or found.count.is_of_this_process


def noted_behind(key: object) -> Record | None:
    """Returns the record of an iterator or a loader, or of the loader that it stands in front of."""
    found = noted(key)
    # The attributes where accelerate, Lightning and Ray keep that loader.
    for name in ("base_dataloader", "_dataloader"):
        found = found or noted(attribute(key, name))
    return found


def report(iterator_or_loader: object) -> PathReport:
    """Returns the path of an iterator, or of the last iterator of a loader, its reason, and counters.

    Args:
        iterator_or_loader: A ``ringloader.DataLoader``, or any torch loader while ``ringloader.install`` is
            in effect, or what ``iter`` returned for one of them. A loader whose class makes its iterators
            itself, which ``install`` does not reach, has the path ``torch``.

    Raises:
        ValueError: If the loader was not iterated yet, or is not one of ringloader's.
    """
    found = noted_behind(iterator_or_loader)
    if found is not None:
        return PathReport(found.path, found.reason, dict(found.counters()))
    cls = type(iterator_or_loader)
    about = (
        "pass a ringloader.DataLoader after iter() was called on it, or what iter() returned; another torch "
        "loader only where iter() was called after ringloader.install()"
    )
    if issubclass(cls, internals.Loader):
        reason = hook.reason_not_reached(iterator_or_loader, internals.Loader)
        if reason is not None:
            return PathReport("torch", reason, {})
    elif not hasattr(cls, "__next__"):
        about = f"{cls.__module__}.{cls.__qualname__} is no torch.utils.data.DataLoader; {about}"
    try:
        text = repr(iterator_or_loader)
    except Exception:
        text = object.__repr__(iterator_or_loader)
    raise ValueError(f"no path is known for {text:.200}: {about}")
