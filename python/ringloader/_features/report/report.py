"""The path that a loader took, the reason for it, and counters of what went over it."""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from ringloader._common import weak_registry
from ringloader._common.attributes import attribute
from ringloader._features.report import asked, tally
from ringloader._torch import hook, internals

if TYPE_CHECKING:
    from ringloader._common.protocols import OurIterator, PathName

# A line of ``str(report)`` for each counter that is not zero.
_LINES = {
    "workers": 'num_workers="auto" ({})',
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
        counters: Counts of the epoch that runs or ran last. With ``num_workers="auto"``, the ``workers`` that
            get tasks now; ``batches`` that workers have made; storages that
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


@dataclasses.dataclass(frozen=True)
class LoaderReport(PathReport):
    """The report of one loader of the process. Its text is one line.

    Attributes:
        path: The path of its last iterator, as in a ``PathReport``.
        reason: The reason, in a sentence.
        counters: Counts of the epoch that runs or ran last; once the loader is gone, ``workers`` alone.
        loader: The name of the loader's class.
        is_alive: False once the loader is gone.
        batches: Batches that ``next`` has returned, in all epochs. None where they are not counted: for
            torch's own iterators, unless a report at exit was asked for.
        waited: Seconds that the program has waited for them in ``next``. On the paths ``"native"`` and
            ``"threads"``, the time in which workers had no batch ready. On the other two paths, all of the
            time in ``next``, which is measured only if a report at exit was asked for; else None.
        starting: Seconds in ``iter``, where workers start. None unless a report at exit was asked for, as
            the attributes that follow.
        seconds: Seconds from the beginning of ``iter`` to the last batch, over all epochs.
        used_at: File and line of the program where the loader was iterated first. None, too, where that
            cannot be told.
        dataset: Class and length of its dataset.
    """

    loader: str
    is_alive: bool
    batches: int | None
    waited: float | None
    starting: float | None
    seconds: float | None
    used_at: str | None
    dataset: str | None

    def __str__(self) -> str:
        return line([self])


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
    # Returns the number of workers that get tasks, with `num_workers="auto"`.
    workers: Callable[[], int] | None = None


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
    workers: Callable[[], int] | None = None,
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
        workers: Returns the number of workers that get tasks, with ``num_workers="auto"``.
    """
    kept = _records.get(loader)
    counted = tally.tally_of(loader, None if kept is None else kept.record.counted, path, reason)
    # As `_is_ours`, in fewer steps: each `iter` asks.
    ours: Any = iterator if hasattr(type(iterator), "_seconds_waited") else None
    count = tally.Count(clock, ours)
    noted = Record(path, reason, counters, recording, counted, count)
    if ours is None:
        _records.put(iterator, Kept(noted))
    else:
        ours._noted = noted
    if counted is not None:
        counted.begin(count)
        if asked.mode:
            asked.note_rank()
            counted.recording = recording
            if counted.used_at is None:
                counted.used_at = asked.line_of_program()
                counted.dataset = sized(getattr(loader, "dataset", None))
            counted.is_workers = internals.is_in_worker() and multiprocessing.parent_process() is not None
    if workers is not None:
        noted.workers = workers
        if counted is not None:
            counted.workers = workers
    if kept is None:
        _records.put(loader, Kept(noted))
    else:
        kept.record = noted
        kept.times += 1
    if clock is not None:
        clock.has_begun()


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
        if found.counted is not None:
            found.counted.reason = found.reason


def noted(iterator: object) -> Record | None:
    """Returns the record that was noted last for an iterator, or for a loader."""
    if _is_ours(iterator):
        found: Record | None = iterator._noted
        return found
    kept = _records.get(iterator)
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
        return PathReport(found.path, found.reason, _counts(found.workers, found.counters))
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


def reports() -> list[LoaderReport]:
    """Returns a report of each loader that this process has iterated, in the order of first use.

    For programs whose framework keeps its loaders to itself. The list keeps no loader, iterator or dataset
    alive. It includes loaders of the path ``"torch"``: of ringloader's class, and of any class while
    ``ringloader.install`` is in effect. It includes no loader whose class makes its iterators without torch's
    method; ``ringloader.report`` of such a loader has the reason.

    At most 1,000 loaders are remembered: of those that are gone, the oldest are forgotten first.
    """
    return [report_of(one) for one in tally.all_tallies()]


def report_of(one: tally.Tally) -> LoaderReport:
    """Returns the report of one loader."""
    loader = one.loader()
    found = None if loader is None else noted(loader)
    counters = _counts(one.workers, dict if found is None else found.counters)
    batches, waited, starting, seconds = one.figures()
    return LoaderReport(
        path=one.path,
        reason=one.reason,
        counters=counters,
        loader=one.name,
        is_alive=loader is not None,
        batches=batches,
        waited=waited,
        starting=starting,
        seconds=seconds,
        used_at=one.used_at,
        dataset=one.dataset or None,
    )


def _counts(workers: Callable[[], int] | None, counters: Callable[[], Mapping[str, int]]) -> dict[str, int]:
    own = {} if workers is None else {"workers": workers()}
    return {**own, **counters()}


def lines_at_exit() -> list[str]:
    """Returns the lines of the report at exit."""
    tallies = [one for one in tally.all_tallies() if not one.is_workers]
    found = lines((report_of(one), one.recording) for one in tallies)
    if tally.dropped():
        found.append(f"{tally.dropped():,} more loaders, which are gone, are not listed")
    return found


def lines(found: Iterable[tuple[LoaderReport, Any]]) -> list[str]:
    """Returns a line for each loader. Loaders of the same class, dataset, place and path share one.

    Args:
        found: Reports, each with the loader's ``Recording``, or None. The figures of the last one of those
            that share a line follow it.
    """
    groups: dict[tuple[object, ...], list[tuple[LoaderReport, Any]]] = {}
    for one, recording in found:
        key = one.used_at, one.loader, one.dataset, one.path, one.reason
        groups.setdefault(key, []).append((one, recording))
    made: list[str] = []
    for group in groups.values():
        made.append(line([one for one, _ in group]))
        last, recording = group[-1]
        figures = None if recording is None else recording.figures(last.path)
        if figures is not None:
            made += [f"  {each}" for each in f"the last epoch: {figures}".splitlines()]
    return made


def line(group: list[LoaderReport]) -> str:
    """Returns the line of loaders of one class, dataset, place and path."""
    one = group[0]
    figures = ((each.batches, each.waited, each.starting, each.seconds) for each in group)
    batches, waited, starting, seconds = functools.reduce(tally.plus, figures, tally.NOTHING)
    parts = [one.path if one.path != "torch" else f"torch, because {one.reason}"]
    if "workers" in group[-1].counters:
        parts.append(_LINES["workers"].format(group[-1].counters["workers"]))
    if batches is None:
        parts.append("batches not counted")
    else:
        parts.append(f"{batches:,} batch{'es' * (batches != 1)}")
        if batches and seconds:
            parts[-1] += f" in {seconds:.3f} s ({batches / seconds:,.1f} a second)"
    if waited is not None:
        parts.append(f"waited {waited:.3f} s")
    if starting is not None:
        parts.append(f"starts {starting:.3f} s")
    where = "" if one.used_at is None else f"{_short(one.used_at)}: "
    of = "" if one.dataset is None else f" of {one.dataset}"
    several = "" if len(group) == 1 else f" ({len(group):,} loaders)"
    return f"{where}{one.loader}{of}{several}: {'; '.join(parts)}"


def _short(place: str) -> str:
    """Returns a place without the current folder."""
    try:
        return place.removeprefix(os.path.join(os.getcwd(), ""))  # noqa: PTH109, PTH118
    except OSError:
        return place


def sized(dataset: Any) -> str:
    """Returns a dataset's class and, if it has one, its length."""
    name = type(dataset).__name__
    try:
        length = len(dataset)
    except Exception:
        # A stream has none, and the length of another one may fail.
        return name
    return f"{name} ({length} sample{'s' * (length != 1)})"
