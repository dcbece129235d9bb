"""The figures of an epoch as a table, and as a bar for each worker."""

from __future__ import annotations

import html as escaping
from typing import Any

_PARTS = {"dataset": "#4c78a8", "collate": "#f58518", "send": "#54a24b", "room": "#e45756", "idle": "#d9d9d9"}
_COLUMNS = ("batches", "idle", "dataset", "collate", "send", "room", "cpu")


# `stats` is an `EpochStats`, whose module uses this one.
def table(stats: Any) -> str:
    """Returns the figures as lines, with the verdict below."""
    main = ", ".join(f"{name} {seconds:.3f}" for name, seconds in stats.main.items())
    lines = [
        f"{stats.batches:,} batches in {stats.seconds:.3f} s (path {stats.path}, num_workers="
        f"{stats.num_workers}): startup {stats.startup:.3f}, waiting {stats.waiting:.3f}, caller "
        f"{stats.caller:.3f}",
        f"main process: {main}",
    ]
    if stats.workers:
        lines.append("worker" + "".join(f"{name:>9}" for name in _COLUMNS))
    for worker in stats.workers:
        times = "".join(f"{getattr(worker, name):9.3f}" for name in _COLUMNS[1:])
        lines.append(f"{worker.id:6}{worker.batches:9,}{times}")
    return "\n".join([*lines, f"{stats.verdict.kind}: {stats.verdict.text}"])


def html(stats: Any) -> str:
    """Returns a bar for each worker, and the verdict."""
    longest = max((sum(getattr(worker, name) for name in _PARTS) for worker in stats.workers), default=0.0)
    rows = []
    for worker in stats.workers:
        parts = [
            f'<div title="{name} {getattr(worker, name):.3f} s" style="background:{colour};'
            f'width:{getattr(worker, name) / (longest or 1.0):.2%}"></div>'
            for name, colour in _PARTS.items()
        ]
        rows.append(
            f'<div style="display:flex;height:1.2em;margin:2px 0"><span style="width:6em">worker {worker.id}'
            f'</span><div style="display:flex;flex:1">{"".join(parts)}</div></div>'
        )
    legend = " ".join(
        f'<span style="color:{colour}">&#9632;</span> {name}' for name, colour in _PARTS.items()
    )
    text = (
        f"{stats.batches:,} batches in {stats.seconds:.3f} s: startup {stats.startup:.3f}, waiting "
        f"{stats.waiting:.3f}, caller {stats.caller:.3f}"
    )
    verdict = escaping.escape(f"{stats.verdict.kind}: {stats.verdict.text}")
    return f"<div><p>{text}</p>{''.join(rows)}<p>{legend}</p><p>{verdict}</p></div>"
