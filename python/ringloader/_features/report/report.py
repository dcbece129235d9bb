"""The path that a loader took, the reason for it, and counters of what went over it."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ringloader._core import notes
from ringloader._core.feature import Feature, StagePosition
from ringloader._features.report import at_exit
from ringloader._torch import hook, internals

if TYPE_CHECKING:
    from ringloader._common.protocols import OurIterator, PathName
    from ringloader._torch.protocols import TorchLoader

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
        path: One of these words:

            - ``"native"``: ringloader schedules, and batches travel over shared-memory rings.
            - ``"threads"``: workers are threads, and nothing is copied.
            - ``"single-process"``: there are no workers.
            - ``"ray"``: workers are actors of a Ray cluster.
            - ``"torch"``: torch's own loader runs.
        reason: The reason, in a sentence.
        counters: Counts of the newest epoch, by name. The pages tuning.md and ray_workers.md explain them.
            Threads have ``batches`` only. The paths ``"single-process"`` and ``"torch"`` have none. With
            ``num_workers="auto"``, ``workers`` is the number that get tasks now.
    """

    path: PathName
    reason: str
    counters: Mapping[str, int]

    # The text that a prompt and a notebook show, and that `str` gives.
    def __repr__(self) -> str:
        counts = ((text, self.counters.get(name)) for name, text in _LINES.items())
        lines = [text.format(f"{count:,}") for text, count in counts if count]
        return "\n  ".join([f"{self.path}: {self.reason}", *lines])


@dataclasses.dataclass(frozen=True)
class LoaderReport(PathReport):
    """The report of one loader of the process. Its text is one line.

    Some attributes need a report at exit: a process with ``RINGLOADER_REPORT=1``, or ``run --report``.

    Attributes:
        path: The path of the loader's last iterator, as in a ``PathReport``.
        reason: The reason, in a sentence.
        counters: Counts of the newest epoch. Once the loader is gone, only a report at exit has them.
        loader: The name of the loader's class.
        is_alive: False once the loader is gone.
        batches: Batches that ``next`` has returned, in all epochs. None for torch's own iterators, except
            with a report at exit.
        waited: Seconds that the program has waited in ``next``. On the paths ``"native"`` and ``"threads"``,
            time in which workers had no batch ready. On other paths, all time in ``next``, which only a
            report at exit measures; otherwise None.
        starting: Seconds in ``iter``, where workers start. None without a report at exit.
        seconds: Seconds from the beginning of ``iter`` to the last batch, over all epochs. None without a
            report at exit.
        used_at: File and line of the program that first iterated the loader. None without a report at exit,
            or if it is not known.
        dataset: Class and length of the loader's dataset.
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


class _Times:
    """The notes of one loader for a report at exit, summed up over its iterators.

    Args:
        loader: The loader.

    Attributes:
        used_at: File and line of the program where it was iterated first.
        dataset: Class and length of its dataset.
        is_workers: True for a loader of a dataset, in a worker process.
        waited: Seconds in ``next``.
        starting: Seconds in ``iter``.
        seconds: Seconds from ``iter`` to the last batch.
        note: The note of its last iterator.
    """

    def __init__(self, loader: TorchLoader) -> None:
        self.used_at = at_exit.line_of_program()
        self.dataset = sized(loader.dataset)
        self.is_workers = internals.is_in_worker() and multiprocessing.parent_process() is not None
        self.waited = self.starting = self.seconds = 0.0
        self.note: Any = None


class Clock(Feature):
    """Notes the times of an iterator's epochs. The ``iter`` of the first one begins now.

    Args:
        loader: The loader.
    """

    position = StagePosition.CLOCK

    def __init__(self, loader: TorchLoader) -> None:
        self._last = time.monotonic()
        found = notes.of(loader)
        before = None if found is None else found.of_loader.more
        self._times = before or _Times(loader)

    def noted(self, note: notes.Note) -> None:
        note.of_loader.more, self._times.note = self._times, note
        at_exit.note_rank()

    def begin_times(self) -> None:
        """Notes the beginning of the ``iter`` of another epoch."""
        self._last = time.monotonic()

    def begun(self, loader: TorchLoader, iterator: OurIterator) -> None:  # noqa: ARG002
        """Notes the end of an ``iter``."""
        self._times.starting += self._passed()

    def around(self, take: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns ``take`` with the clock read before and after each batch."""

        def timed(iterator: OurIterator) -> Any:
            begun = time.monotonic()
            batch = take(iterator)
            self._passed()
            self._times.waited += self._last - begun
            return batch

        return timed

    def _passed(self) -> float:
        """Returns the seconds since this was called last, or since ``iter`` was."""
        last, self._last = self._last, time.monotonic()
        self._times.seconds += self._last - last
        return self._last - last


def report(iterator_or_loader: object) -> PathReport:
    """Returns the path of an iterator, or of the last iterator of a loader, its reason, and counters.

    Args:
        iterator_or_loader: A ``ringloader.DataLoader``, or the iterator that ``iter`` returned for it. After
            ``ringloader.install``, also any torch loader. A loader whose class makes its iterators itself has
            the path ``torch``.

    Raises:
        ValueError: If the loader was not iterated yet, or is not one of ringloader's.
    """
    found = notes.of_or_behind(iterator_or_loader)
    if found is not None:
        return PathReport(found.path, found.reason, found.counters())
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

    Useful if a framework makes the loaders. The list keeps no loader, iterator or dataset alive. It includes
    loaders of the path ``"torch"``. After ``ringloader.install``, it includes loaders of any class, except
    those whose class makes its iterators without torch's method. For such a loader, ``ringloader.report`` has
    the reason.

    The 1,000 newest loaders are remembered.
    """
    return [report_of(one) for one in notes.all_loaders()]


def report_of(one: notes.LoaderNotes) -> LoaderReport:
    """Returns the report of one loader."""
    loader, times = one.loader(), one.more
    note = notes.of(loader) if times is None else times.note
    batches, waited = one.batches, one.waited
    for iterator in one.alive():
        more, longer = iterator._noted.unsettled(iterator)
        batches += more
        waited = waited if longer is None else (waited or 0.0) + longer
    return LoaderReport(
        path=one.path,
        reason=one.reason,
        counters={} if note is None else note.counters(),
        loader=one.name,
        is_alive=loader is not None,
        batches=None if one.uncounted else batches,
        waited=times.waited if waited is None and times is not None else waited,
        starting=None if times is None else times.starting,
        seconds=None if times is None else times.seconds,
        used_at=None if times is None else times.used_at,
        dataset=None if times is None else times.dataset,
    )


def lines_at_exit() -> list[str]:
    """Returns the lines of the report at exit."""
    loaders = [one for one in notes.all_loaders() if one.more is not None and not one.more.is_workers]
    return lines((report_of(one), one.more.note.more.get("recording")) for one in loaders)


at_exit.lines = lines_at_exit


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
    batches, waited, starting, seconds = (
        None if None in parts else sum(parts) for parts in zip(*figures, strict=True)
    )
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
