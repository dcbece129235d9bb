"""Says that ``DistributedSampler.set_epoch`` was forgotten."""

from __future__ import annotations

from typing import Any

from torch.utils.data.distributed import DistributedSampler

from ringloader._common import weak_registry
from ringloader._torch import select_path

# The epoch by which the sampler of each loader last shuffled.
_last: weak_registry.WeakRegistry[int] = weak_registry.WeakRegistry()


def note(loader: Any) -> None:
    """Logs once if a sampler shuffles as in the epoch before. Call it when a loader begins an epoch."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        # A batch sampler that the user made is beside a sampler that torch made.
        sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    if not isinstance(sampler, DistributedSampler) or not sampler.shuffle:
        return
    # A subclass with an order of its own may count epochs in its own way.
    if type(sampler).__iter__ is not DistributedSampler.__iter__:
        return
    if _last.get(loader) == sampler.epoch:
        select_path.say_once(
            "a DistributedSampler begins another epoch with the same number, and gives the same order again: "
            "call its set_epoch(epoch) before each epoch"
        )
    _last.put(loader, sampler.epoch)
