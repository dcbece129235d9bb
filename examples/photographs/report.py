"""What was measured, as tables and as a plot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from training import Epoch

SHORT = {"tensor-1kb": "1 KB", "tensors-40x1kb": "40 x 1 KB", "collated-10mb": "10 MB"}
COLOURS = {"torch": "#b0543c", "ringloader": "#2f6f9f"}


def _total(run: list[Epoch], key: str) -> float:
    return sum(float(getattr(epoch, key)) for epoch in run)


def _per_batch_ms(run: list[Epoch], key: str) -> float:
    return _total(run, key) / _total(run, "batches") * 1e3


def _loader_cpu_ms(run: list[Epoch]) -> float:
    return _per_batch_ms(run, "main_cpu_seconds") - _per_batch_ms(run, "step_cpu_seconds")


def epoch_line(number: int, epochs: dict[str, Epoch]) -> str:
    """One epoch of every run, with the losses in full."""
    parts = [f"{kind} loss {epoch.loss!r}, {epoch.seconds:.1f} s" for kind, epoch in epochs.items()]
    same = len({epoch.loss.hex() for epoch in epochs.values()}) == 1
    return f"epoch {number + 1}: " + "; ".join(parts) + ("; equal" if same else "; DIFFERENT")


def training_table(runs: dict[str, list[Epoch]]) -> str:
    """Both runs side by side."""
    kinds = list(runs)
    rows: list[tuple[str, Callable[[list[Epoch]], str]]] = [
        ("loss of the last epoch", lambda run: f"{run[-1].loss!r}"),
        ("accuracy on held-out crops", lambda run: f"{run[-1].accuracy:.1%}"),
        ("batches per second", lambda run: f"{_total(run, 'batches') / _total(run, 'seconds'):.2f}"),
        (
            "waiting for data (in iter and next), ms per batch",
            lambda run: f"{_per_batch_ms(run, 'waiting_seconds'):.2f}",
        ),
        ("main process CPU, ms per batch", lambda run: f"{_per_batch_ms(run, 'main_cpu_seconds'):.2f}"),
        ("  of which outside the training step", lambda run: f"{_loader_cpu_ms(run):.2f}"),
        (
            "workers' CPU with start and end, ms per batch",
            lambda run: f"{_per_batch_ms(run, 'worker_cpu_seconds'):.2f}",
        ),
        ("path", lambda run: run[-1].path),
    ]
    lines = [f"{'':52}" + "".join(f"{kind:>22}" for kind in kinds)]
    lines += [f"{title:52}" + "".join(f"{cell(runs[kind]):>22}" for kind in kinds) for title, cell in rows]
    return "\n".join(lines)


def loader_table(rows: list[dict[str, Any]]) -> str:
    """The loader-bound rows, ringloader against torch."""
    lines = [f"{'':36}{'torch, µs':>12}{'ringloader, µs':>16}{'ratio':>8}{'range':>16}{'main CPU ratio':>16}"]
    by_workload = _pairs(rows)
    for theirs, ours in by_workload:
        low, high = ours["ratio_range"]
        lines.append(
            f"{ours['text']:36}{theirs['us_per_batch']:>12,.1f}{ours['us_per_batch']:>16,.1f}{ours['ratio']:>8.1f}"
            f"{f'{low:.1f} to {high:.1f}':>16}{ours['main_cpu_ratio']:>16.1f}"
        )
    return "\n".join(lines) + "\n"


def _pairs(rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    theirs = {row["workload"]: row for row in rows if row["loader"] == "torch"}
    return [(theirs[row["workload"]], row) for row in rows if row["loader"] == "ringloader"]


def _bars(axes: Axes, values: dict[str, float], title: str, unit: str) -> None:
    bars = axes.bar(list(values), list(values.values()), color=[COLOURS[kind] for kind in values], width=0.6)
    axes.bar_label(bars, labels=[f"{value:,.1f}" for value in values.values()], padding=2)
    axes.set_title(title, fontsize=10)
    axes.set_ylabel(unit)
    axes.set_ylim(0, max(values.values()) * 1.18 or 1)


def plot(runs: dict[str, list[Epoch]], rows: list[dict[str, Any]], path: Path) -> Path:
    """Writes a PNG: training above, loader-bound batches below."""
    pairs = _pairs(rows)
    figure, grid = plt.subplots(2, 4, figsize=(15, 7.5), layout="constrained")
    figure.suptitle("Training on photographs (above) and batches that only the loader works on (below)")
    _losses(grid[0][0], runs)
    rate = {kind: _total(run, "batches") / _total(run, "seconds") for kind, run in runs.items()}
    _bars(grid[0][1], rate, "Training rate", "batches per second")
    waiting = {kind: _per_batch_ms(run, "waiting_seconds") for kind, run in runs.items()}
    _bars(grid[0][2], waiting, "Waiting for data", "ms per batch")
    outside = {kind: _loader_cpu_ms(run) for kind, run in runs.items()}
    _bars(grid[0][3], outside, "Main process CPU outside the step", "ms per batch")
    for axes, (theirs, ours) in zip(grid[1], pairs, strict=False):
        values = {"torch": theirs["us_per_batch"], "ringloader": ours["us_per_batch"]}
        _bars(axes, values, f"{ours['text']}\n{ours['ratio']:.1f} times torch's rate", "µs per batch")
    axes = grid[1][3]
    cpu = [ours["main_cpu_ratio"] for _, ours in pairs]
    bars = axes.barh(
        [SHORT[ours["workload"]] for _, ours in pairs], cpu, color=COLOURS["ringloader"], height=0.6
    )
    axes.bar_label(bars, labels=[f"{value:.1f}" for value in cpu], padding=2)
    axes.set_xlim(0, max(cpu) * 1.2)
    axes.invert_yaxis()
    axes.set_title("How much less CPU the main process needs", fontsize=10)
    axes.set_xlabel("torch's CPU per batch / ringloader's")
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _losses(axes: Axes, runs: dict[str, list[Epoch]]) -> None:
    widths = {"torch": 6.0, "ringloader": 1.8}
    for kind, run in runs.items():
        losses = [epoch.loss for epoch in run]
        axes.plot(range(1, len(run) + 1), losses, label=kind, color=COLOURS[kind], linewidth=widths[kind])
    axes.set_title("Loss (equal to the last bit: one line on the other)", fontsize=10)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("mean cross-entropy")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
