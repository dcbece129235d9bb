"""What options do to a batch: stages in the main process, steps in a worker.

Stages stand in order between the scheduler and the caller. A batch is decoded before the first of them, in
the native scheduler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ringloader._main import bad_samples, epochs
from ringloader._main.device import Moving
from ringloader._options import Options
from ringloader._torch import devices, replacements, stand_ins
from ringloader._worker import gather
from ringloader._worker.fetch import Step
from ringloader.bad_samples import RAISE

# Takes a batch, and returns what the next stage, or the caller, gets. What it raises, the caller gets.
Stage = Callable[[Any], Any]


def stages_for(_loader: Any, options: Options) -> tuple[Stage, ...]:
    """Those that an iterator of the loader needs, behind the one that moves its batches."""
    transform = options.device_transform
    if transform is None or devices.resolve(options.device) is not None:
        return ()
    return (functools.partial(_transformed, transform),)


def moving_for(options: Options) -> Moving | None:
    """What moves the batches of an iterator; None if they stay on the CPU."""
    device = devices.resolve(options.device)
    if device is None:
        return None
    transform = options.device_transform
    if options.on_error != RAISE:
        transform = bad_samples.through(transform)
    return Moving(device, options.device_prefetch, transform)


def steps_for(loader: Any, options: Options) -> tuple[Step, ...]:
    """The same for the steps of its workers. An epoch begins by it."""
    step = epochs.step_for(loader, options)
    return (*fetch_steps_for(loader, options), *(() if step is None else (step,)))


def fetch_steps_for(loader: Any, options: Options) -> tuple[Step, ...]:
    """Those that are for an iterator without workers too."""
    handling = bad_samples.step_for(options)
    return (
        *((gather.gathering,) if gather.is_of_arrays(loader) else ()),
        *(() if handling is None else (handling,)),
    )


def put_steps(iterator: Any, steps: Sequence[Step]) -> None:
    """Has torch's own iterator without workers fetch through ``steps``. Any other is left as it is."""
    if steps and replacements.has_own_fetcher(iterator):
        for step in steps:
            stand_ins.replace_fetcher(iterator, step)


def _transformed(transform: Callable[[Any], Any], batch: Any) -> Any:
    try:
        return transform(batch)
    except StopIteration as error:
        # To the caller that would be the end of the epoch.
        raise RuntimeError("device_transform raised StopIteration") from error


def passed(batch: Any, stages: Sequence[Stage]) -> Any:
    """What the stages make of a batch."""
    for stage in stages:
        batch = stage(batch)
    return batch
