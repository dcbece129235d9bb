"""Batches for an accelerator: pinned, and on the device. Writes build/bench-accelerator.md and .json.

On the accelerator that torch finds, or with ``--pretend`` on the pretend one of the tests: plain memory,
whose copies are done by threads, so that only what the host does is like a real device's.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import resource
import subprocess
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import ringloader
from ringloader._features.device.registration import registrars

from . import datasets
from .files import BUILD
from .report import head, machine
from .workloads import ENDLESS, NUM_WORKERS, PREFETCH_FACTOR

WARM_UP_BATCHES = 20
COUNTED_BATCHES = 50


class Same(Dataset[Any]):
    """One sample that is always the same, so that the loader is what is measured."""

    def __init__(self, sample: Any) -> None:
        self._sample = sample

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Any:
        return self._sample


@dataclass(frozen=True)
class Workload:
    """The data to load."""

    name: str
    text: str
    dataset: Callable[[], Dataset[Any]]
    batch_size: int | None = None


WORKLOADS = (
    Workload("tensor-1kb", "one tensor of 1 KB", lambda: Same(torch.zeros(256))),
    Workload(
        "tensors-40x1kb",
        "dict of 40 tensors of 1 KB",
        lambda: Same({f"field_{number}": torch.zeros(256) for number in range(40)}),
    ),
    Workload(
        "images-uint8",
        "64 images, uint8, 3 x 224 x 224",
        lambda: Same(torch.zeros(3, 224, 224, dtype=torch.uint8)),
        64,
    ),
    Workload("tensor-1mb", "one fresh tensor of 1 MB", lambda: datasets.Fresh(ENDLESS, 1 << 20)),
)


def _arguments(workload: Workload) -> dict[str, Any]:
    return {
        "batch_size": workload.batch_size,
        "num_workers": NUM_WORKERS,
        "prefetch_factor": PREFETCH_FACTOR,
    }


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, dict):
        return {name: value.to(device, non_blocking=True) for name, value in batch.items()}
    return batch.to(device, non_blocking=True)


def _torch_pinned(workload: Workload, _device: torch.device) -> Iterator[Any]:
    return iter(DataLoader(workload.dataset(), pin_memory=True, **_arguments(workload)))


def _ours_pinned(workload: Workload, _device: torch.device) -> Iterator[Any]:
    iterator = iter(ringloader.DataLoader(workload.dataset(), pin_memory=True, **_arguments(workload)))
    _must_be_native(iterator)
    return iterator


def _torch_moved(workload: Workload, device: torch.device) -> Iterator[Any]:
    for batch in _torch_pinned(workload, device):
        yield _moved(batch, device)


def _torch_prefetched(workload: Workload, device: torch.device) -> Iterator[Any]:
    """Yields batches as people write it by hand: a stream for the copies, one batch ahead."""
    stream = torch.Stream(device)
    batches = _torch_pinned(workload, device)

    def moved() -> tuple[Any, Any]:
        current = torch.accelerator.current_stream(device)
        torch.accelerator.set_stream(stream)
        try:
            batch = _moved(next(batches), device)
            return batch, stream.record_event()
        finally:
            torch.accelerator.set_stream(current)

    ahead = deque([moved()])
    while True:
        ahead.append(moved())
        batch, event = ahead.popleft()
        current = torch.accelerator.current_stream(device)
        current.wait_event(event)
        for tensor in batch.values() if isinstance(batch, dict) else (batch,):
            tensor.record_stream(current)
        yield batch


def _ours_moved(workload: Workload, device: torch.device) -> Iterator[Any]:
    iterator = iter(ringloader.DataLoader(workload.dataset(), device=device, **_arguments(workload)))
    _must_be_native(iterator)
    return iterator


def _must_be_native(iterator: Any) -> None:
    taken = ringloader.report(iterator)
    if taken.path != "native":
        raise RuntimeError(f"took the path {taken.path!r}: {taken.reason}")


LOADERS: dict[str, dict[str, Callable[[Workload, torch.device], Iterator[Any]]]] = {
    "pinned": {"torch": _torch_pinned, "ringloader": _ours_pinned},
    "on the device": {
        "torch, `.to(non_blocking=True)`": _torch_moved,
        "torch, prefetcher by hand": _torch_prefetched,
        "ringloader, `device=`": _ours_moved,
    },
}


@dataclass
class Row:
    """One loader on one workload. Times are microseconds a batch, of each round."""

    place: str
    workload: str
    text: str
    loader: str
    seconds: list[float] = field(default_factory=list)
    main_cpu: list[float] = field(default_factory=list)
    # Copies to the device that a batch takes, and bytes of it that the main process copies before them; None
    # where the device, or the loader, does not tell.
    copies: float | None = None
    staged_bytes: float | None = None


def _cpu_us() -> float:
    """Processor time of this process, all its threads. Those that are the pretend device are not its own."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    device = sys.modules.get("tests.accelerator.pretend")
    device_us = 0.0 if device is None else device.counters()["device_cpu_ns"] / 1e3
    return (used.ru_utime + used.ru_stime) * 1e6 - device_us


