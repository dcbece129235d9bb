"""A picture of a bench: the rate over the number of workers. Needs matplotlib."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

from ringloader._bench.configuration import PROCESS
from ringloader._bench.results import Row


def check(path: str) -> None:
    """Raises a ``ValueError`` if no picture can be drawn there, before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("a plot needs matplotlib: pip install 'ringloader[bench]', or leave --plot out")
    formats = importlib.import_module("matplotlib.backend_bases").FigureCanvasBase.filetypes
    if Path(path).suffix.lstrip(".").lower() not in formats:
        raise ValueError(f"{path!r} has no format of a picture: its name must end in .png, .svg or .pdf")


def draw(path: str, rows: list[Row], title: str) -> None:
    """Draws the rate over the number of workers, a line for each loader and kind of workers."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    # Without workers there is one row for all kinds of them.
    with_workers = [row.configuration for row in rows if row.configuration.num_workers]
    kinds = dict.fromkeys(
        (one.loader, one.worker_method) for one in with_workers or [row.configuration for row in rows]
    )
    for loader, method in kinds:
        own = [
            row
            for row in sorted(rows, key=lambda row: row.configuration.num_workers)
            if row.configuration.loader == loader
            and (row.configuration.worker_method == method or not row.configuration.num_workers)
        ]
        axes.plot(
            [row.configuration.num_workers for row in own],
            [row.batches_per_second for row in own],
            marker="o",
            label=loader if method == PROCESS else f"{loader}, threads",
        )
    axes.set(xlabel="workers", ylabel="batches a second", title=title)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(importlib.import_module("matplotlib.ticker").MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
