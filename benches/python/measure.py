"""One timed run of one loader over one workload, in the process that calls it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from .loaders import LOADERS, Loader
from .memory import tree_bytes
from .processes import template_pid
from .workloads import BY_NAME

WARM_UP_SECONDS = 0.3
MEMORY_SAMPLES = 4
# Seconds that a consumer rests in a step of its own, with every queue full.
REST_SECONDS = 1.5


@dataclass(frozen=True)
class Timing:
    """One run. Times are those of the window from the last warm-up batch to the last timed batch.

    ``resting_bytes``: the memory after a rest, where one was asked for. ``tensors``: how many are in a batch.
    """

    batches: int
    seconds: float
    main_cpu_seconds: float
    worker_cpu_seconds: float
    memory_bytes: int
    resting_bytes: int | None
    tensors: int
    path: str
    reason: str
    counters: dict[str, int]


def process_cpu_ns(pid: int) -> int:
    """Processor time of another process with all its threads, in nanoseconds.

    The clock's number is made as the C library's ``clock_getcpuclockid`` makes it; /proc/<pid>/stat counts in
    hundredths of a second, too coarse for a window of one.
    """
    return time.clock_gettime_ns((~pid << 3) | 2)


def timed_run(
    loader_name: str,
    workload_name: str,
    seconds: float,
    changed: dict[str, Any] | None = None,
    rest: bool = False,
) -> dict[str, Any]:
    """Runs the loader for about ``seconds`` after a warm-up and returns a ``Timing`` as a dict.

    The consumer holds one batch and does not touch its bytes.

    Args:
        loader_name: one of ``LOADERS``.
        workload_name: one of ``BY_NAME``.
        seconds: the timed window.
        changed: arguments of the loader that differ from the workload's.
        rest: whether to look at the memory after a rest too.
    """
    workload = BY_NAME[workload_name]
    arguments = workload.loader_arguments(**(changed or {}))
    return timed_loader(LOADERS[loader_name], workload.dataset(), arguments, seconds, rest)


def timed_loader(
    loader: Loader, dataset: Dataset[Any], arguments: dict[str, Any], seconds: float, rest: bool = False
) -> dict[str, Any]:
    """``timed_run`` for any dataset and arguments."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = loader.make(dataset, **arguments)
    iterator = iter(made)
    in_flight = arguments["num_workers"] * arguments["prefetch_factor"]
    # The end of an epoch is another regime (nothing is dispatched any more): stay clear of it.
    supply = len(made) - in_flight - MEMORY_SAMPLES - 1
    warm_until = time.perf_counter() + min(seconds, WARM_UP_SECONDS)
    warmed = 0
    while warmed < in_flight + 4 or (warmed < supply // 4 and time.perf_counter() < warm_until):
        batch = next(iterator)
        warmed += 1
    supply -= warmed
    workers = [process.pid for process in multiprocessing.active_children() if process.pid is not None]
    gc.collect()

    clock = time.perf_counter_ns
    batches = 0
    worker_cpu = -sum(map(process_cpu_ns, workers))
    main_cpu = -time.process_time_ns()
    start = clock()
    deadline = start + int(seconds * 1e9)
    now = start
    while now < deadline and batches < supply:
        batch = next(iterator)
        batches += 1
        now = clock()
    main_cpu += time.process_time_ns()
    worker_cpu += sum(map(process_cpu_ns, workers))

    memory = 0
    for _ in range(MEMORY_SAMPLES):
        _read(batch)
        memory = max(memory, tree_bytes([os.getpid(), *workers], template_pid()))
        batch = next(iterator)
    tensors = _read(batch)
    resting = None
    if rest:
        time.sleep(REST_SECONDS)
        resting = tree_bytes([os.getpid(), *workers], template_pid())
    taken = loader.checked(iterator)
    del batch, iterator
    return asdict(
        Timing(
            batches=batches,
            seconds=(now - start) / 1e9,
            main_cpu_seconds=main_cpu / 1e9,
            worker_cpu_seconds=worker_cpu / 1e9,
            memory_bytes=memory,
            resting_bytes=resting,
            tensors=tensors,
            path=taken.path,
            reason=taken.reason,
            counters=taken.counters,
        )
    )


def _read(batch: object) -> int:
    """Reads the tensors of a batch, as any consumer does, and counts them.

    Of shared memory that its worker has unmapped only what was read belongs to any process.
    """
    return len([leaf.sum() for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)])
