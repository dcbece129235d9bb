"""The ratios as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .ideal import IDEAL, IDEAL_KEPT
from .loaders import OURS
from .report import figure, grouped

# Our colour stands out; the others keep their colour whichever of them were run.
COLOURS = {
    OURS: "#1f6fb4",
    "ringloader-without-workers": "#8fb8dc",
    "ringloader-threads": "#4fa3a5",
    "spdl": "#b58ac4",
    "torchdata-nodes": "#e08a3c",
    "dataloader-rs": "#c65b6c",
    "torchdata-stateful": "#a9a9a9",
    "torch-again": "#d5d5d5",
}


IDEAL_STYLES = {IDEAL: "solid", IDEAL_KEPT: "dotted"}


def draw(summaries: list[dict[str, Any]], path: Path) -> None:
    """Horizontal bars for each workload: rates over torch's better one, and marks for the ideals."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    groups = grouped(summaries)
    loaders = [name for name in COLOURS if any(rows.get(name, {}).get("ratio") for rows in groups.values())]
    height = 0.8 / max(len(loaders), 1)
    chart, axes = pyplot.subplots(figsize=(9, 1.2 + len(groups) * (0.16 + 0.14 * len(loaders))))
    for place, rows in enumerate(groups.values()):
        for number, name in enumerate(loaders):
            ratio = rows.get(name, {}).get("ratio")
            if ratio is None:
                continue
            middle = place + (number - (len(loaders) - 1) / 2) * height
            label = name if axes.get_legend_handles_labels()[1].count(name) == 0 else None
            # From torch's rate on: a bar to the left is a loader that is slower.
            axes.barh(middle, ratio - 1, height * 0.9, left=1, color=COLOURS[name], label=label)
            if name == OURS:
                side = "left" if ratio >= 1 else "right"
                axes.annotate(
                    figure(ratio),
                    (ratio, middle),
                    (4 if ratio >= 1 else -4, 0),
                    textcoords="offset points",
                    ha=side,
                    va="center",
                    fontsize=8,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
                )
        for name, style in IDEAL_STYLES.items():
            ratio = rows.get(name, {}).get("ratio")
            if ratio is not None:
                label = name if axes.get_legend_handles_labels()[1].count(name) == 0 else None
                ends = [place - 0.45, place + 0.45]
                axes.plot([ratio] * 2, ends, color="black", linestyle=style, linewidth=1.5, label=label)
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(groups)), [next(iter(rows.values()))["text"] for rows in groups.values()])
    axes.set_ylim(len(groups) - 0.4, -0.6)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("times the better rate of torch's loader, with workers or without (log scale)")
    axes.grid(axis="x", which="major", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=4, frameon=False, fontsize=8)
    chart.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(chart)
