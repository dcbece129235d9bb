"""The beginning of an epoch: of a new one, or of one that resumes from a loaded state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ringloader._core import epochs
from ringloader._features.state import datasets
from ringloader._features.state.order import NativeOrder, draw_base_seed
from ringloader._features.state.reading import ReadOrder
from ringloader._features.state.saved import Saved
from ringloader._log import logger
from ringloader._sources import samplers
from ringloader._torch import select_path

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader


def resumed(
    loader: TorchLoader,
    order: NativeOrder | ReadOrder | None,
    loaded: Saved,
    number: int,
    are_same: bool,
    is_torchs: bool,
) -> tuple[Saved, NativeOrder | ReadOrder | None, int | None]:
    """Returns the beginning of an epoch that resumes from a state, its order, and the seed of its workers.

    Args:
        loader: The loader. Its generators, and its sampler, are put to where the epoch goes on.
        order: The order of its samples, if it has one.
        loaded: The state.
        number: The number of the epoch.
        are_same: True if the workers are those of the epoch before.
        is_torchs: True if torch's own loader runs, which knows no worker's state.
    """
    named = None if order is None else order.named_epoch()
    _restore_generator(loader, loaded, are_same)
    if order is not None:
        order.restore(loaded)
    if loaded.is_finished or not loaded.has_begun:
        if loaded.is_finished and order is not None:
            order.pass_epoch(loaded)
        order = None if order is None else order_of(loader, order.index_sampler)
        # Workers that had lived on would have their seed from before.
        seed = loaded.base_seed if loaded.is_finished and loader.persistent_workers else None
        return beginning(loader, order, number), order, seed
    if order is None:
        rest = _rest_of_dataset(loader, loaded)
    else:
        rest = _rest_of_order(order, loaded, named, is_torchs)
        rest = rest.but(batch_size=beginning(loader, order).batch_size)
    return rest, order, rest.base_seed


def _rest_of_order(
    order: NativeOrder | ReadOrder, loaded: Saved, named: int | None, is_torchs: bool
) -> Saved:
    """Returns the state from which an epoch resumes whose samples come in an order."""
    if named != loaded.epoch:
        select_path.log_once(
            f"the rest of an epoch is that of epoch {loaded.epoch}, which the loaded state names; "
            f"set_epoch({named}) does not count for it"
        )
    # torch's loader takes no state of a map-style dataset.
    return order.resumed(loaded.but(workers=None) if is_torchs else loaded)


def _rest_of_dataset(loader: TorchLoader, loaded: Saved) -> Saved:
    """Returns the state from which the epoch of an iterable dataset resumes. Logs what is read again."""
    before = loaded.workers
    assert before is not None
    workers = before.moved(loaded.num_yielded - loaded.batches)
    batches = workers.reads_again()
    if batches and (not before.is_stateful or batches > before.reads_again()):
        logger.warning(
            "load_state_dict(): %d batches of the %s are read again and dropped, because %s",
            batches,
            type(loader.dataset).__name__,
            _MOVED if before.is_stateful else _NO_STATE,
        )
    return loaded.but(batches=loaded.num_yielded, workers=workers)


_NO_STATE = (
    "it has no state: give it, or the iterator that its __iter__ returns, the methods state_dict and "
    "load_state_dict"
)
_MOVED = "the position was moved back before the last state"


def _restore_generator(loader: TorchLoader, loaded: Saved, are_same: bool) -> None:
    """Puts the loader's generator to where the epoch's draws of seeds had left it."""
    draws = are_same
    if loaded.loader_generator is not None:
        loader.generator.set_state(loaded.loader_generator)
        draws = loaded.base_seed_drawn if loaded.has_begun else are_same
    elif loaded.has_begun:
        return
    if draws:
        draw_base_seed(loader.generator)


def order_of(loader: TorchLoader, index_sampler: Any = None) -> NativeOrder | ReadOrder | None:
    """Returns the order of a loader's samples; None if its dataset decides.

    Args:
        loader: The loader.
        index_sampler: The object that gives its indices; None: the loader is asked for it.
    """
    if datasets.decides(loader):
        return None
    found = loader._index_sampler if index_sampler is None else index_sampler
    draws = samplers.draws_of(found, for_state=True)
    return ReadOrder(loader, found) if draws is None else NativeOrder(loader, found, draws)


def beginning(loader: TorchLoader, order: NativeOrder | ReadOrder | None, number: int | None = None) -> Saved:
    """Returns the state before an epoch: the one with this number, or the next one. Draws nothing."""
    generator = loader.generator
    # torch refuses what is no generator when it draws.
    has_own = isinstance(generator, torch.Generator) and generator is not torch.default_generator
    begun = datasets.beginning(loader) if order is None else order.beginning()
    return begun.but(
        number=epochs.next_of(loader) if number is None else number,
        loader_generator=generator.get_state() if has_own else None,
    )


def check_alike(found: Saved, now: Saved) -> None:
    if found.sampler != now.sampler:
        raise ValueError(
            f"load_state_dict(): the state is that of {found.sampler}, and this loader has "
            f"{now.sampler}: its samples come in another order"
        )
    for name, whose in (("loader_generator", "argument generator"), ("sampler_generator", "own generator")):
        had, has = getattr(found, name) is not None, getattr(now, name) is not None
        if had != has:
            raise ValueError(
                f"load_state_dict(): the state has {'an' if had else 'no'} {whose}, and this loader "
                f"has {'one' if has else 'none'}: its samples come in another order"
            )
    if (found.rest is None) != (now.rest is None):
        raise ValueError(
            "load_state_dict(): last_batch='rollover' keeps samples for the next epoch, and only one of the "
            "two loaders, that of the state and this one, has it"
        )
    if (
        found.rest is not None
        and found.batch_size != now.batch_size
        and (found.is_finished or len(found.rest) >= now.batch_size)
    ):
        raise ValueError(
            f"load_state_dict(): with last_batch='rollover', batches of {now.batch_size} in place of "
            f"{found.batch_size} would leave another remainder for the next epoch: give batch_size="
            f"{found.batch_size}, and change it in the next epoch"
        )
    if found.overtaken and (found.rank, found.num_replicas) != (now.rank, now.num_replicas):
        raise ValueError(
            "load_state_dict(): with in_order=False a state serves its own rank only: this one is of rank "
            f"{found.rank} of {found.num_replicas}, and this is rank {now.rank} of {now.num_replicas}"
        )
