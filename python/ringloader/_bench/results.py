"""The figures of a bench: a row for each configuration, ratios, and the number of workers to recommend."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from ringloader._bench.configuration import Configuration, in_words
from ringloader._bench.measure import Measurement

# Rates this near to the best one, or to that of the training step, are as good.
NEAR = 0.95


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
        figures = ("batches_per_second", "first_batch_seconds", "main_cpu_us", "memory_mb")
        return dataclasses.asdict(self.configuration) | {name: getattr(self, name) for name in figures}


# Each configuration's measurements, by the number of the round.
Measurements = dict[Configuration, dict[int, Measurement]]


def rows(measured: Measurements) -> list[Row]:
    """Returns a row for each configuration that was measured. A ratio is taken inside a round first."""
    return [_row(configuration, measured) for configuration, rounds in measured.items() if rounds]


def _row(configuration: Configuration, measured: Measurements) -> Row:
    rounds = measured[configuration]
    torchs = measured.get(Configuration("torch", configuration.num_workers), {})
    ratios = [
        rounds[number].batches_per_second / torchs[number].batches_per_second
        for number in rounds
        if number in torchs
    ]
    memory = [one.memory for one in rounds.values() if one.memory is not None]
    return Row(
        configuration,
        batches_per_second=statistics.median(one.batches_per_second for one in rounds.values()),
        first_batch_seconds=statistics.median(one.first_batch for one in rounds.values()),
        main_cpu_us=1e6 * statistics.median(one.main_cpu for one in rounds.values()),
        memory_mb=statistics.median(memory) / 1e6 if memory else None,
        ratio=statistics.median(ratios) if ratios else None,
        step=statistics.median(one.step for one in rounds.values()),
    )


def best(rows: list[Row], loader: str = "ringloader") -> Row | None:
    """Returns the fastest row of a loader; None if it has none."""
    own = [row for row in rows if row.configuration.loader == loader]
    return max(own, key=lambda row: row.batches_per_second, default=None)


def recommended(rows: list[Row]) -> tuple[Row, str] | None:
    """Returns the row with the fewest workers that are enough, and why, for ringloader's loader."""
    fastest = best(rows)
    if fastest is None:
        return None
    own = [row for row in rows if row.configuration.loader == "ringloader"]
    own.sort(key=lambda row: row.configuration.num_workers)
    for row in own:
        if row.step and row.batches_per_second * row.step >= NEAR:
            return row, f"the fewest workers that hide behind the step, which took {row.step * 1e3:.1f} ms"
    found = next(row for row in own if row.batches_per_second >= NEAR * fastest.batches_per_second)
    without = "nothing hides behind the step; " if found.step else ""
    if found is fastest:
        return found, f"{without}the best rate"
    share = found.batches_per_second / fastest.batches_per_second
    return found, (
        f"{without}the fewest workers within 5 % of the best rate: {share:.0%} of that with "
        f"{in_words(fastest.configuration.arguments)}"
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
