"""The table of options: all there is to know about each, but for its texts and the rules.

Imports no torch. `make generate` writes signatures, docstrings and pages from it and from `texts.toml`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import ringloader.bad_samples as bad_samples
from ringloader._core import checks
from ringloader._core.conflict import checked_when, raise_first
from ringloader._features import rules
from ringloader._features.about import About, Never, given_of

if TYPE_CHECKING:
    import torch

    from ringloader.seeds import Seeds


def _option(default: Any, **about: Any) -> Any:
    return dataclasses.field(default=default, metadata={"about": About(**about)})


@dataclasses.dataclass(frozen=True)
class Options:
    """The keyword-only arguments of ``ringloader.DataLoader``, with all checks that need no torch.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range, or options exclude each other.
    """

    # The names of the options that have another value than their default. Each object has its own.
    changed: ClassVar[tuple[str, ...]] = ()

    max_shared_bytes: int | None = _option(
        None,
        check=checks.integer(1, or_none=True),
        in_threads=Never("threads need no shared memory"),
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="is left out",
    )
    device: torch.device | str | int | None = _option(
        None,
        check=checks.device,
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="is left out",
        on_torchs="works",
    )
    device_prefetch: int = _option(
        2,
        check=checks.integer(0),
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="is left out",
    )
    device_transform: Callable[[Any], Any] | None = _option(
        None,
        check=checks.callable_or_none,
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="is left out",
        on_torchs="works",
        is_text=False,
    )
    # A `ringloader.WorkerPool`: its module needs torch.
    worker_pool: Any = _option(
        None,
        check=checks.worker_pool,
        in_threads=Never("a pool has processes"),
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="works",
        is_text=False,
        annotation="WorkerPool | None",
    )
    main_prefetch: int = _option(
        0,
        check=checks.integer(0),
        in_threads=Never("what threads make needs no decoding"),
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="is left out",
    )
    worker_method: Literal["multiprocessing", "thread"] = _option(
        "multiprocessing",
        check=checks.one_of("multiprocessing", checks.THREAD),
        # By `RINGLOADER=off` only. Where a part of torch was replaced, threads are refused before.
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="is left out",
        # The dataset may be one that no process can be sent, or draw from the generators of its thread.
        off_linux="is an error with workers",
    )
    worker_task: Literal["batch", "sample"] = _option(
        "batch",
        check=checks.one_of("batch", "sample"),
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="is an error",
    )
    last_batch: Literal["keep", "discard", "rollover"] | None = _option(
        None,
        check=checks.last_batch,
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="works",
        instead="give the loader a ringloader.RolloverBatchSampler",
    )
    worker_reset_fn: Callable[[Any, Any, Seeds], Any] | None = _option(
        None,
        check=checks.callable_or_none,
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="is left out by install",
        on_torchs="is an error",
        is_text=False,
        is_called_in_workers=True,
    )
    seeding: Literal["torch", "epoch", "sample", "batch"] | None = _option(
        None,
        check=checks.one_of("torch", "epoch", "sample", "batch", or_none=True),
        as_default=("torch",),
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="is left out by install",
        on_torchs="is an error",
    )
    seed: int | None = _option(
        None,
        check=checks.seed,
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="is left out by install",
        on_torchs="works",
    )
    restart_workers: int = _option(
        0,
        check=checks.integer(0),
        in_threads=Never("a thread is lost only with the process"),
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="is left out",
    )
    on_error: bad_samples.OnError = _option(
        bad_samples.RAISE,
        check=bad_samples.check_on_error,
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="is an error",
        is_called_in_workers=True,
    )
    max_errors: int | None = _option(
        None,
        check=checks.integer(0, or_none=True),
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="works",
    )
    sample_timeout: float | None = _option(
        None,
        check=checks.seconds_or_none,
        in_threads=Never("a thread cannot be ended"),
        in_pool="is undone",
        in_worker="works",
        on_torchs="is left out",
    )
    watchdog: float | None = _option(
        None,
        check=checks.seconds_or_none,
        in_threads="works",
        in_pool="is undone",
        in_worker="works",
        on_torchs="is left out",
    )

    stats: bool = _option(
        False,
        check=checks.boolean,
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="works",
        # The clock is native.
        off_linux="is left out",
    )
    snapshot_every_n_steps: int | None = _option(
        1,
        check=checks.integer(1, or_none=True),
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="is left out",
        instead="use ringloader.StatefulDataLoader, whose loaders have a state",
        is_of_states=True,
    )

    num_workers: Literal["auto"] | None = _option(
        None,
        check=checks.auto_or_none,
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="is left out",
        on_torchs="works",
        is_torchs=True,
    )
    prefetch_epochs: bool = _option(
        False,
        check=checks.boolean,
        in_threads="works",
        in_pool="leaves nothing",
        in_worker="works",
        on_torchs="is left out",
    )

    def __post_init__(self) -> None:
        given = given_of(vars(self), DEFAULTS)
        for name, value in given.items():
            TABLE[name].check(name, value)
        changed = tuple(
            name
            for name, value in given.items()
            if value != DEFAULTS[name] and value not in TABLE[name].as_default
        )
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
RULES = rules.all_of(TABLE, DEFAULTS)
_GIVEN = checked_when("given", RULES)
