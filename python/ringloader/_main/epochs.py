"""Which epoch it is, and what options do when one begins."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import torch.distributed

from ringloader._common.epoch_listeners import epoch_listeners
from ringloader._common.weak_registry import WeakRegistry
from ringloader._options import Options
from ringloader._torch import internals, select_path
from ringloader._worker import fetch
from ringloader._worker.epochs import EpochStep, TellingStep

# On a loader that counts: the epoch that begins next.
_NEXT = "_ringloader_next_epoch"
# On a loader: which epoch it told its dataset last; None for a pool's loader that did not.
_TOLD = "_ringloader_told_epoch"
# For each dataset, the epoch that it was told last, by any loader.
_told_last: WeakRegistry[int] = WeakRegistry()


def step_for(loader: Any, options: Options) -> EpochStep | None:
    """What an iterator does when its epochs begin, if options say so; its first epoch is counted here."""
    # Without workers the generators are the program's own.
    reseeds = options.reseed_workers and loader.num_workers > 0
    if options.worker_reset_fn is None and not reseeds:
        return None
    rank, world_size = _ranks()
    epoch = _take_next(loader)
    return EpochStep(options.worker_reset_fn, reseeds, options.seed, epoch, rank, world_size)


def take_over(loader: Any) -> None:
    """A new loader has the epoch that its dataset was told before: frameworks make loaders anew."""
    if not hasattr(loader, _TOLD):
        setattr(loader, _TOLD, _last_of(loader))


def telling_for(loader: Any) -> tuple[TellingStep, ...]:
    """For a pool's workers: the loader's own epoch, whatever their dataset was told before."""
    take_over(loader)
    told = getattr(loader, _TOLD)
    if told is None and _last_of(loader) is not None:
        # Another loader's epoch, which the dataset may have, is not this one's.
        told = 0
    return () if told is None else (TellingStep(told),)


def _last_of(loader: Any) -> int | None:
    if not _told_last:
        return None
    found = (_told_last.get(one) for one in epoch_listeners(loader.dataset))
    return next((epoch for epoch in found if epoch is not None), None)


def step_in(steps: Sequence[Any]) -> EpochStep | None:
    """That step among others."""
    return next((step for step in steps if isinstance(step, EpochStep)), None)


def _ranks() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    try:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1
    return (rank, world_size) if 0 <= rank < world_size else (0, 1)


def _take_next(loader: Any) -> int:
    epoch = int(getattr(loader, _NEXT, 0))
    setattr(loader, _NEXT, epoch + 1)
    return epoch


def set_next(loader: Any, epoch: int) -> None:
    """The next epoch of a loader is this one: samplers and the dataset are told, workers when it begins.

    Raises:
        TypeError: If it is no int.
        ValueError: If it is negative.
    """
    if not isinstance(epoch, int) or isinstance(epoch, bool):
        raise TypeError(f"epoch must be an int, not {epoch!r}")
    if not 0 <= epoch < 1 << 32:
        raise ValueError(f"epoch must be from 0 up to and without {1 << 32}, not {epoch}")
    setattr(loader, _NEXT, epoch)
    batch_sampler = loader.batch_sampler
    samplers = (loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    datasets = epoch_listeners(loader.dataset)
    listeners = [*(one for one in samplers if hasattr(one, "set_epoch")), *datasets]
    distinct: dict[int, Any] = {id(one): one for one in listeners}
    for one in distinct.values():
        one.set_epoch(epoch)
    for one in datasets:
        _told_last.put(one, epoch)
    if datasets:
        setattr(loader, _TOLD, epoch)
    # Workers of an iterator that is made from now on get the dataset as it is.
    iterator = loader._iterator
    if hasattr(iterator, "_transport"):
        iterator._epoch_to_tell = epoch
    elif iterator is not None and datasets:
        select_path.say_once("set_epoch() does not reach persistent workers on torch's own path")


def resume(iterator: Any, loader: Any) -> None:
    """Tells persistent workers what they cannot count, before they begin their next epoch."""
    told = iterator._epoch_to_tell
    step = step_in(iterator._transport.steps)
    if step is not None:
        # Workers count on their own. A worker that is restarted has this one.
        step.count_from(_take_next(loader))
    if told is not None:
        iterator._epoch_to_tell = None
        for number, index_queue in enumerate(iterator._index_queues):
            index_queue.call(iterator._transport.epoch_note(number, told))


def begin_without_workers(iterator: Any, loader: Any, step: EpochStep) -> None:
    """Begins the epoch of an iterator of torch's that has no workers, and no fetcher yet that counts."""
    iterator._dataset_kind = loader._dataset_kind
    # As in one worker: code that shares a dataset out by these numbers then reads all of it.
    dataset, seed = iterator._dataset, iterator._base_seed
    info = internals.WorkerInfo(id=0, num_workers=1, seed=seed, dataset=dataset)

    begin = functools.partial(step.begin_as, info, seed)

    def make(dataset: Any) -> Any:
        return internals.create_fetcher(
            iterator._dataset_kind,
            dataset,
            iterator._auto_collation,
            iterator._collate_fn,
            iterator._drop_last,
        )

    is_iterable = iterator._dataset_kind == internals.ITERABLE
    iterator._dataset_fetcher = fetch.begun([begin], [], make, dataset, is_iterable)
