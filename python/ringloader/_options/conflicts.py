"""Options that do not go with a loader: each rule once, for the constructor, ``convert`` and ``install``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import ringloader.bad_samples as bad_samples
from ringloader._common.looking import has_method
from ringloader._dispatch.dataset import Dispatch
from ringloader._options import epochs
from ringloader._options.checks import THREAD
from ringloader._options.table import Options
from ringloader._torch import internals, select_path


def check(loader: Any, options: Options) -> None:
    """Raises a ``ValueError`` for options that do not go with ``loader``."""
    for _, text in _conflicts(loader, options):
        raise ValueError(text)


def fitting(loader: Any, options: Options) -> tuple[Options, list[str]]:
    """Leaves aside options that do not go with ``loader``.

    Returns:
        The other options, and the texts of the conflicts.
    """
    texts = []
    while (conflict := next(_conflicts(loader, options), None)) is not None:
        names, text = conflict
        options = dataclasses.replace(options, **{name: getattr(Options, name) for name in names})
        texts.append(text)
        if "worker_method" in names:
            select_path.say_once(f"install(worker_method={THREAD!r}) leaves a loader its processes: {text}")
    return options, texts


# Options that `install` leaves aside; what the first of them does not go with; and why, with what to change.
_Rule = tuple[tuple[str, ...], str, str]


def _conflicts(loader: Any, options: Options) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields, for each rule that a loader breaks, the options to leave aside, and the error."""
    for names, what, why in _rules(loader, options):
        given = f"{names[0]}={getattr(options, names[0])!r}"
        yield names, f"{given} and {what} do not go together: {why}"


def _rules(loader: Any, options: Options) -> Iterator[_Rule]:
    """Yields the rules that a loader breaks."""
    is_dispatch = isinstance(loader.dataset, Dispatch)
    yield from _of_workers(loader, options)
    if options.worker_method == THREAD and loader.num_workers > 0:
        yield from _of_threads(loader)
    if is_dispatch:
        yield from _of_dispatch(options)
    if options.prefetch_epochs:
        yield from _of_next_epoch(loader, options)
    is_iterable = loader._dataset_kind == internals.ITERABLE
    yield from bad_samples.conflicts(options, is_iterable, is_dispatch)


def _of_workers(loader: Any, options: Options) -> Iterator[_Rule]:
    # With a pool, a loader that says no number has as many workers as the pool.
    if loader.num_workers == 0 and options.worker_pool is None:
        if options.worker_prefetch is not None:
            yield ("worker_prefetch",), "num_workers=0", "there is no worker to have batches ready"
        if options.main_prefetch:
            why = "without workers nothing is there to be decoded; use num_workers=1"
            yield ("main_prefetch",), "num_workers=0", why
    elif options.main_prefetch and loader.pin_memory:
        why = "batches are pinned before their turn in any case; leave main_prefetch out"
        yield ("main_prefetch",), "pin_memory=True", why


def _of_threads(loader: Any) -> Iterator[_Rule]:
    names = ("worker_method",)
    context = loader.multiprocessing_context
    if context is not None:
        why = "threads are not started by a context; leave one of them out"
        yield names, f"multiprocessing_context={context!r}", why
    if isinstance(loader.dataset, internals.DATA_PIPES):
        why = "each worker needs a copy of its graph; leave worker_method out, or use a Dataset"
        yield names, "a DataPipe as dataset", why
    if isinstance(loader.dataset, Dispatch):
        yield (
            names,
            "a Dispatch as dataset",
            "its items go to worker processes; leave worker_method out, or pass the source itself with "
            "num_workers=1",
        )


def _of_next_epoch(loader: Any, options: Options) -> Iterator[_Rule]:
    names = ("prefetch_epochs",)
    dataset = loader.dataset
    has_state = all(has_method(dataset, name) for name in ("state_dict", "load_state_dict"))
    if not (loader.persistent_workers and loader.num_workers > 0):
        yield (
            names,
            f"persistent_workers={loader.persistent_workers} with num_workers={loader.num_workers}",
            "workers that end with their epoch can begin no other; pass persistent_workers=True, a "
            "worker_pool to ringloader.DataLoader, or leave prefetch_epochs out",
        )
    elif loader._dataset_kind == internals.ITERABLE:
        yield (
            names,
            "an IterableDataset",
            "its iterator would begin again before iter() asks for it, and what it gave to an epoch that "
            "is dropped would be lost; leave prefetch_epochs out",
        )
    elif has_state and options.snapshot_every_n_steps is not None:
        yield (
            names,
            "a dataset with a state_dict",
            "its state between two epochs would be one of the next; leave prefetch_epochs out, or pass "
            "snapshot_every_n_steps=None",
        )
    elif options.worker_method == THREAD and epochs.epoch_listeners(dataset):
        yield (
            names,
            f"worker_method={THREAD!r} over a dataset with set_epoch",
            "threads share the dataset, which is in one epoch at a time; leave one of them out",
        )


_NOT_WITH_DISPATCH = {
    "worker_pool": "its items come from a process of each iterator; leave worker_pool out, and say "
    "num_workers",
    "restart_workers": "items that a worker had taken are lost with it; leave restart_workers out",
    "worker_reset_fn": "workers have no dataset that an epoch could begin with; leave one of them out",
}


def _of_dispatch(options: Options) -> Iterator[_Rule]:
    for name in options.changed():
        if name in _NOT_WITH_DISPATCH:
            yield (name,), "a Dispatch as dataset", _NOT_WITH_DISPATCH[name]
