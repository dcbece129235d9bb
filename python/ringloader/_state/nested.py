"""Parts of a state that samplers inside a sampler have: a generator, an epoch, a rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

# Attributes with the rank, and with the number of ranks: torch's and accelerate's.
_RANKS = (("rank", "num_replicas"), ("process_index", "num_processes"))


def samplers(outermost: Any) -> Iterator[Any]:
    """Yields a sampler, and the samplers inside it that attributes name."""
    found: list[Any] = []
    at = outermost
    while at is not None and not any(at is one for one in found):
        found.append(at)
        yield at
        at = getattr(at, "batch_sampler", None) or getattr(at, "sampler", None)


def generator(outermost: Any, of_loader: torch.Generator | None) -> torch.Generator | None:
    """Returns the first generator that is neither the loader's nor the program's."""
    for sampler in samplers(outermost):
        found = getattr(sampler, "generator", None)
        if isinstance(found, torch.Generator) and found not in (of_loader, torch.default_generator):
            return found
    return None


def with_epoch(outermost: Any) -> Any:
    """Returns the first sampler that has an epoch, which can be set; None if there is none."""
    return next((sampler for sampler in samplers(outermost) if has_epoch(sampler)), None)


def has_epoch(sampler: Any) -> bool:
    """True if a sampler has an epoch, which can be set."""
    return _is_count(getattr(sampler, "epoch", None)) and hasattr(sampler, "set_epoch")


def rank(outermost: Any) -> tuple[int | None, int | None]:
    """Returns the rank that the first sampler with one reads for, and the number of ranks."""
    for sampler in samplers(outermost):
        for names in _RANKS:
            found = tuple(getattr(sampler, name, None) for name in names)
            if all(map(_is_count, found)):
                return found  # type: ignore[return-value]
    return None, None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
