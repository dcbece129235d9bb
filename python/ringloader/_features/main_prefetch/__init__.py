"""``main_prefetch=``: batches are decoded before their turn."""

from __future__ import annotations

from ringloader._features import rules
from ringloader._features.rules import Never, is_without_workers, of_loader, of_options, option

MAIN_PREFETCH = option(
    0,
    check=rules.integer(0),
    in_threads=Never("batches of threads are not pickled"),
    on_torchs="is left out",
)

RULES = (
    of_options(
        "main_prefetch",
        "with `device`",
        lambda options: options.device is not None,
        "main_prefetch={options.main_prefetch} and device={options.device!r} do not go together: batches for "
        "a device are prepared before their turn anyway; say with device_prefetch how many",
    ),
    of_loader(
        "main_prefetch",
        "without workers",
        is_without_workers,
        "num_workers=0",
        "without workers there is nothing to unpickle; use num_workers=1",
    ),
    of_loader(
        "main_prefetch",
        "with `pin_memory`",
        lambda _, facts: facts.loader.pin_memory,
        "pin_memory=True",
        "batches are pinned before their turn in any case; leave main_prefetch out",
    ),
)
