"""Rows out of rounds, and the rows as Markdown tables: a line for each workload, and one for each row."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from .ideal import IDEAL, IDEAL_KEPT, IDEALS
from .loaders import BASELINE, BASELINE_ALONE, LOADERS, OURS, OURS_ALONE


@dataclass
class Row:
    """One loader on one workload: its rounds, and whether its batches were the baseline's."""

    workload: str
    text: str
    loader: str
    content: str = "not checked"
    error: str | None = None
    rounds: list[dict[str, Any]] = field(default_factory=list)

    def per_batch_us(self, key: str) -> list[float]:
        """Microseconds per batch of each round for one of the times of a ``Timing``."""
        return [run[key] / run["batches"] * 1e6 for run in self.rounds]


def ratios(row: Row, reference: Row | None, key: str) -> list[float]:
    """Returns how many times the reference's time is this row's, in the rounds that both had."""
    if reference is None:
        return []
    of_round = {run["round"]: time for run, time in zip(row.rounds, row.per_batch_us(key), strict=True)}
    times = zip(reference.rounds, reference.per_batch_us(key), strict=True)
    return [time / of_round[run["round"]] for run, time in times if of_round.get(run["round"], 0) > 0]


def better(rows: Sequence[Row | None]) -> Row | None:
    """The row with the least median time of those that were measured: torch's rate, where it has two."""
    measured = [row for row in rows if row is not None and row.rounds and row.error is None]
    return min(measured, key=lambda row: median(row.per_batch_us("seconds")), default=None)


def summary(
    row: Row, baseline: Row | None, ideals: Sequence[Row | None], fastest: Row | None = None
) -> dict[str, Any]:
    """The medians of a row.

    Args:
        row: what was measured.
        baseline: the same workload's row of torch.
        ideals: its rows of ``IDEALS``, in that order; none where there is no efficiency.
        fastest: the row that rates are compared with, if it is another than ``baseline``.
    """
    out = {key: value for key, value in asdict(row).items() if key != "rounds"}
    if row.rounds and row.error is None:
        ratio = ratios(row, fastest or baseline, "seconds")
        efficiencies = [ratios(row, ideal, "seconds") for ideal in ideals]
        cpu_ratio = ratios(row, baseline, "main_cpu_seconds")
        out |= {
            "us_per_batch": median(row.per_batch_us("seconds")),
            "main_cpu_us_per_batch": median(row.per_batch_us("main_cpu_seconds")),
            "worker_cpu_us_per_batch": median(row.per_batch_us("worker_cpu_seconds")),
            "tensors": row.rounds[-1]["tensors"],
            "memory_mb": median(run["memory_bytes"] for run in row.rounds) / 1e6,
            "resting_mb": max(
                (run["resting_bytes"] / 1e6 for run in row.rounds if run["resting_bytes"] is not None),
                default=None,
            ),
            "ratio": median(ratio) if ratio else None,
            "ratio_range": [min(ratio), max(ratio)] if ratio else None,
            "efficiency": [median(efficiency) if efficiency else None for efficiency in efficiencies],
            "main_cpu_ratio": median(cpu_ratio) if cpu_ratio else None,
            "path": row.rounds[-1]["path"],
            "counters": row.rounds[-1]["counters"],
        }
    return out


def machine() -> dict[str, Any]:
    """Returns what the figures depend on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": cpu,
        "kernel": platform.release(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def head(where: dict[str, Any], how: str) -> str:
    """The machine and the method, in a sentence."""
    return (
        f"{where['cores']} cores ({where['cpu']}, load average {where['load_average']:.1f} at the start), "
        f"Linux {where['kernel']}, Python {where['python']}, torch {where['torch']}; {how}."
    )


def by_workload(summaries: list[dict[str, Any]]) -> str:
    """Two tables with a line for each workload: all loaders' rates side by side, and what ours takes."""
    groups = grouped(summaries)
    own = (OURS_ALONE, OURS)
    others = [name for name in LOADERS if name not in own and any(name in rows for rows in groups.values())]
    rates = [
        f"| workload | {OURS}'s better rate over torch's better rate (range) "
        "| torch, batches a second: without workers, with workers "
        f"| {OURS}, times torch's better rate: without workers, with workers "
        f"| {OURS} with workers, times torch with workers | efficiency | efficiency, freed memory kept | "
        + " | ".join(f"{name}: times torch's better rate, efficiency" for name in others)
        + f" | {IDEAL}, {IDEAL_KEPT}: times torch's better rate |",
        "|---|--:|--:|--:|--:|--:|--:|" + "--:|" * len(others) + "--:|",
    ]
    costs = [
        f"| workload | tensors in a batch | main CPU, µs per batch: {BASELINE}, {OURS} "
        f"| memory, MB: {BASELINE}, {OURS} | memory at rest, MB: {BASELINE}, {OURS} |",
        "|---|--:|--:|--:|--:|",
    ]
    for rows in groups.values():
        text = str(next(iter(rows.values()))["text"])
        ours, torchs = rows.get(OURS, {}), rows.get(BASELINE, {})
        efficiency = ours.get("efficiency", [None] * len(IDEALS))
        ours_better = max((rows.get(name, {}) for name in own), key=lambda row: row.get("ratio") or 0)
        cells = [
            text,
            _ratio(ours_better),
            f"{_per_second(rows.get(BASELINE_ALONE, {}))}, {_per_second(torchs)}",
        ]
        cells.append(", ".join(figure(rows.get(name, {}).get("ratio")) or "none" for name in own))
        cells.append(_times(ours, torchs))
        cells += map(percent, efficiency)
        cells += [_rate(rows.get(name, {})) for name in others]
        cells.append(_pair(*(rows.get(name, {}) for name in IDEALS), "ratio", figure))
        rates.append("| " + " | ".join(cells) + " |")
        cells = [
            text,
            str(ours.get("tensors", "")),
            _pair(torchs, ours, "main_cpu_us_per_batch", figure),
            _pair(torchs, ours, "memory_mb", _whole),
            _pair(torchs, ours, "resting_mb", _whole),
        ]
        costs.append("| " + " | ".join(cells) + " |")
    return "\n".join([*rates, "", *costs]) + "\n"


