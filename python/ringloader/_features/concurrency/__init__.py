"""``worker_concurrency=``: many samples of a worker at once."""

from __future__ import annotations

from ringloader._features import rules
from ringloader._features.rules import of_loader, of_options, option

WORKER_CONCURRENCY = option(1, check=rules.integer(1), on_torchs="is an error")

RULES = (
    of_options(
        "worker_concurrency",
        'with `seeding="batch"`',
        lambda options: options.seeding == "batch",
        "worker_concurrency={options.worker_concurrency} and seeding='batch' do not go together: samples of "
        "several batches draw at the same time; pass seeding='sample'",
    ),
    of_loader(
        "worker_concurrency",
        "with an `IterableDataset`",
        lambda _, facts: facts.is_iterable,
        "an IterableDataset",
        "its iterator gives one sample after another; leave worker_concurrency out",
    ),
    of_loader(
        "worker_concurrency",
        "with a dataset that has a `state_dict`",
        lambda options, facts: options.snapshot_every_n_steps is not None and facts.is_asked_for_states,
        "a dataset with a state_dict",
        "samples of later batches have begun by then, and would be in the dataset's state; leave "
        "worker_concurrency out, or pass snapshot_every_n_steps=None",
    ),
)
