"""``prefetch_epochs=``: the next epoch begins before ``iter``."""

from __future__ import annotations

from ringloader._features import rules
from ringloader._features.rules import THREAD, of_loader, option, with_streams_and_states

PREFETCH_EPOCHS = option(False, check=rules.boolean, on_torchs="is left out")

RULES = (
    of_loader(
        "prefetch_epochs",
        "without `persistent_workers` or `worker_pool`",
        lambda _, facts: not (facts.loader.persistent_workers and facts.loader.num_workers > 0),
        "persistent_workers={facts.loader.persistent_workers} with num_workers={facts.loader.num_workers}",
        "workers that end with their epoch begin no other; pass persistent_workers=True, a worker_pool "
        "to ringloader.DataLoader, or leave prefetch_epochs out",
    ),
    *with_streams_and_states(
        "prefetch_epochs",
        "its iterator would begin before iter(), and a dropped epoch would lose its items",
        "its state between two epochs would be that of the next",
    ),
    of_loader(
        "prefetch_epochs",
        'with `worker_method="thread"`, if the dataset has `set_epoch`',
        lambda options, facts: options.worker_method == THREAD and facts.has_set_epoch,
        f"worker_method={THREAD!r} over a dataset with set_epoch",
        "threads share the dataset, which is in one epoch at a time; leave one of them out",
    ),
)
