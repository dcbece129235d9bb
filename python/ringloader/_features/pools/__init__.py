"""Pools of worker processes."""

from __future__ import annotations

from typing import Any

from ringloader._features.rules import Conflict, Never, is_auto, option, with_dispatch


def _check_pool(name: str, value: Any) -> None:
    if isinstance(value, str):
        raise TypeError(
            f"{name} must be a ringloader.WorkerPool or None, not {value!r}: pass the pool itself"
        )
    if value is not None and getattr(type(value), "_is_worker_pool", None) is not True:
        raise TypeError(f"{name} must be a ringloader.WorkerPool or None, not {value!r}")


# A `ringloader.WorkerPool`: its module needs torch.
WORKER_POOL = option(
    None,
    check=_check_pool,
    in_threads=Never("a pool has processes"),
    on_torchs="works",
    is_text=False,
    annotation="WorkerPool | None",
)

RULES = (
    Conflict(
        "worker_pool",
        "with `persistent_workers`, unless with `prefetch_epochs`",
        "made",
        lambda options, facts: (
            facts.loader.persistent_workers
            and not options.prefetch_epochs
            and not options.worker_pool._is_remote
        ),
        "persistent_workers={facts.loader.persistent_workers!r} does not go with worker_pool: an iterator "
        "that persists would keep the pool's processes; leave persistent_workers out, the pool keeps them",
        is_left_aside=True,
    ),
    Conflict(
        "worker_pool",
        "with `multiprocessing_context`",
        "made",
        lambda _, facts: facts.start_method is not None,
        "multiprocessing_context={facts.start_method!r} does not go with worker_pool: the pool starts the "
        "processes; pass start_method to WorkerPool instead",
        is_left_aside=True,
    ),
    Conflict(
        "worker_pool",
        "with more workers than it has",
        "made",
        lambda options, facts: (
            not is_auto(options) and facts.loader.num_workers > options.worker_pool.num_workers
        ),
        "num_workers={facts.loader.num_workers} is more than the {options.worker_pool.num_workers} processes "
        "of worker_pool; pass num_workers=0 for as many as the pool has, or make a larger WorkerPool",
    ),
    with_dispatch(
        "worker_pool",
        "its items come from a process of each iterator; leave worker_pool out, and say num_workers",
    ),
)
