"""``worker_method="thread"``: threads as workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ringloader._features import rules
from ringloader._features.rules import (
    THREAD,
    About,
    Conflict,
    Facts,
    Never,
    is_auto,
    of_loader,
    of_options,
    option,
)

_AS_THREADS = f'"{THREAD}"'

WORKER_METHOD = option(
    "multiprocessing",
    check=rules.one_of("multiprocessing", THREAD),
    # By `RINGLOADER=off` only. Where a part of torch was replaced, threads are refused before.
    on_torchs="is left out",
    # The dataset may be one that no process can be sent, or draw from the generators of its thread.
    off_linux="is an error with workers",
)


def _has_threads(options: Any, facts: Facts) -> object:
    return options.worker_method == THREAD and (is_auto(options) or facts.loader.num_workers > 0)


RULES = (
    of_loader(
        "worker_method",
        "with `multiprocessing_context`",
        lambda options, facts: _has_threads(options, facts) and facts.start_method is not None,
        "multiprocessing_context={facts.start_method!r}",
        "threads are not started by a context; leave one of them out",
        _AS_THREADS,
    ),
    of_loader(
        "worker_method",
        "with a DataPipe",
        lambda options, facts: _has_threads(options, facts) and facts.is_data_pipe,
        "a DataPipe as dataset",
        "each worker needs a copy of its graph; leave worker_method out, or use a Dataset",
        _AS_THREADS,
    ),
    of_loader(
        "worker_method",
        "with a `Dispatch`",
        lambda options, facts: _has_threads(options, facts) and facts.is_dispatch,
        "a Dispatch as dataset",
        "its items go to worker processes; leave worker_method out, or pass the source itself with "
        "num_workers=1",
        _AS_THREADS,
    ),
)


def rules_of(table: Mapping[str, About], defaults: Mapping[str, Any]) -> Iterable[Conflict]:
    """Yields the rules for options that raise where workers are threads, by the column ``in_threads``."""
    for name, about in table.items():
        if isinstance(about.in_threads, Never):
            yield _never(name, defaults[name], about.in_threads.why)


def _never(option: str, default: Any, why: str) -> Conflict:
    return of_options(
        "worker_method",
        f"with `{option}`",
        lambda options: options.worker_method == THREAD and getattr(options, option) != default,
        f"worker_method={THREAD!r} and {option}={{options.{option}!r}} do not go together: {why}; leave one "
        "of them out",
        _AS_THREADS,
    )
