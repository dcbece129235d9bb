"""The ideal loader: as many processes as there are workers, at once, that only make batches.

There is no transport and no consumer. Collation writes, as in torch's workers, into shared memory, but into
buffers that stay warm.

``ideal`` has every batch in them: what is large and was not collated is copied there. It leaves the
samples' allocator as it is. ``ideal-kept`` copies nothing and lets the allocator keep what is freed. No
loader with such workers can be faster than that, but by making a batch otherwise.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import multiprocessing
import random
import time
from collections import deque
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from threading import BrokenBarrierError
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from . import torchs
from .measure import WARM_UP_SECONDS, Timing
from .verify import HELD_BATCHES, fingerprint, finite
from .workloads import BY_NAME

IDEAL = "ideal"
IDEAL_KEPT = "ideal-kept"
# Each with the number of rounds from one of its runs to the next.
IDEALS = {IDEAL: 1, IDEAL_KEPT: 2}
INDEX_BATCHES = 2048
# Of mallopt(3): freed memory is kept, so that a dataset's own allocations are warm too.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 30
# Smaller tensors are not copied: the call would cost more than the bytes.
_COPIED_BYTES = 64 << 10
# The words of a worker when another one failed.
_LEFT = "left alone at the barrier"


class WarmBuffers:
    """Stands in for the allocation of shared memory in a worker: gives the same storages again, in turn."""

    def __init__(self, turns: int) -> None:
        self._allocate = torch.UntypedStorage._new_shared
        self._turns = itertools.cycle([[] for _ in range(turns)])
        self._storages: list[torch.UntypedStorage] = next(self._turns)
        self._used = 0

    def turn(self) -> None:
        """Goes on to the next buffer: a new batch begins."""
        self._storages = next(self._turns)
        self._used = 0

    def new_shared(self, size: int, *, device: Any = "cpu") -> torch.UntypedStorage:
        """A storage of ``size`` bytes for the batch that is being made."""
        if torch.device(device).type != "cpu":
            return self._allocate(size, device=device)
        if self._used == len(self._storages):
            self._storages.append(self._allocate(size))
        elif self._storages[self._used].nbytes() != size:
            self._storages[self._used] = self._allocate(size)
        self._used += 1
        return self._storages[self._used - 1]

    def settle(self, batch: Any) -> None:
        """Copies what is large and not in a buffer yet."""
        if isinstance(batch, torch.Tensor):
            if batch.nbytes >= _COPIED_BYTES and not batch.is_shared():
                storage = self.new_shared(batch.nbytes)
                torch.empty(0, dtype=batch.dtype).set_(storage, 0, batch.shape).copy_(batch)
        elif isinstance(batch, dict):
            for item in batch.values():
                self.settle(item)
        elif isinstance(batch, (list, tuple)):
            for item in batch:
                self.settle(item)


@dataclass(frozen=True)
class Work:
    """The parts that all workers of one run share."""

    loader: Any
    batches: list[Any]
    base_seed: int
    num_workers: int
    prefetch_factor: int

    @classmethod
    def of(cls, dataset: Any, arguments: dict[str, Any], count: int) -> Work:
        """The first ``count`` batches of an epoch."""
        loader = torchs.in_process(dataset, arguments)
        indices, base_seed = torchs.index_batches(loader)
        batches = list(itertools.islice(indices, count))
        return cls(loader, batches, base_seed, arguments["num_workers"], arguments["prefetch_factor"])

    def of_worker(self, worker: int) -> list[Any]:
        """The batches that torch gives to a worker when all are equally fast."""
        return self.batches[worker :: self.num_workers]

    def enter(self, worker: int) -> tuple[Any, WarmBuffers]:
        """Makes this process a worker for samples and collation."""
        torch.set_num_threads(1)
        seed = self.base_seed + worker
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(torch_worker._generate_state(self.base_seed, worker))
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=worker, num_workers=self.num_workers, seed=seed, dataset=self.loader.dataset
        )
        buffers = WarmBuffers(self.prefetch_factor + 2)
        torch.UntypedStorage._new_shared = buffers.new_shared
        return torchs.fetch_of(self.loader), buffers


def fingerprints(ideal: str, workload_name: str, count: int) -> list[str]:
    """The first batches, the workers' one after the other and then in torch's order; see ``verify``."""
    if ideal == IDEAL_KEPT:
        _keep_freed_memory()
    torch.manual_seed(0)
    workload = BY_NAME[workload_name]
    arguments = workload.loader_arguments()
    dataset = workload.dataset()
    if not workload.in_order:
        dataset = finite(dataset, count, arguments)
    work = Work.of(dataset, arguments, count)
    found = {}
    original = torch.UntypedStorage._new_shared
    for worker in range(work.num_workers):
        torch.UntypedStorage._new_shared = original
        fetch, buffers = work.enter(worker)
        held: deque[object] = deque()
        made = []
        for indices in work.of_worker(worker):
            buffers.turn()
            held.append(fetch(indices))
            if len(held) > HELD_BATCHES:
                made.append(fingerprint(held.popleft()))
        made += map(fingerprint, held)
        found |= {number * work.num_workers + worker: value for number, value in enumerate(made)}
    in_turn = [found[number] for number in range(len(found))]
    return in_turn if workload.in_order else sorted(in_turn)


def timed_run(ideal: str, workload_name: str, seconds: float) -> dict[str, Any]:
    """Runs the workers for ``seconds`` and returns a ``Timing`` as a dict: the sum of their rates.

    Raises:
        RuntimeError: a worker failed.
    """
    if ideal == IDEAL_KEPT:
        # Before the workers are forked, which inherit it.
        _keep_freed_memory()
    torch.manual_seed(0)
    workload = BY_NAME[workload_name]
    work = Work.of(workload.dataset(), workload.loader_arguments(), INDEX_BATCHES)
    context = multiprocessing.get_context("fork")
    started = context.Value("q", 0, lock=False)

    def note_start() -> None:
        started.value = time.perf_counter_ns()

    # With a timeout: a process that waits must end too when the others were killed.
    barrier = context.Barrier(work.num_workers, note_start, timeout=60.0)
    ends, processes = [], []
    for worker in range(work.num_workers):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_run_worker, args=(ideal, work, worker, barrier, started, seconds, theirs), daemon=True
        )
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    try:
        received = [_received(ours) for ours in ends]
    finally:
        for process in processes:
            process.terminate()
            process.join()
    results = [result for result in received if not isinstance(result, str)]
    if len(results) < len(received):
        failures = {result for result in received if isinstance(result, str)}
        raise RuntimeError(f"workers of the ideal failed: {'; '.join(sorted(failures - {_LEFT}) or [_LEFT])}")
    batches = sum(done for done, _, _ in results)
    rate = sum(done / elapsed for done, elapsed, _ in results)
    return asdict(
        Timing(
            batches=batches,
            seconds=batches / rate,
            main_cpu_seconds=0.0,
            worker_cpu_seconds=sum(cpu for _, _, cpu in results),
            memory_bytes=0,
            resting_bytes=None,
            tensors=0,
            path=ideal,
            reason="",
            counters={},
        )
    )


def _received(connection: Connection) -> tuple[int, float, float] | str:
    """A worker's result, or what became of it."""
    try:
        result: tuple[int, float, float] | str = connection.recv()
    except EOFError:
        result = "ended without a result"
    return result


