"""``worker_concurrency=``: many samples of a worker at once."""

from __future__ import annotations

from ringloader._features import rules
from ringloader._features.rules import of_options, option, with_streams_and_states

WORKER_CONCURRENCY = option(1, check=rules.integer(1), on_torchs="is an error")

RULES = (
    of_options(
        "worker_concurrency",
        'with `seeding="batch"`',
        lambda options: options.seeding == "batch",
        "worker_concurrency={options.worker_concurrency} and seeding='batch' do not go together: samples of "
        "several batches draw at the same time; pass seeding='sample'",
    ),
    *with_streams_and_states(
        "worker_concurrency",
        "its iterator gives one sample after another",
        "samples of later batches have begun by then, and would be in the dataset's state",
    ),
)
