"""Rows out of rounds, and the rows as Markdown and JSON."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from .loaders import BASELINE
from .workloads import NUM_WORKERS, PREFETCH_FACTOR


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


def ratios(row: Row, baseline: Row | None, key: str) -> list[float]:
    """How many times the baseline's time is this row's, round by round: the two ran one after the other."""
    if baseline is None:
        return []
    pairs = zip(baseline.per_batch_us(key), row.per_batch_us(key), strict=False)
    return [theirs / ours for theirs, ours in pairs if ours > 0]


def summary(row: Row, baseline: Row | None) -> dict[str, Any]:
    """The medians of a row."""
    out = {key: value for key, value in asdict(row).items() if key != "rounds"}
    if row.rounds and row.error is None:
        ratio = ratios(row, baseline, "seconds")
        cpu_ratio = ratios(row, baseline, "main_cpu_seconds")
        out |= {
            "us_per_batch": median(row.per_batch_us("seconds")),
            "main_cpu_us_per_batch": median(row.per_batch_us("main_cpu_seconds")),
            "worker_cpu_us_per_batch": median(row.per_batch_us("worker_cpu_seconds")),
            "memory_mb": median(run["memory_bytes"] for run in row.rounds) / 1e6,
            "ratio": median(ratio) if ratio else None,
            "ratio_range": [min(ratio), max(ratio)] if ratio else None,
            "main_cpu_ratio": median(cpu_ratio) if cpu_ratio else None,
            "path": row.rounds[-1]["path"],
            "counters": row.rounds[-1]["counters"],
        }
    return out


def machine() -> dict[str, Any]:
    """What the figures depend on."""
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
        "num_workers": NUM_WORKERS,
        "prefetch_factor": PREFETCH_FACTOR,
    }


def markdown(summaries: list[dict[str, Any]], where: dict[str, Any], method: str) -> str:
    """The table, with the machine above it."""
    head = (
        f"{where['cores']} cores ({where['cpu']}, load average {where['load_average']:.1f} at the start), "
        f"Linux {where['kernel']}, Python {where['python']}, "
        f"torch {where['torch']}; {where['num_workers']} workers, "
        f"prefetch_factor {where['prefetch_factor']}; "
        f"{method}."
    )
    lines = [
        head,
        "",
        "| workload | loader | µs per batch | times torch's rate (range) | main CPU, µs per batch "
        "| times less main CPU | workers' CPU, µs per batch | memory, MB | batches equal torch's | path |",
        "|---|---|--:|--:|--:|--:|--:|--:|---|---|",
    ]
    for row in summaries:
        cells = [row["text"] if row["loader"] == BASELINE else "", row["loader"]]
        if "us_per_batch" in row:
            same = row["loader"] == BASELINE or row["ratio"] is None
            low, high = row["ratio_range"] or (0.0, 0.0)
            cells += [
                _figure(row["us_per_batch"]),
                "" if same else f"**{_figure(row['ratio'])}** ({_figure(low)} to {_figure(high)})",
                _figure(row["main_cpu_us_per_batch"]),
                "" if same or row["main_cpu_ratio"] is None else _figure(row["main_cpu_ratio"]),
                _figure(row["worker_cpu_us_per_batch"]),
                f"{row['memory_mb']:.0f}",
                row["content"],
                row["path"],
            ]
        else:
            cells += ["", "", "", "", "", "", row["content"], f"failed: {row['error']}".replace("|", "/")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _figure(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
