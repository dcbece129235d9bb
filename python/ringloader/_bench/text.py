"""The results of a bench as text."""

from __future__ import annotations

from ringloader._bench.configuration import PROCESS
from ringloader._bench.results import Row

_HEAD = ("loader", "workers", "batches/s", "ratio", "first batch", "main CPU/batch", "memory")


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
        _time(row.first_batch_seconds),
        _time(row.main_cpu_us / 1e6),
        "-" if row.memory_mb is None else f"{row.memory_mb:,.0f} MB",
    )


def rate(batches_per_second: float) -> str:
    """Returns a rate with three digits or more."""
    return f"{batches_per_second:,.0f}" if batches_per_second >= 100 else f"{batches_per_second:.3g}"


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.1f} {unit}"
    return f"{seconds * 1e6:.0f} µs"
