"""Options that do not go with a loader: each rule once, for the constructor, ``convert`` and ``install``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from ringloader._dispatch.dataset import Dispatch
from ringloader._options import epochs
from ringloader._options.checks import THREAD
from ringloader._options.table import Options
from ringloader._torch import internals, select_path
from ringloader.bad_samples import RAISE, retries


class Conflict(NamedTuple):
    """Options that do not go with a loader.

    Attributes:
        names: The options that ``install`` leaves aside for this loader.
        text: The error, with what to change.
    """

    names: tuple[str, ...]
    text: str


def check(loader: Any, options: Options) -> None:
    """Raises a ``ValueError`` for options that do not go with ``loader``."""
    for conflict in _conflicts(loader, options):
        raise ValueError(conflict.text)


def fitting(loader: Any, options: Options) -> tuple[Options, list[str]]:
    """Leaves aside options that do not go with ``loader``.

    Returns:
        The other options, and the texts of the conflicts.
    """
    texts = []
    while (conflict := next(_conflicts(loader, options), None)) is not None:
        options = dataclasses.replace(options, **{name: getattr(Options, name) for name in conflict.names})
        texts.append(conflict.text)
        if "worker_method" in conflict.names:
            select_path.say_once(
                f"install(worker_method={THREAD!r}) leaves a loader its processes: {conflict.text}"
            )
    return options, texts


def _conflicts(loader: Any, options: Options) -> Iterator[Conflict]:
    yield from _of_workers(loader, options)
    if options.worker_method == THREAD and loader.num_workers > 0:
        yield from _of_threads(loader)
    if isinstance(loader.dataset, Dispatch):
        yield from _of_dispatch(options)
    if options.prefetch_epochs:
        yield from _of_next_epoch(loader, options)
    if loader._dataset_kind == internals.ITERABLE and retries(options.on_error) is not None:
        yield Conflict(
            ("on_error", "max_errors"),
            f"on_error={options.on_error!r} and an IterableDataset do not go together: its next sample would "
            "be another one; use 'skip', or a function of the index and the error",
        )


def _of_workers(loader: Any, options: Options) -> Iterator[Conflict]:
    # With a pool, a loader that says no number has as many workers as the pool.
    if loader.num_workers == 0 and options.worker_pool is None:
        if options.worker_prefetch is not None:
            yield Conflict(
                ("worker_prefetch",),
                f"worker_prefetch={options.worker_prefetch} and num_workers=0 do not go together: there is "
                "no worker to have batches ready",
            )
        if options.main_prefetch:
            yield Conflict(
                ("main_prefetch",),
                f"main_prefetch={options.main_prefetch} and num_workers=0 do not go together: without "
                "workers nothing is there to be decoded; use num_workers=1",
            )
    elif options.main_prefetch and loader.pin_memory:
        yield Conflict(
            ("main_prefetch",),
            f"main_prefetch={options.main_prefetch} and pin_memory=True do not go together: batches are "
            "pinned before their turn in any case; leave main_prefetch out",
        )


def _of_threads(loader: Any) -> Iterator[Conflict]:
    context = loader.multiprocessing_context
    if context is not None:
        yield _thread_conflict(
            f"multiprocessing_context={context!r}",
            "threads are not started by a context; leave one of them out",
        )
    if isinstance(loader.dataset, internals.DATA_PIPES):
        yield _thread_conflict(
            "a DataPipe as dataset",
            "each worker needs a copy of its graph; leave worker_method out, or use a Dataset",
        )
    if isinstance(loader.dataset, Dispatch):
        yield _thread_conflict(
            "a Dispatch as dataset",
            "its items go to worker processes; leave worker_method out, or pass the source itself with "
            "num_workers=1",
        )


def _thread_conflict(what: str, why: str) -> Conflict:
    return Conflict(("worker_method",), f"worker_method={THREAD!r} and {what} do not go together: {why}")


def _of_next_epoch(loader: Any, options: Options) -> Iterator[Conflict]:
    dataset = loader.dataset
    has_state = all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))
    if not (loader.persistent_workers and loader.num_workers > 0):
        yield _next_epoch_conflict(
            f"persistent_workers={loader.persistent_workers} with num_workers={loader.num_workers}",
            "workers that end with their epoch can begin no other; pass persistent_workers=True, a "
            "worker_pool to ringloader.DataLoader, or leave prefetch_epochs out",
        )
    elif loader._dataset_kind == internals.ITERABLE:
        yield _next_epoch_conflict(
            "an IterableDataset",
            "its iterator would begin again before iter() asks for it, and what it gave to an epoch that "
            "is dropped would be lost; leave prefetch_epochs out",
        )
    elif has_state and options.snapshot_every_n_steps is not None:
        yield _next_epoch_conflict(
            "a dataset with a state_dict",
            "its state between two epochs would be one of the next; leave prefetch_epochs out, or pass "
            "snapshot_every_n_steps=None",
        )
    elif options.worker_method == THREAD and epochs.epoch_listeners(dataset):
        yield _next_epoch_conflict(
            f"worker_method={THREAD!r} over a dataset with set_epoch",
            "threads share the dataset, which is in one epoch at a time; leave one of them out",
        )


def _next_epoch_conflict(what: str, why: str) -> Conflict:
    return Conflict(("prefetch_epochs",), f"prefetch_epochs=True and {what} do not go together: {why}")


def _of_dispatch(options: Options) -> Iterator[Conflict]:
    rules = (
        (
            ("worker_pool",),
            "its items come from a process of each iterator; leave worker_pool out, and say num_workers",
        ),
        (
            ("restart_workers",),
            "items that a worker had taken are lost with it; leave restart_workers out",
        ),
        (
            ("worker_reset_fn",),
            "workers have no dataset that an epoch could begin with; leave one of them out",
        ),
        (
            ("on_error", "max_errors"),
            "its items are read in one process for all workers; catch errors in its functions, or leave "
            "on_error out",
        ),
    )
    for names, why in rules:
        value = getattr(options, names[0])
        if value not in (None, 0, RAISE):
            yield Conflict(names, f"{names[0]}={value!r} and a Dispatch as dataset do not go together: {why}")
