"""Reports of all loaders of the process."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterable
from typing import Any, cast

from ringloader._report import report, tally
from ringloader._report.report import PathName, PathReport


@dataclasses.dataclass(frozen=True)
class LoaderReport(PathReport):
    """The report of one loader of the process. Its text is one line.

    Attributes:
        path: The path of its last iterator, as in a ``PathReport``.
        reason: The reason, in a sentence.
        counters: Counts of the epoch that runs or ran last; empty once the loader is gone.
        loader: The name of the loader's class.
        is_alive: False once the loader is gone.
        batches: Batches that ``next`` has returned, in all epochs. None where nobody counts: torch's own
            iterators, unless a report at exit was asked for.
        waited: Seconds that the program has waited for them. On the paths ``"native"`` and ``"threads"``, the
            time in which workers had no batch ready. On the other two paths, the time in ``next``, which is
            measured only if a report at exit was asked for; else None.
        seconds: Seconds from ``iter`` to the last batch, over all epochs. None unless a report at exit was
            asked for.
        made_at: File and line of the program that made the loader. None unless a report at exit was asked
            for, and where it cannot be told.
    """

    loader: str
    is_alive: bool
    batches: int | None
    waited: float | None
    seconds: float | None
    made_at: str | None

    def __str__(self) -> str:
        return line([self])


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
    found = None if loader is None else report.noted(loader)
    counters = {} if found is None else dict(found.counters())
    batches, waited, seconds = one.figures()
    return LoaderReport(
        path=cast("PathName", one.path),
        reason=one.reason,
        counters=counters,
        loader=one.name,
        is_alive=loader is not None,
        batches=batches,
        waited=waited,
        seconds=seconds,
        made_at=one.made_at,
    )


def lines(found: Iterable[tuple[LoaderReport, Any]]) -> list[str]:
    """Returns a line for each loader. Loaders of the same class, place and path share one.

    Args:
        found: Reports, each with the loader's ``Recording``, or None. The figures of the last one of those
            that share a line follow it.
    """
    groups: dict[tuple[object, ...], list[tuple[LoaderReport, Any]]] = {}
    for one, recording in found:
        groups.setdefault((one.made_at, one.loader, one.path, one.reason), []).append((one, recording))
    made: list[str] = []
    for group in groups.values():
        made.append(line([one for one, _ in group]))
        last, recording = group[-1]
        figures = None if recording is None else recording.figures(last.path)
        if figures is not None:
            made += [f"  {each}" for each in f"the last epoch: {figures}".splitlines()]
    return made


def line(group: list[LoaderReport]) -> str:
    """Returns the line of loaders of one class, place and path."""
    one = group[0]
    figures = ((each.batches, each.waited, each.seconds) for each in group)
    batches, waited, seconds = functools.reduce(tally.plus, figures, tally.NOTHING)
    parts = [one.path if one.path != "torch" else f"torch, because {one.reason}"]
    if batches is None:
        parts.append("batches not counted")
    else:
        parts.append(f"{batches:,} batch{'es' * (batches != 1)}")
        if batches and seconds:
            parts[-1] += f" in {seconds:.3f} s ({batches / seconds:,.1f} a second)"
    if waited is not None:
        parts.append(f"waited {waited:.3f} s")
    where = "" if one.made_at is None else f"{_short(one.made_at)}: "
    several = "" if len(group) == 1 else f" ({len(group):,} loaders)"
    return f"{where}{one.loader}{several}: {'; '.join(parts)}"


def _short(place: str) -> str:
    """Returns a place without the current folder."""
    try:
        return place.removeprefix(os.path.join(os.getcwd(), ""))  # noqa: PTH109, PTH118
    except OSError:
        return place
