"""``on_error=``: samples that raise."""

from __future__ import annotations

import ringloader.bad_samples as bad_samples
from ringloader._features import rules
from ringloader._features.rules import of_loader, of_options, option, with_dispatch
from ringloader.bad_samples import raises_first, retries

ON_ERROR = option(
    bad_samples.RAISE, check=bad_samples.check_on_error, on_torchs="is an error", is_called_in_workers=True
)
MAX_ERRORS = option(None, check=rules.integer(0, or_none=True), on_torchs="works")

RULES = (
    of_options(
        "max_errors",
        "without `on_error`",
        lambda options: raises_first(options.on_error),
        "max_errors={options.max_errors} has no effect with on_error={options.on_error!r}: the first error "
        "is raised; to handle further errors pass on_error='skip', or Retry(then=...)",
    ),
    with_dispatch(
        "on_error",
        "its items are read in one process for all workers; catch errors in its functions, or leave on_error "
        "out",
    ),
    of_loader(
        "on_error",
        "with an `IterableDataset`",
        lambda options, facts: facts.is_iterable and retries(options.on_error) is not None,
        "an IterableDataset",
        "its next sample would be another one; use 'skip', or a function of the index and the error",
        '"retry"',
    ),
)
