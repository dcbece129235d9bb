"""``seeding=``, ``set_epoch`` and ``worker_reset_fn``: seeds, and the numbers of epochs."""

from __future__ import annotations

from typing import Any

from ringloader._features import rules
from ringloader._features.rules import of_options, option, seeds_of, with_dispatch


def _check_seed(name: str, value: Any) -> None:
    if value is None:
        return
    if not rules.is_int(value):
        raise TypeError(f"{name} must be an int or None, not {value!r}")
    if not 0 <= value < 1 << 64:
        raise ValueError(f"{name} must be from 0 up to and without {1 << 64}, not {value}")


WORKER_RESET_FN = option(
    None,
    check=rules.callable_or_none,
    in_worker="is left out by install",
    on_torchs="is an error",
    is_text=False,
    is_called_in_workers=True,
)
SEEDING = option(
    None,
    check=rules.one_of("torch", "epoch", "sample", "batch", or_none=True),
    as_default=("torch",),
    in_worker="is left out by install",
    on_torchs="is an error",
)
SEED = option(None, check=_check_seed, in_worker="is left out by install", on_torchs="works")


def _needs_seed(options: Any) -> object:
    return options.worker_reset_fn is not None or seeds_of(options) != "torch"


RULES = (
    of_options(
        "seed",
        "without `worker_reset_fn` or `seeding`",
        lambda options: not _needs_seed(options),
        "seed={options.seed} has no effect without worker_reset_fn, or seeding='epoch', 'sample' or 'batch': "
        "for the order of the samples, pass torch's generator",
    ),
    with_dispatch(
        "worker_reset_fn",
        "workers have no dataset that an epoch could begin with; leave one of them out",
    ),
)