def _check(batch: Any, place: str) -> None:
    for tensor in batch.values() if isinstance(batch, dict) else (batch,):
        if not (tensor.is_pinned() if place == "pinned" else tensor.device.type != "cpu"):
            raise RuntimeError(f"a batch is not {place}")


def _time(make: Callable[[], Iterator[Any]], place: str, seconds: float) -> tuple[float, float]:
    """Microseconds a batch: of time, and of the main process's processor time with all its threads."""
    iterator = make()
    for _ in range(WARM_UP_BATCHES):
        batch = next(iterator)
    _check(batch, place)
    torch.accelerator.synchronize()
    count, began, cpu = 0, time.perf_counter(), _cpu_us()
    while time.perf_counter() - began < seconds:
        for _ in range(5):
            batch = next(iterator)
        count += 5
    torch.accelerator.synchronize()
    timed = (time.perf_counter() - began) * 1e6 / count, (_cpu_us() - cpu) / count
    del batch, iterator
    gc.collect()
    return timed


def _measure(rows: list[Row], rounds: int, seconds: float, device: torch.device) -> None:
    """Times the rows of one table in turn, every second round backwards."""
    workloads = {workload.name: workload for workload in WORKLOADS}
    for number in range(rounds):
        for row in rows if number % 2 == 0 else rows[::-1]:
            make = LOADERS[row.place][row.loader]
            taken, cpu = _time(
                lambda make=make, row=row: make(workloads[row.workload], device), row.place, seconds
            )
            row.seconds.append(taken)
            row.main_cpu.append(cpu)


def _table(place: str, rows: list[Row]) -> str:
    baselines = {row.workload: row for row in reversed(rows)}
    is_moved = place != "pinned"
    counted_head = " copies to the device | bytes copied by ringloader before |" if is_moved else ""
    lines = [
        f"**Batches {place}**",
        "",
        "| batch | loader | batches a second | times the first one's rate (range) | main CPU, us a batch "
        "| times less |" + counted_head,
        "|---|---|--:|--:|--:|--:|" + "--:|" * counted_head.count("|"),
    ]
    for row in rows:
        base = baselines[row.workload]
        ratios = [theirs / ours for theirs, ours in zip(base.seconds, row.seconds, strict=True)]
        cpu = [theirs / ours for theirs, ours in zip(base.main_cpu, row.main_cpu, strict=True)]
        counted = ["" if value is None else f"{value:,.0f}" for value in (row.copies, row.staged_bytes)]
        lines.append(
            f"| {row.text} | {row.loader} | {1e6 / median(row.seconds):,.0f} "
            f"| {median(ratios):.1f} ({min(ratios):.1f}-{max(ratios):.1f}) | {median(row.main_cpu):,.1f} "
            f"| {median(cpu):.1f} |" + (f" {counted[0]} | {counted[1]} |" if is_moved else "")
        )
    return "\n".join(lines)