def _run_worker(
    ideal: str, work: Work, worker: int, barrier: Any, started: Any, seconds: float, results: Connection
) -> None:
    try:
        results.send(_timed_worker(ideal, work, worker, barrier, started, seconds))
    except BrokenBarrierError:
        results.send(_LEFT)
    except Exception as error:
        barrier.abort()
        results.send(f"{type(error).__name__}: {error}")


def _timed_worker(
    ideal: str, work: Work, worker: int, barrier: Any, started: Any, seconds: float
) -> tuple[int, float, float]:
    """Batches made in the window that all workers share, seconds until the last of them, processor time."""
    fetch, buffers = work.enter(worker)
    if ideal == IDEAL:
        only_fetch = fetch

        def fetch(indices: Any) -> None:
            buffers.settle(only_fetch(indices))

    batches = itertools.cycle(work.of_worker(worker))
    clock = time.perf_counter_ns
    barrier.wait()
    # Every buffer is warm, and twice as many batches made as fit into them.
    warm_until = clock() + int(min(seconds, WARM_UP_SECONDS) * 1e9)
    warmed = 0
    while warmed < 2 * (work.prefetch_factor + 2) or clock() < warm_until:
        buffers.turn()
        fetch(next(batches))
        warmed += 1
    gc.collect()
    barrier.wait()
    start = now = started.value
    deadline = start + int(seconds * 1e9)
    done = 0
    cpu = -time.process_time_ns()
    while now < deadline:
        buffers.turn()
        fetch(next(batches))
        done += 1
        now = clock()
    cpu += time.process_time_ns()
    return done, (now - start) / 1e9, cpu / 1e9


def _keep_freed_memory() -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        raise RuntimeError(f"{IDEAL_KEPT} needs glibc's mallopt, which this C library does not have")
    if not (mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)):
        raise RuntimeError(f"{IDEAL_KEPT}: glibc's mallopt refused to keep {_KEPT_BYTES} bytes")
