"""Three programs of ``examples/programs``: what limits each, and what the change of the verdict brings.

``python examples/is_it_the_loader.py``. Writes traces and the picture of one to build/verdicts.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import ringloader

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "build" / "verdicts"
sys.path.insert(0, str(HERE / "programs"))

# The program, its arguments, the batches of an epoch, and the seconds of the training step.
CASES: dict[str, tuple[str, dict[str, Any], int, float]] = {
    "images": ("images", {"num_workers": 1}, 32, 0.03),
    "short epochs": ("rows", {"num_workers": 2, "multiprocessing_context": "spawn"}, 40, 0.002),
    "texts": ("texts", {"num_workers": 0}, 1000, 0.0005),
}
COLOURS = {
    "dataset": "#4c78a8",
    "collate": "#f58518",
    "send": "#54a24b",
    "wait": "#e45756",
    "caller": "#b0b0b0",
}


def measured(name: str, options: Mapping[str, Any], batches: int, step: float) -> Any:
    """Returns the figures of an epoch, of the second one where workers stay."""
    program = __import__(name)

    def loader_class(*args: Any, num_workers: int, **kwargs: Any) -> Any:
        return ringloader.DataLoader(*args, **kwargs, stats=True, **{"num_workers": num_workers, **options})

    loader = program.make_loader(loader_class, 0)
    for _ in range(2 if loader.persistent_workers else 1):
        for _ in itertools.islice(loader, batches):
            # In place of a step that a device makes.
            time.sleep(step)
    stats = loader.epoch_stats()
    loader.shutdown()
    return stats


def draw(trace: Path, picture: Path, seconds: float = 0.5) -> None:
    """Draws the beginning of a trace behind the start, a row for each track."""
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    begun = min(event["ts"] + event["dur"] for event in events if event["name"] == "startup")
    rows = []
    for track, name in sorted(names.items()):
        top = 8 + 34 * track
        rows.append(f'<text x="4" y="{top + 17}">{name}</text>')
        for event in events:
            at = (event.get("ts", 0) - begun) / 1e6 / seconds
            if event["tid"] != track or event["name"] not in COLOURS or not 0 <= at < 1:
                continue
            width = max(min(event["dur"] / 1e6 / seconds, 1 - at), 0.0008)
            rows.append(
                f'<rect x="{100 + 700 * at:.1f}" y="{top}" width="{700 * width:.1f}" height="26" '
                f'fill="{COLOURS[event["name"]]}"/>'
            )
    top = 20 + 34 * len(names)
    for number, (name, colour) in enumerate(COLOURS.items()):
        left = 100 + 110 * number
        rows.append(f'<rect x="{left}" y="{top}" width="12" height="12" fill="{colour}"/>')
        rows.append(f'<text x="{left + 18}" y="{top + 11}">{name}</text>')
    style = "<style>text{font:13px sans-serif;fill:#888}</style>"
    size = f'viewBox="0 0 810 {top + 20}"'
    picture.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{style}{"".join(rows)}</svg>\n')


def main() -> None:
    """Prints each case before and after the change."""
    OUT.mkdir(parents=True, exist_ok=True)
    # As in a worker.
    torch.set_num_threads(1)
    for case, (program, options, batches, step) in CASES.items():
        before = measured(program, options, batches, step)
        print(f"== {case}: {options}\n{before}\n")
        trace = OUT / f"{program}.json"
        before.save_trace(trace)
        if before.verdict.change:
            after = measured(program, {**options, **before.verdict.change}, batches, step)
            brought = before.seconds / after.seconds
            print(f"-- with {before.verdict.change}: {brought:.1f} times as fast\n{after}\n")
        if program == "images":
            draw(trace, OUT / "images.svg")


if __name__ == "__main__":
    main()