def grouped(summaries: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """The rows by workload and loader, in their order."""
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for row in summaries:
        groups.setdefault(row["workload"], {})[row["loader"]] = row
    return groups


def by_row(summaries: list[dict[str, Any]]) -> str:
    """A line for each row, with all that was measured."""
    lines = [
        "| workload | loader | µs per batch | times torch's better rate (range) | efficiency "
        "| efficiency, freed memory kept | main CPU, µs per batch | times less main CPU "
        "| workers' CPU, µs per batch | memory, MB | memory at rest, MB | batches equal torch's | path |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|---|",
    ]
    for row in summaries:
        cells = [row["text"] if row["loader"] == BASELINE else "", row["loader"]]
        if "us_per_batch" in row:
            has_main = row["loader"] not in IDEALS
            cells += [
                figure(row["us_per_batch"]),
                _ratio(row),
                *map(percent, row["efficiency"] if has_main else [None] * len(IDEALS)),
                figure(row["main_cpu_us_per_batch"]) if has_main else "",
                "" if row["loader"] == BASELINE else figure(row["main_cpu_ratio"]),
                figure(row["worker_cpu_us_per_batch"]),
                _whole(row["memory_mb"]) if has_main else "",
                _whole(row["resting_mb"]),
                row["content"],
                row["path"],
            ]
        else:
            cells += [""] * 9 + [row["content"], f"failed: {row['error']}".replace("|", "/")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _ratio(row: dict[str, Any]) -> str:
    if row.get("ratio") is None:
        return ""
    return ratio_cell(row["ratio"], *row["ratio_range"])


def _times(ours: dict[str, Any], reference: dict[str, Any]) -> str:
    """Returns how many times the rate of ``reference`` ours is; nothing where one was not measured."""
    if "us_per_batch" not in ours or "us_per_batch" not in reference:
        return ""
    return figure(reference["us_per_batch"] / ours["us_per_batch"])


def _per_second(row: dict[str, Any]) -> str:
    return figure(1e6 / row["us_per_batch"]) if "us_per_batch" in row else "none"


def _rate(row: dict[str, Any]) -> str:
    """Ratio and efficiency of a loader that the table is not about."""
    if row.get("ratio") is None:
        return ""
    efficiency = percent(row["efficiency"][list(IDEALS).index(IDEAL)])
    return f"{figure(row['ratio'])}, {efficiency}" if efficiency else figure(row["ratio"])


def _pair(left: dict[str, Any], right: dict[str, Any], key: str, write: Callable[[float], str]) -> str:
    values = left.get(key), right.get(key)
    return f"{write(values[0])}, {write(values[1])}" if None not in values else ""


def _whole(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def write(out: Path, text: str, document: dict[str, Any]) -> None:
    """Puts a report beside the figures that it was made of: ``out`` with .md and .json appended."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".md").write_text(text)
    out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")


def percent(value: float | None) -> str:
    """Two significant digits or more; nothing for None."""
    if value is None:
        return ""
    return f"{value:.0%}" if value >= 0.1 else f"{value:.1%}"


def ratio_cell(middle: float, low: float, high: float) -> str:
    """Returns a ratio and its range, bold where the whole range lies on one side of 1."""
    text = figure(middle) if low <= 1 <= high else f"**{figure(middle)}**"
    return f"{text} ({figure(low)} to {figure(high)})"


def figure(value: float | None) -> str:
    """Three significant digits, without an exponent; nothing for None."""
    if value is None:
        return ""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
