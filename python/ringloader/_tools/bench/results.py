"""The figures of a bench, the number of workers to recommend, and both as a table and JSON."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable
from typing import Any

from ringloader._features.stats.epoch import in_words
from ringloader._tools.bench.arguments import PROCESS, Configuration
from ringloader._tools.bench.measure import Measurement

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


def rows(measured: Measurements) -> list[Row]:
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


def best(rows: list[Row], loader: str = "ringloader") -> Row | None:
    """Returns the fastest row of a loader with a number of workers; None if it has none."""
    own = _own(rows, loader)
    return max(own, key=lambda row: row.batches_per_second, default=None)


def _own(rows: list[Row], loader: str) -> list[Row]:
    return [row for row in rows if row.configuration.loader == loader and not row.configuration.is_auto]


def recommended(rows: list[Row]) -> tuple[Row, str] | None:
    """Returns the row with the fewest workers that are enough, and why, for ringloader's loader."""
    fastest = best(rows)
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
    return (
        configuration.loader,
        f"{configuration.num_workers}{kind}",
        rate(row.batches_per_second),
        "-" if row.ratio is None or configuration.loader == "torch" else f"{row.ratio:.2f}",
        in_words(row.first_batch_seconds),
        in_words(row.main_cpu_us / 1e6),
        "-" if row.memory_mb is None else f"{row.memory_mb:,.0f} MB",
    )


def rate(batches_per_second: float) -> str:
    """Returns a rate with three digits or more."""
    return f"{batches_per_second:,.0f}" if batches_per_second >= 100 else f"{batches_per_second:.3g}"
