"""The verdict of ``stats=True`` on a loader, in the process that calls it."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from ringloader._bench import loaders
from ringloader._bench.configuration import Configuration
from ringloader._bench.target import Target
from ringloader._stats.figures import epoch_stats


def verdict(target: Target, configuration: Configuration, seconds: float, step: float) -> dict[str, Any]:
    """Returns what limits an epoch of the loader, as a dict.

    The epoch ends early, ``seconds`` after the first batch, but not before its start is a small part of it.

    Args:
        target: The user's function.
        configuration: A loader of ringloader's.
        seconds: The time.
        step: How long the caller sleeps after each batch, in seconds.
    """
    loader = loaders.make(target, configuration, stats=True)
    start = time.perf_counter()
    end = None
    for _ in loader:
        if end is None:
            first = time.perf_counter()
            end = first + max(seconds, 3 * (first - start))
        if step:
            time.sleep(step)
        if time.perf_counter() >= end:
            break
    return dataclasses.asdict(epoch_stats(loader).verdict)
