"""The cost of being woken to the main process: its time for each batch, when it does nothing else.

The workers of ``ideal`` make the batches and ring a bell after each. The main process waits for the bell and,
in a second run, makes and drops a tensor for each batch.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from statistics import median

import torch

from . import measure
from .ideal import INDEX_BATCHES, Work
from .loaders import OURS
from .processes import call_in_process
from .workloads import BY_NAME

WORKLOADS = ("images-uint8", "images-float32", "collated-10mb", "tensor-38mb", "slow-store-unordered")
ROUNDS = 3
SECONDS = 0.6


def woken(workload: str, with_tensor: bool) -> float:
    """Microseconds for each batch. The workers end with this process."""
    torch.set_num_threads(1)
    arguments = BY_NAME[workload].loader_arguments()
    work = Work.of(BY_NAME[workload].dataset(), arguments, INDEX_BATCHES)
    bell = os.eventfd(0)
    for worker in range(work.num_workers):
        multiprocessing.Process(target=_ring_for_each, args=(work, worker, bell), daemon=True).start()
    memory = bytearray(1 << 20)
    for window in (measure.WARM_UP_SECONDS, SECONDS):
        batches, cpu = 0, -time.process_time_ns()
        until = time.perf_counter() + window
        while time.perf_counter() < until:
            rings = os.eventfd_read(bell)
            batches += rings
            for _ in range(rings if with_tensor else 0):
                torch.frombuffer(memory, dtype=torch.uint8)
    return (cpu + time.process_time_ns()) / batches / 1e3


def _ring_for_each(work: Work, worker: int, bell: int) -> None:
    fetch, buffers = work.enter(worker)
    for indices in itertools.cycle(work.of_worker(worker)):
        buffers.turn()
        fetch(indices)
        os.eventfd_write(bell, 1)


def ours(workload: str) -> float:
    """Returns the time of the main process with ringloader."""
    timing = measure.timed_run(OURS, workload, SECONDS)
    return float(timing["main_cpu_seconds"] / timing["batches"] * 1e6)


if __name__ == "__main__":
    print("| main process, µs per batch | only woken | and makes a tensor | ringloader |\n|---|--:|--:|--:|")
    for name in WORKLOADS:
        runs = [(woken, name, False), (woken, name, True), (ours, name)]
        rounds = [[call_in_process("forkserver", *run) for run in runs] for _ in range(ROUNDS)]
        figures = " | ".join(f"{median(column):.1f}" for column in zip(*rounds, strict=True))
        print(f"| {BY_NAME[name].text} | {figures} |", flush=True)
