"""The options that ``install`` and ``convert`` take, with their types."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    import torch

    from ringloader._features.pools.pool import WorkerPool
    from ringloader.bad_samples import OnError
    from ringloader.seeds import Seeds


class GivenOptions(TypedDict, total=False):
    """Options by their names, for type checkers."""

    max_shared_bytes: int | None
    device: torch.device | str | int | None
    device_prefetch: int
    device_transform: Callable[[Any], Any] | None
    worker_pool: WorkerPool | None
    main_prefetch: int
    worker_method: Literal["multiprocessing", "thread"]
    worker_task: Literal["batch", "sample"]
    worker_concurrency: int
    worker_reset_fn: Callable[[Any, Any, Seeds], Any] | None
    seeding: Literal["torch", "epoch", "sample", "batch"] | None
    seed: int | None
    restart_workers: int
    on_error: OnError
    max_errors: int | None
    sample_timeout: float | None
    watchdog: float | None
    stats: bool
    num_workers: Literal["auto"] | None
    prefetch_epochs: bool