def _driver() -> str:
    """Returns what the driver calls itself, where its tool is there."""
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return "driver " + subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "driver unknown"


def _device_name(device: torch.device, pretend: bool) -> str:
    if pretend:
        return "the pretend accelerator of the tests: plain memory"
    module = torch.get_device_module(device)
    return f"{module.get_device_name(device) if hasattr(module, 'get_device_name') else device}, {_driver()}"


def _is_ours(row: Row) -> bool:
    return row.loader.startswith("ringloader")


def _staged(iterator: Any) -> int:
    return ringloader.report(iterator).counters["device_staged_bytes"]


def _count_copies(rows: list[Row], device: torch.device) -> None:
    """Counts the cost of batches that are all there, on the pretend accelerator, which counts."""
    from tests.accelerator import pretend

    workloads = {workload.name: workload for workload in WORKLOADS}
    for row in rows:
        if row.place == "pinned":
            continue
        iterator = LOADERS[row.place][row.loader](workloads[row.workload], device)
        for _ in range(WARM_UP_BATCHES):
            next(iterator)
        staged = _staged(iterator) if _is_ours(row) else 0
        before = pretend.counters()
        for _ in range(COUNTED_BATCHES):
            next(iterator)
        after = pretend.counters()
        row.copies = (after["copies_to_device"] - before["copies_to_device"]) / COUNTED_BATCHES
        if _is_ours(row):
            row.staged_bytes = (_staged(iterator) - staged) / COUNTED_BATCHES
        del iterator
        gc.collect()


def main() -> int:
    """Returns 1 if there is no accelerator."""
    parser = argparse.ArgumentParser(prog="python -m benches.python.accelerator", description=__doc__)
    parser.add_argument("--pretend", action="store_true", help="on the pretend accelerator, which g++ builds")
    parser.add_argument("--rounds", type=int, default=5, help="each with every loader once (default 5)")
    parser.add_argument("--seconds", type=float, default=1.0, help="timed window of one run (default 1)")
    parser.add_argument("--only", choices=[one.name for one in WORKLOADS], action="append")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    if options.pretend:
        from tests.accelerator import pretend

        pretend.load()
        registrars[pretend.NAME] = SimpleNamespace(
            register=pretend.host_register, unregister=pretend.host_unregister
        )
    if not torch.accelerator.is_available():
        print("torch finds no accelerator; --pretend makes one", file=sys.stderr)
        return 1
    found = torch.accelerator.current_accelerator()
    assert found is not None
    device = torch.device(found.type, torch.accelerator.current_device_index())
    where = machine()
    tables, rows = [], []
    for place, loaders in LOADERS.items():
        of_place = [
            Row(place, workload.name, workload.text, loader)
            for workload in WORKLOADS
            if options.only is None or workload.name in options.only
            for loader in loaders
        ]
        _measure(of_place, options.rounds, options.seconds, device)
        if options.pretend:
            _count_copies(of_place, device)
        tables.append(_table(place, of_place))
        rows += of_place
    how = (
        f"{_device_name(device, options.pretend)}; {NUM_WORKERS} workers, prefetch_factor {PREFETCH_FACTOR}; "
        f"medians of {options.rounds} interleaved rounds of {options.seconds:g} s; "
        f"{datetime.datetime.now(datetime.UTC).date()}"
    )
    text = "\n\n".join([head(where, how), *tables]) + "\n"
    print(text)
    BUILD.mkdir(parents=True, exist_ok=True)
    (BUILD / "bench-accelerator.md").write_text(text)
    document = {"machine": where, "how": how, "rows": [vars(row) for row in rows]}
    (BUILD / "bench-accelerator.json").write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
