"""Options as the ways in get them: by their names, and as text. Imports no torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from ringloader._features import rules
from ringloader._features.table import TABLE, Options

if TYPE_CHECKING:
    import torch

    from ringloader._features.pools.pool import WorkerPool
    from ringloader.bad_samples import OnError
    from ringloader.seeds import Seeds

# The argument of `install` that is no option of a loader.
STATEFUL = "stateful"
# Names of options before the first release, with what says the same now.
REMOVED = {
    "worker_prefetch": "pass prefetch_factor to DataLoader",
    "reseed_workers": "reseed_workers=True is now seeding='epoch'",
    "auto_workers": "auto_workers=True is now num_workers='auto'",
}


def checked(function: str, given: Mapping[str, Any]) -> Options:
    """Returns the options that were given to ``function``.

    Raises:
        TypeError: For a name that is none, or a value of the wrong type.
        ValueError: For a value that is out of range.
    """
    check_names(function, given)
    return Options(**given)


def check_names(function: str, given: Iterable[str], others: Sequence[str] = (STATEFUL,)) -> None:
    """Raises a ``TypeError`` for a name that is no option's.

    Args:
        function: The function, for the error.
        given: The names that it was given.
        others: The arguments of the function that are no options.
    """
    for name in given:
        if name in REMOVED:
            raise TypeError(f"{function} has no option {name!r} any more: {REMOVED[name]}")
        if name not in TABLE:
            taken = [name for name, about in TABLE.items() if about.instead is None]
            raise TypeError(
                f"{function} got an unknown option {name!r}; there are: {', '.join([*others, *taken])}"
            )
        instead = TABLE[name].instead
        if instead is not None:
            raise TypeError(f"{function} cannot take {name}: pass it to DataLoader, or {instead}")


def from_text(text: str) -> tuple[Options, bool]:
    """Returns options as an environment variable or a command line names them.

    Args:
        text: ``1`` for the defaults, or ``name=value`` with commas between.

    Returns:
        The options of loaders, and the argument ``stateful`` of ``install``.

    Raises:
        TypeError: For a name that is none, or a value of the wrong type.
        ValueError: For a value that is out of range, or a text that says nothing.
    """
    given: dict[str, Any] = {}
    for part in [] if text == "1" else text.split(","):
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"expected 1, or name=value with commas between, not {text!r}")
        given[name.strip()] = value_of(value)
    stateful = given.pop(STATEFUL, False)
    rules.boolean(STATEFUL, stateful)
    return checked(repr(text), given), stateful


# Decimal and binary units.
_BYTES = {
    unit: base**power
    for base, units in ((1000, ("kB", "MB", "GB", "TB")), (1024, ("KiB", "MiB", "GiB", "TiB")))
    for power, unit in enumerate(units, start=1)
}
_SIZE = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_BYTES)})", re.ASCII)


def value_of(text: str) -> object:
    """Returns a number, None or a truth value if ``text`` spells one, else ``text``. ``1GB`` is a number."""
    size = _SIZE.fullmatch(text.strip())
    if size is not None:
        return int(float(size[1]) * _BYTES[size[2]])
    try:
        return ast.literal_eval(text.strip())
    except (SyntaxError, ValueError):
        return text


class GivenOptions(TypedDict, total=False):
    """Options by their names, for type checkers."""

    max_shared_bytes: int | None
    device: torch.device | str | int | None
    device_prefetch: int
    device_transform: Callable[[Any], Any] | None
    worker_pool: WorkerPool | None
    main_prefetch: int
    worker_method: Literal["multiprocessing", "thread"]
    worker_task: Literal["batch", "sample"]
    worker_concurrency: int
    worker_reset_fn: Callable[[Any, Any, Seeds], Any] | None
    seeding: Literal["torch", "epoch", "sample", "batch"] | None
    seed: int | None
    restart_workers: int
    on_error: OnError
    max_errors: int | None
    sample_timeout: float | None
    watchdog: float | None
    stats: bool
    num_workers: Literal["auto"] | None
    prefetch_epochs: bool
