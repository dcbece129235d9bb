"""Workers on a Ray cluster beside local ones: batches per second, and the main process's time for each.

``python -m benches.python.ray_workers``: the cluster is of this machine, so batches go over its loopback. The
first table has batches that cost nothing, the second ones that sleep for a quarter of a second.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.utils.data

import ringloader

KINDS = ("local", "ray")


class Ready(torch.utils.data.Dataset[torch.Tensor]):
    """Batches of so many bytes, each after a sleep."""

    def __init__(self, count: int, size: int, seconds: float = 0.0) -> None:
        self.count, self.seconds = count, seconds
        self.batch = torch.zeros(size, dtype=torch.uint8)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        return self.batch.clone()


def measure(dataset: Ready, kind: str, workers: Any) -> tuple[float, float]:
    """Returns batches per second and the main process's seconds for each, but for the epoch's first fifth."""
    pool = workers if kind == "ray" else None
    loader = ringloader.DataLoader(
        dataset, batch_size=None, num_workers=workers.num_workers, worker_pool=pool
    )
    iterator = iter(loader)
    before = dataset.count // 5
    for _ in range(before):
        next(iterator)
    began, processor = time.perf_counter(), time.process_time()
    count = sum(1 for _ in iterator)
    seconds, processor = time.perf_counter() - began, time.process_time() - processor
    assert ringloader.report(loader).path == ("ray" if kind == "ray" else "native")
    return count / seconds, processor / count


def table(title: str, cases: dict[str, Ready], workers: Any, rounds: int) -> None:
    """Prints medians of ``rounds``."""
    print(
        f"\n| {title} | "
        + " | ".join(f"{kind}, per s | {kind}, main ms" for kind in KINDS)
        + " | ray / local |"
    )
    print("|---|" + "--:|" * (2 * len(KINDS) + 1))
    for name, dataset in cases.items():
        found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        for _ in range(rounds):
            for kind in KINDS:
                found[kind].append(measure(dataset, kind, workers))
        rates = {kind: statistics.median(rate for rate, _ in of) for kind, of in found.items()}
        mains = {kind: statistics.median(main for _, main in of) for kind, of in found.items()}
        cells = [f"{rates[kind]:,.1f} | {1000 * mains[kind]:.3f}" for kind in KINDS]
        print(f"| {name} | {' | '.join(cells)} | {rates['ray'] / rates['local']:.2f} |", flush=True)


def main() -> None:
    """Prints both tables."""
    import ray

    import ringloader.ray

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    ray.init(address="local", num_cpus=16, logging_level="error", log_to_driver=False)
    cases = {"1 KB": Ready(20_000, 1 << 10), "1 MB": Ready(1000, 1 << 20), "20 MB": Ready(150, 20 << 20)}
    with ringloader.ray.Workers(options.workers) as workers:
        table(f"{options.workers} workers, batches ready", cases, workers, options.rounds)
    with ringloader.ray.Workers(4) as workers:
        table("4 workers, 20 MB of 0.25 s", {"20 MB": Ready(120, 20 << 20, 0.25)}, workers, 1)


if __name__ == "__main__":
    main()
