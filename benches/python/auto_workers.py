"""``num_workers="auto"`` against 1, 2 and 4 workers: rates of whole epochs, with their starts, in one run.

    python -m benches.python.auto_workers
    python -m benches.python.auto_workers --seconds 20 --only graphs,jpeg

All loaders seed each sample. An epoch ends after the given seconds. Where all workers make
one batch, they do so with each number.
"""

from __future__ import annotations

import argparse
import io
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from benches.python import datasets
from torch.utils.data import Dataset

from ringloader import DataLoader

FIXED = (1, 2, 4)
# Batches that must be equal for every number of workers.
COMPARED = 12
# More samples than any epoch of the given seconds reads.
ENDLESS = 1 << 40


@dataclass(frozen=True)
class Case:
    """A workload.

    Attributes:
        dataset: Makes the dataset.
        step: Seconds that the caller takes for each batch.
        options: Arguments of the loader.
        workers: Fixed numbers to compare with, in addition to the usual ones.
    """

    dataset: Callable[[], Dataset[Any]]
    step: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)
    workers: tuple[int, ...] = ()


def jpegs() -> Dataset[Any]:
    """Returns photographs of 640 by 480 points, cropped to 224."""
    from PIL import Image

    folder = Path(tempfile.mkdtemp(prefix="auto-workers-"))
    generator = np.random.default_rng(0)
    paths = []
    for number in range(16):
        small = Image.fromarray(generator.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        file = io.BytesIO()
        small.resize((640, 480)).save(file, "JPEG", quality=90)
        paths.append(folder / f"{number}.jpg")
        paths[-1].write_bytes(file.getvalue())
    return datasets.Jpegs(ENDLESS, paths, 224)


CASES = {
    "rows of 8 floats, 64": Case(lambda: datasets.Tabular(ENDLESS), options={"batch_size": 64}),
    "images of 600 KB, 64": Case(
        lambda: datasets.Fresh(ENDLESS, 3 * 224 * 224 * 4), options={"batch_size": 64}
    ),
    "jpeg, 32": Case(jpegs, options={"batch_size": 32}),
    "graphs, 32": Case(
        lambda: datasets.Graphs(ENDLESS),
        options={"batch_size": 32, "collate_fn": datasets.collate_graphs},
    ),
    "samples that sleep 20 ms, 8": Case(
        lambda: datasets.Sleeping(ENDLESS, 0.02), options={"batch_size": 8}, workers=(8,)
    ),
    "samples that sleep 20 ms, 8, all workers make one batch": Case(
        lambda: datasets.Sleeping(ENDLESS, 0.02),
        options={"batch_size": 8, "worker_task": "sample"},
        workers=(8,),
    ),
    "images of 600 KB, 64, all workers make one batch": Case(
        lambda: datasets.Fresh(ENDLESS, 3 * 224 * 224 * 4),
        options={"batch_size": 64, "worker_task": "sample"},
    ),
    "a step of 50 ms, samples of 1 ms, 16": Case(
        lambda: datasets.Sleeping(ENDLESS, 0.001), step=0.05, options={"batch_size": 16}
    ),
}


def loader_of(case: Case, workers: int | Literal["auto"]) -> DataLoader[Any]:
    """Returns a loader that reads its samples in their order."""
    return DataLoader(case.dataset(), num_workers=workers, seeding="sample", seed=0, **case.options)


def epoch(case: Case, workers: int | Literal["auto"], seconds: float) -> tuple[float, int]:
    """Returns the batches per second of an epoch, and the workers that ran in the end."""
    loader = loader_of(case, workers)
    begun, count = time.perf_counter(), 0
    for _ in loader:
        count += 1
        if case.step:
            time.sleep(case.step)
        spent = time.perf_counter() - begun
        if spent >= seconds:
            break
    found = loader.num_workers
    loader.shutdown()
    return count / spent, found


def check(case: Case) -> None:
    """Raises if the first batches are not equal."""
    expected, found = (list(itertools.islice(loader_of(case, workers), COMPARED)) for workers in (1, "auto"))
    if not all(map(is_equal, expected, found)):
        raise AssertionError("batches are not equal")


def is_equal(one: Any, another: Any) -> bool:
    """True for two batches with the same values."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, another)
    if isinstance(one, dict):
        return all(is_equal(one[key], another[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(another) and all(map(is_equal, one, another))
    return bool(one == another)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="length of an epoch (default: 5)")
    parser.add_argument("--rounds", type=int, default=1, help="epochs of each loader (default: 1)")
    parser.add_argument(
        "--only", default="", help="beginnings of the names of workloads, with commas between"
    )
    given = parser.parse_args()
    wanted = tuple(given.only.split(",")) if given.only else ("",)
    print("| workload | batches/s with 1 | 2 | 4 | 8 | auto | auto / best | workers |")
    print("|---|---|---|---|---|---|---|---|")
    for name, case in CASES.items():
        if not name.startswith(wanted):
            continue
        try:
            check(case)
        except ImportError as error:
            print(f"| {name} | left out: {error} |", flush=True)
            continue
        numbers = (*FIXED, *case.workers)
        rounds = [
            [epoch(case, workers, given.seconds) for workers in (*numbers, "auto")]
            for _ in range(given.rounds)
        ]
        rates = [statistics.median(one[at][0] for one in rounds) for at in range(len(numbers) + 1)]
        ratio = statistics.median(one[-1][0] / max(rate for rate, _ in one[:-1]) for one in rounds)
        found = "/".join(str(one[-1][1]) for one in rounds)
        shown = [f"{rate:.3g}" for rate in rates[:-1]] + ["-"] * (4 - len(numbers))
        print(f"| {name} | {' | '.join(shown)} | {rates[-1]:.3g} | {ratio:.2f} | {found} |", flush=True)


if __name__ == "__main__":
    main()
