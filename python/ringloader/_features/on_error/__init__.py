"""``on_error=``: samples that raise."""

from __future__ import annotations

from ringloader._features import rules
from ringloader._features.rules import of_loader, of_options, option, with_dispatch
from ringloader.bad_samples import RAISE, RETRY, WORDS, Retry, check_replaces


def _check_on_error(name: str, on_error: object) -> None:
    """Raises for a value of the option ``on_error`` that means nothing.

    Raises:
        TypeError: If it has the wrong type.
        ValueError: If it is another word.
    """
    if isinstance(on_error, str):
        if on_error not in WORDS:
            raise ValueError(
                f"on_error must be one of {WORDS}, a ringloader.Retry or a callable, not {on_error!r}"
            )
    elif on_error is Retry:
        raise TypeError("on_error must be a ringloader.Retry, not the class: pass ringloader.Retry()")
    elif callable(on_error):
        check_replaces(name, on_error)
    elif not isinstance(on_error, Retry):
        raise TypeError(
            f"on_error must be one of {WORDS}, a ringloader.Retry or a callable, not {on_error!r}"
        )


def retries(on_error: object) -> Retry | None:
    """Returns how ``on_error`` has samples asked for again, or None if it does not."""
    if on_error == RETRY:
        return Retry()
    return on_error if isinstance(on_error, Retry) else None


def _raises_first(on_error: object) -> bool:
    """True if the first error that remains is raised."""
    again = retries(on_error)
    return RAISE in (on_error, again and again.then)


ON_ERROR = option(RAISE, check=_check_on_error, on_torchs="is an error", is_called_in_workers=True)
MAX_ERRORS = option(None, check=rules.integer(0, or_none=True), on_torchs="works")

RULES = (
    of_options(
        "max_errors",
        "without `on_error`",
        lambda options: _raises_first(options.on_error),
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
