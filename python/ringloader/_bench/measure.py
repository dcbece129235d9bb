"""A measurement of a loader, and the verdict of ``stats=True`` on it, in the process that calls them."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Generator
from typing import Any

from ringloader._bench import loaders, memory
from ringloader._bench.configuration import Configuration
from ringloader._bench.errors import TargetError
from ringloader._bench.target import Target
from ringloader._report import report
from ringloader._stats.figures import epoch_stats

_END = object()


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One run of a loader. Times are seconds.

    Attributes:
        batches_per_second: The rate after the first batch.
        first_batch: The time from ``iter`` to the first batch.
        main_cpu: The processor time of the main process for a batch, with all its threads.
        step: The time that a training step took; 0 without one.
        memory: The bytes of the process and its workers, or None where the system does not tell.
        path: The path of ringloader's batches.
        reason: The reason for it.
    """

    batches_per_second: float
    first_batch: float
    main_cpu: float
    step: float
    memory: int | None
    path: str | None
    reason: str | None


def measure(target: Target, configuration: Configuration, seconds: float, step: float) -> Measurement:
    """Takes batches for ``seconds`` after the first one, over as many epochs as that takes.

    The start of further epochs counts, as it does in training.

    Args:
        target: The user's function.
        configuration: The loader that is wanted.
        seconds: The time.
        step: How long the caller sleeps after each batch, in seconds.

    Raises:
        TargetError: If the function gives no loader, or one without batches.
    """
    loader = loaders.make(target, configuration)
    batches = _epochs(loader)
    start = time.perf_counter()
    batch = next(batches, _END)
    if batch is _END:
        raise TargetError(f"{target} returns a loader without batches")
    first = last = time.perf_counter()
    cpu = time.process_time()
    count, slept = 0, 0.0
    while last < first + seconds:
        if step:
            before = time.perf_counter()
            time.sleep(step)
            slept += time.perf_counter() - before
        # One batch is held, as by a training loop.
        batch = next(batches, _END)
        if batch is _END:
            break
        count += 1
        last = time.perf_counter()
    cpu = time.process_time() - cpu
    used = memory.of_tree()
    taken = report.noted(loader)
    batches.close()
    # Ends persistent workers.
    loader._iterator = None
    return Measurement(
        # One batch is all there is of a source that is read once.
        batches_per_second=count / (last - first) if count else 1 / (first - start),
        first_batch=first - start,
        main_cpu=cpu / max(count, 1),
        step=slept / max(count, 1),
        memory=used,
        path=None if taken is None else taken.path,
        reason=None if taken is None else taken.reason,
    )


def verdict(target: Target, configuration: Configuration, seconds: float, step: float) -> dict[str, Any]:
    """Returns what limits an epoch of the loader, as a dict.

    A long epoch ends early, ``seconds`` after the first batch, but not before its start is a small part of
    it. Of short ones the last counts, which persistent workers did not start for.

    Args:
        target: The user's function.
        configuration: A loader of ringloader's.
        seconds: The time.
        step: How long the caller sleeps after each batch, in seconds.

    Raises:
        TargetError: If the function gives no loader, or one without batches.
    """
    loader = loaders.make(target, configuration, stats=True)
    found = None
    start, end = time.perf_counter(), math.inf
    while found is None or time.perf_counter() < end:
        has_batches = False
        for _ in loader:
            has_batches = True
            if end == math.inf:
                first = time.perf_counter()
                end = first + max(seconds, 3 * (first - start))
            if step:
                time.sleep(step)
            if found is None and time.perf_counter() >= end:
                break
        if not has_batches:
            break
        found = epoch_stats(loader).verdict
    if found is None:
        raise TargetError(f"{target} returns a loader without batches")
    return dataclasses.asdict(found)


def _epochs(loader: Any) -> Generator[Any]:
    """Yields the batches of one epoch after the other, until one has none: its source is read only once."""
    is_empty = False
    while not is_empty:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch
