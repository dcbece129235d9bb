"""Batches that do not come in time: messages about them, errors, and samples that take too long."""

from __future__ import annotations

from ringloader._features import rules
from ringloader._features.rules import Never, has_remote_pool, of_loader, of_options, option, with_dispatch

RESTART_WORKERS = option(
    0,
    check=rules.integer(0),
    in_threads=Never("a thread is lost only with the process"),
    on_torchs="is left out",
)
SAMPLE_TIMEOUT = option(
    None, check=rules.seconds_or_none, in_threads=Never("a thread cannot be killed"), on_torchs="is left out"
)
WATCHDOG = option(None, check=rules.seconds_or_none, on_torchs="is left out")

RULES = (
    of_options(
        "restart_workers",
        "with `Workers` on a cluster",
        has_remote_pool,
        "restart_workers={options.restart_workers} and worker_pool={options.worker_pool!r} do not go "
        "together: lost workers of a cluster are always replaced; set retries= of Workers instead",
    ),
    of_options(
        "sample_timeout",
        "with `Workers` on a cluster",
        has_remote_pool,
        "sample_timeout={options.sample_timeout} and worker_pool={options.worker_pool!r} do not go together: "
        "only workers of this machine are ended for a sample; leave sample_timeout out, or use timeout",
    ),
    with_dispatch(
        "restart_workers",
        "items that a worker had taken are lost with it; leave restart_workers out",
    ),
    with_dispatch(
        "sample_timeout",
        "items that a worker had taken are lost with it; leave sample_timeout out, or use timeout",
    ),
    of_loader(
        "sample_timeout",
        "with an `IterableDataset`",
        lambda _, facts: facts.is_iterable and not facts.is_dispatch,
        "an IterableDataset",
        "a successor could not continue in the middle of a part; use timeout, or watchdog",
    ),
)
