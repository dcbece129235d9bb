"""The table of options, in the order of the constructor's arguments. Rows and rules lie with their features.

Imports no torch. `make generate` writes signatures, docstrings and pages from it and from each `texts.toml`.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import ringloader.bad_samples as bad_samples
from ringloader._features import (
    auto,
    checks,
    concurrency,
    device,
    joint,
    losses,
    main_prefetch,
    next_epoch,
    on_error,
    pools,
    rollover,
    rules,
    seeding,
    state,
    stats,
    threads,
)
from ringloader._features.about import About, Never, option
from ringloader._features.auto import NUM_WORKERS
from ringloader._features.concurrency import WORKER_CONCURRENCY
from ringloader._features.device import DEVICE, DEVICE_PREFETCH, DEVICE_TRANSFORM
from ringloader._features.joint import WORKER_TASK
from ringloader._features.losses import RESTART_WORKERS, SAMPLE_TIMEOUT, WATCHDOG
from ringloader._features.main_prefetch import MAIN_PREFETCH
from ringloader._features.next_epoch import PREFETCH_EPOCHS
from ringloader._features.on_error import MAX_ERRORS, ON_ERROR
from ringloader._features.pools import WORKER_POOL
from ringloader._features.rollover import LAST_BATCH
from ringloader._features.rules import checked_when, raise_first
from ringloader._features.seeding import SEED, SEEDING, WORKER_RESET_FN
from ringloader._features.state import SNAPSHOT_EVERY_N_STEPS
from ringloader._features.stats import STATS
from ringloader._features.threads import WORKER_METHOD

if TYPE_CHECKING:
    import torch

    from ringloader.seeds import Seeds


@dataclasses.dataclass(frozen=True)
class Options:
    """The keyword-only arguments of ``ringloader.DataLoader``, with all checks that need no torch.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range, or options exclude each other.
    """

    # The names of the options that have another value than their default. Each object has its own.
    changed: ClassVar[tuple[str, ...]] = ()

    max_shared_bytes: int | None = option(
        None,
        check=checks.integer(1, or_none=True),
        in_threads=Never("threads need no shared memory"),
        on_torchs="is left out",
    )
    device: torch.device | str | int | None = DEVICE
    device_prefetch: int = DEVICE_PREFETCH
    device_transform: Callable[[Any], Any] | None = DEVICE_TRANSFORM
    worker_pool: Any = WORKER_POOL
    main_prefetch: int = MAIN_PREFETCH
    worker_method: Literal["multiprocessing", "thread"] = WORKER_METHOD
    worker_task: Literal["batch", "sample"] = WORKER_TASK
    worker_concurrency: int = WORKER_CONCURRENCY
    last_batch: Literal["keep", "discard", "rollover"] | None = LAST_BATCH
    worker_reset_fn: Callable[[Any, Any, Seeds], Any] | None = WORKER_RESET_FN
    seeding: Literal["torch", "epoch", "sample", "batch"] | None = SEEDING
    seed: int | None = SEED
    restart_workers: int = RESTART_WORKERS
    on_error: bad_samples.OnError = ON_ERROR
    max_errors: int | None = MAX_ERRORS
    sample_timeout: float | None = SAMPLE_TIMEOUT
    watchdog: float | None = WATCHDOG
    stats: bool = STATS
    snapshot_every_n_steps: int | None = SNAPSHOT_EVERY_N_STEPS
    num_workers: Literal["auto"] | None = NUM_WORKERS
    prefetch_epochs: bool = PREFETCH_EPOCHS

    def __post_init__(self) -> None:
        values = vars(self)
        # No loop of Python's: most options have the very default.
        given = map(operator.is_not, values.values(), DEFAULTS.values())
        changed: tuple[str, ...] = ()
        for name in [*itertools.compress(values, given)]:
            about, value = TABLE[name], values[name]
            about.check(name, value)
            if value != DEFAULTS[name] and value not in about.as_default:
                changed += (name,)
        vars(self)["changed"] = changed
        if changed:
            raise_first(_GIVEN, self, changed)

    @property
    def seeds(self) -> rules.Seeds:
        """``seeding``, or what it is by default."""
        return rules.seeds_of(self)

    @property
    def seeds_by_place(self) -> Literal["sample", "batch"] | None:
        """The part of an epoch before which generators are set by its place, or None."""
        seeds = self.seeds
        return seeds if seeds == "sample" or seeds == "batch" else None


# The rows by name, in the order of the constructor's arguments.
TABLE: dict[str, About] = {field.name: field.metadata["about"] for field in dataclasses.fields(Options)}
DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Options)}
_FEATURES = (
    auto,
    concurrency,
    device,
    joint,
    losses,
    main_prefetch,
    next_epoch,
    on_error,
    pools,
    rollover,
    seeding,
    state,
    stats,
    threads,
)
RULES = (*threads.rules_of(TABLE, DEFAULTS), *(rule for feature in _FEATURES for rule in feature.RULES))
_GIVEN = checked_when("given", RULES)
