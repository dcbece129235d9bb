"""``python -m ringloader bench``: compares batches, measures in rounds, and prints the results."""

from __future__ import annotations

import dataclasses
import json
import signal
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ringloader._native as _native
from ringloader._features.stats.epoch import in_words
from ringloader._log import complain, write
from ringloader._tools.bench import child, measure
from ringloader._tools.bench.arguments import PROCESS, Arguments, BenchError, Configuration, RunError
from ringloader._tools.bench.measure import Measurement

_NAME = "python -m ringloader bench"


def run(given: Arguments) -> int:
    """Runs the command, and returns its exit status."""
    if not _native.SUPPORTED:
        complain(f"{_NAME}: error: bench compares torch's loader with ringloader's, which needs Linux\n")
        return 2
    # SIGTERM, which `timeout` sends, ends the processes as Ctrl-C does.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _Bench(given).run()
    except BenchError as error:
        complain(f"{error.users}{_NAME}: error: {error.text}\n")
        return 2
    except OSError as error:
        complain(f"{_NAME}: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        complain(f"{_NAME}: interrupted\n")
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


class _Bench:
    def __init__(self, given: Arguments) -> None:
        self._given = given
        self._measured: Measurements = {one: {} for one in given.configurations}
        # The first error of each configuration: it is not tried again.
        self._failed: dict[Configuration, RunError] = {}

    def run(self) -> int:
        given = self._given
        same, comparison = self._compare()
        for number in range(given.rounds):
            # The order turns, so that none always follows the same one.
            first = number % len(given.configurations)
            for configuration in given.configurations[first:] + given.configurations[:first]:
                found = self._call(configuration, measure.measure, given.seconds, given.step)
                if found is not None:
                    self._measured[configuration][number] = found
        rows = rows_of(self._measured)
        best, recommended = fastest_of(rows), recommended_of(rows)
        if best is None or recommended is None:
            raise self._first_failure()
        verdict = self._call(best.configuration, measure.verdict, given.seconds, given.step)
        row, reason = recommended
        lines = [table(rows), "", comparison, *self._notes(rows)]
        if verdict is not None:
            if "num_workers" in verdict["change"]:
                # The number that was measured to be enough is recommended below, and no other one.
                verdict |= {"text": f"{verdict['text'].partition('. ')[0]}.", "gain": None, "change": {}}
            lines.append(f"Verdict with {best.configuration.in_words}: {verdict['text']}")
        lines.append(f"Recommended: {row.configuration.in_words}: {reason}.")
        write("\n".join([*lines, ""]))
        if given.json is not None:
            data = to_dict(rows, same, row.configuration, verdict)
            Path(given.json).write_text(f"{json.dumps(data, indent=2)}\n")
        return int(same is False)

    def _call(self, configuration: Configuration, function: Callable[..., Any], *rest: Any) -> Any:
        """Calls a function with the target and a configuration in a process; None if that fails."""
        if configuration in self._failed:
            return None
        if sys.stderr is not None and sys.stderr.isatty():
            complain(f"running {configuration}: {function.__name__}\n")
        try:
            return child.call(function, self._given.target, configuration, *rest)
        except RunError as error:
            self._failed[configuration] = error
            return None

    def _compare(self) -> tuple[bool | None, str]:
        """Compares the batches of both loaders with the most workers; None where that says nothing."""
        ours = max(
            (one for one in self._given.configurations if one.loader == "ringloader" and not one.is_auto),
            key=lambda one: one.number,
        )
        torchs = Configuration("torch", ours.num_workers)
        where = f"with {ours.in_words}"
        theirs, mine = (self._call(one, measure.described) for one in (torchs, ours))
        if theirs is None or mine is None:
            return None, f"Batches: not compared {where}, because one of the loaders failed."
        count = sum(1 for one, other in zip(theirs, mine, strict=False) if one and other)
        different = measure.difference(theirs, mine)
        if different is None:
            return True, f"Batches: the first {count} of both loaders are equal, {where}."
        again = self._call(torchs, measure.described)
        unlike = None if again is None else measure.difference(theirs, again)
        if unlike is not None:
            return None, (
                f"Batches: not comparable {where}: two runs of torch's own loader differ, at {unlike[0]}. "
                "Seed all that draws."
            )
        place, expected, got = different
        return False, f"Batches: DIFFERENT {where}: at {place} torch has {expected}, ringloader {got}."

    def _notes(self, rows: list[Row]) -> list[str]:
        notes = [f"{configuration} failed: {error.text}" for configuration, error in self._failed.items()]
        for configuration, rounds in self._measured.items():
            if configuration.is_auto and rounds:
                numbers = ", ".join(str(one.num_workers) for one in rounds.values())
                notes.append(f"{configuration} had {numbers} workers at the end of its rounds.")
            reasons = {one.reason: None for one in rounds.values() if one.path == "torch"}
            notes += [f"{configuration} ran torch's own loader: {reason}" for reason in reasons]
        ours, theirs = fastest_of(rows), fastest_of(rows, "torch")
        if ours and theirs and theirs.batches_per_second * NEAR > ours.batches_per_second:
            notes.append(
                f"torch's own loader was faster: {rate(theirs.batches_per_second)} batches a second "
                f"with {theirs.configuration.in_words}."
            )
        return notes

    def _first_failure(self) -> RunError:
        configuration, error = next(
            (one, error) for one, error in self._failed.items() if one.loader == "ringloader"
        )
        return RunError(f"{configuration} failed: {error.text}", error.users)


# Rates this near to the best one, or to that of the training step, are as good.
NEAR = 0.95
# Figures of a row that a measurement has too.
_FIGURES = ("batches_per_second", "first_batch_seconds", "main_cpu_us", "memory_mb")

_HEAD = ("loader", "workers", "batches/s", "ratio", "first batch", "main CPU/batch", "memory")


@dataclasses.dataclass(frozen=True)
class Row:
    """Medians of the rounds of one configuration.

    Attributes:
        configuration: The configuration.
        batches_per_second: The rate after the first batch.
        first_batch_seconds: From ``iter`` to the first batch.
        main_cpu_us: The main process's processor time for a batch, in microseconds.
        memory_mb: The memory of main process and workers, in megabytes, or None.
        ratio: The rate over that of torch's loader with as many workers, or None.
        step: The training step that was measured, in seconds; 0 without one.
    """

    configuration: Configuration
    batches_per_second: float
    first_batch_seconds: float
    main_cpu_us: float
    memory_mb: float | None
    ratio: float | None
    step: float

    def to_dict(self) -> dict[str, Any]:
        """Returns the row as JSON has it."""
        return dataclasses.asdict(self.configuration) | {name: getattr(self, name) for name in _FIGURES}


# Each configuration's measurements, by the number of the round.
Measurements = dict[Configuration, dict[int, Measurement]]


def rows_of(measured: Measurements) -> list[Row]:
    """Returns a row for each configuration that was measured. A ratio is taken inside a round first."""
    found = []
    for configuration, rounds in measured.items():
        torchs = measured.get(Configuration("torch", configuration.num_workers), {})
        ratios = [
            one.batches_per_second / torchs[number].batches_per_second
            for number, one in rounds.items()
            if number in torchs
        ]
        if rounds:
            medians = {
                name: _median(getattr(one, name) for one in rounds.values()) for name in (*_FIGURES, "step")
            }
            found.append(Row(configuration, ratio=_median(ratios), **medians))
    return found


def _median(figures: Iterable[float | None]) -> Any:
    """Returns the median of the known figures; None if none is known."""
    known = [figure for figure in figures if figure is not None]
    return statistics.median(known) if known else None


def fastest_of(rows: list[Row], loader: str = "ringloader") -> Row | None:
    """Returns the fastest row of a loader with a number of workers; None if it has none."""
    own = _own(rows, loader)
    return max(own, key=lambda row: row.batches_per_second, default=None)


def _own(rows: list[Row], loader: str) -> list[Row]:
    return [row for row in rows if row.configuration.loader == loader and not row.configuration.is_auto]


def recommended_of(rows: list[Row]) -> tuple[Row, str] | None:
    """Returns the row with the fewest workers that are enough, and why, for ringloader's loader."""
    fastest = fastest_of(rows)
    if fastest is None:
        return None
    own = sorted(_own(rows, "ringloader"), key=lambda row: row.configuration.number)
    for row in own:
        if row.step and row.batches_per_second * row.step >= NEAR:
            return row, f"the fewest workers whose work the step hides; it took {row.step * 1e3:.1f} ms"
    found = next(row for row in own if row.batches_per_second >= NEAR * fastest.batches_per_second)
    without = f"the step never fills {NEAR:.0%} of the time; " if found.step else ""
    if found is fastest:
        return found, f"{without}the best rate"
    share = found.batches_per_second / fastest.batches_per_second
    return found, (
        f"{without}the fewest workers within 5 % of the best rate: {share:.0%} of that with "
        f"{fastest.configuration.in_words}"
    )


def to_dict(
    rows: list[Row], same_batches: bool | None, recommended: Configuration, verdict: dict[str, Any] | None
) -> dict[str, Any]:
    """Returns the results as JSON has them."""
    return {
        "rows": [row.to_dict() for row in rows],
        "same_batches": same_batches,
        "recommended": recommended.arguments,
        "verdict": verdict,
    }


def table(rows: list[Row]) -> str:
    """Returns a table with a line for each row. The ratio is to torch's loader with as many workers."""
    cells = [_HEAD, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if number == 0 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    )


def _cells(row: Row) -> tuple[str, ...]:
    configuration = row.configuration
    kind = "" if configuration.worker_method == PROCESS else " threads"
    most = configuration.worker_concurrency
    at_once = "" if most is None else f", {most} at once"
    return (
        configuration.loader,
        f"{configuration.num_workers}{kind}{at_once}",
        rate(row.batches_per_second),
        "-" if row.ratio is None or configuration.loader == "torch" else f"{row.ratio:.2f}",
        in_words(row.first_batch_seconds),
        in_words(row.main_cpu_us / 1e6),
        "-" if row.memory_mb is None else f"{row.memory_mb:,.0f} MB",
    )


def rate(batches_per_second: float) -> str:
    """Returns a rate with three digits or more."""
    return f"{batches_per_second:,.0f}" if batches_per_second >= 100 else f"{batches_per_second:.3g}"
