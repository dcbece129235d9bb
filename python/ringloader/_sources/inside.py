"""Samplers inside samplers, as stored in attributes of instances, and their epochs and ranks.

A sampler may be any object. No code of its class runs here: attributes are read from instances' dicts, and an
attribute that is found in no other way counts as not known.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ringloader._common.attributes import class_has_method, stored

# Levels of samplers inside samplers: more than real programs have.
_MOST_LEVELS = 8


def samplers_in(outermost: Any) -> Iterator[Any]:
    """Yields a sampler, and the samplers inside it."""
    at = outermost
    for _ in range(_MOST_LEVELS):
        yield at
        inner = stored(at, "batch_sampler")
        at = stored(at, "sampler") if inner is None else inner
        if at is None:
            return


def with_epoch(outermost: Any) -> Any:
    """Returns the first sampler that has an epoch, which can be set; None if there is none."""
    return next((sampler for sampler in samplers_in(outermost) if has_epoch(sampler)), None)


def has_epoch(sampler: Any) -> bool:
    """True if a sampler has an epoch, which can be set."""
    return is_count(stored(sampler, "epoch")) and class_has_method(sampler, "set_epoch")


def epoch_of(outermost: Any) -> int | None:
    """Returns a sampler's next epoch; None for a sampler without epochs."""
    sampler = with_epoch(outermost)
    return None if sampler is None else int(stored(sampler, "epoch"))


def is_count(value: object) -> bool:
    kind = type(value)
    return issubclass(kind, int) and kind is not bool and value >= 0  # type: ignore[operator]
