"""``worker_task="sample"``: all workers make the samples of a batch together."""

from __future__ import annotations

from ringloader._features import rules
from ringloader._features.rules import has_remote_pool, of_options, option, shares, with_streams_and_states

_AS_SAMPLES = '"sample"'

WORKER_TASK = option("batch", check=rules.one_of("batch", "sample"), on_torchs="is an error")

RULES = (
    of_options(
        "worker_task",
        'with another `seeding` than `"sample"`',
        lambda options: shares(options) and options.seeding not in (None, "sample"),
        "worker_task='sample' and seeding={options.seeding!r} do not go together: which worker makes a "
        "sample depends on timing, so random numbers must be the sample's; leave seeding out",
        _AS_SAMPLES,
    ),
    of_options(
        "worker_task",
        "with `Workers` on a cluster",
        lambda options: shares(options) and has_remote_pool(options),
        "worker_task='sample' and worker_pool={options.worker_pool!r} do not go together: workers on other "
        "machines cannot have parts of one batch in a memory that they share; leave worker_task out",
        _AS_SAMPLES,
    ),
    *with_streams_and_states(
        "worker_task",
        "each worker has an iterator of its own, whose samples no other can make",
        "which samples a worker has made depends on timing, and so would its dataset's state",
        _AS_SAMPLES,
    ),
)
