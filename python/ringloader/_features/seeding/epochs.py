"""``set_epoch``, ``worker_reset_fn``, ``seeding="epoch"``: the work of options when an epoch begins."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch
from torch.utils.data import get_worker_info
from torch.utils.data.distributed import DistributedSampler

from ringloader._common import ranks
from ringloader._common.attributes import has_method, stored
from ringloader._common.weak_registry import WeakRegistry
from ringloader._core.feature import InWorkers, Setup
from ringloader._features.table import Options
from ringloader._torch import internals, select_path
from ringloader._worker.options import EpochStart, Position, WorkerOption
from ringloader._worker.telling import epoch_listeners
from ringloader.seeds import Seeds

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

# Called with the dataset, torch's worker info and the seeds; returns the dataset for the epoch, or None.
ResetFn = Callable[[Any, Any, Seeds], Any]


class EpochOption(WorkerOption):
    """Seeds generators and calls ``worker_reset_fn`` when an epoch begins, as the options say.

    Args:
        reset_fn: The user's function.
        reseeds: True to set the generators of python, numpy and torch anew; in a thread, its own three.
        seed: The number that seeds come from; None for torch's base seed.
        rank: This process's, or that of the main process.
        world_size: How many ranks there are.
    """

    position = Position.EPOCH

    def __init__(
        self,
        reset_fn: ResetFn | None = None,
        reseeds: bool = False,
        seed: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._reset_fn = reset_fn
        self._reseeds = reseeds
        self._seed = seed
        self._rank = rank
        self._world_size = world_size

    def begin(self, dataset: Any, start: EpochStart) -> Any:
        """Begins an epoch. Returns its dataset."""
        info: Any = get_worker_info()
        if start.base_seed is not None:
            # A single worker: code that shares a dataset out then reads all of it.
            info = internals.WorkerInfo(id=0, num_workers=1, seed=start.base_seed, dataset=dataset)
        assert start.number is not None
        agreed = self._seed is not None or self._world_size == 1
        seed = info.seed - info.id if self._seed is None else self._seed
        seeds = Seeds(seed, epoch=start.number, rank=self._rank, shared_by_all=agreed).spawn(info.id)
        if self._reseeds:
            _set_generators(seeds, info)
        if self._reset_fn is None:
            return dataset
        try:
            returned = self._reset_fn(dataset, info, seeds)
        except StopIteration as error:
            # To the worker loop that would be the end of an iterable dataset.
            raise RuntimeError("worker_reset_fn raised StopIteration") from error
        return dataset if returned is None else returned


def _set_generators(seeds: Seeds, info: Any) -> None:
    words = seeds.generator_words(10)
    if getattr(info, "worker_method", None) == "thread":
        # A thread sets generators of its own: the global ones are the process's.
        rng = info.rng
        rng.random_generator.seed(_joined(words[:4]))
        made = type(rng.numpy_generator.bit_generator)(words[4:8])
        rng.numpy_generator.bit_generator.state = made.state
        rng.torch_generator.manual_seed(_joined(words[8:]))
        return
    random.seed(_joined(words[:4]))
    numpy.random.seed(words[4:8])
    torch.manual_seed(_joined(words[8:]))


def _joined(words: list[int]) -> int:
    return int.from_bytes(b"".join(word.to_bytes(4, "little") for word in words), "little")


class Told(NamedTuple):
    """What one call of ``set_epoch`` has told samplers and dataset. Each call is told by its own object."""

    epoch: int


# On a loader: the number of the epoch that begins next.
_NEXT = "_ringloader_next_epoch"
# On a loader: what it has told last; None for a pool's loader that has told nothing.
_TOLD = "_ringloader_told_epoch"
# By dataset: what any loader has told it last.
_told_last: WeakRegistry[Told] = WeakRegistry()
# By loader: the epoch with which its sampler last shuffled.
_shuffled_last: WeakRegistry[int] = WeakRegistry()


def feature_for(_loader: TorchLoader, options: Options, setup: Setup) -> InWorkers | None:
    """Returns the feature of work when an epoch begins, if there is such work."""
    # Without workers the generators are the program's own.
    reseeds = options.seeding == "epoch" and setup.workers > 0
    if options.worker_reset_fn is None and not reseeds:
        return None
    option = EpochOption(options.worker_reset_fn, reseeds, options.seed, *ranks.ranks())
    return InWorkers(option, counts_epochs=True)


def inherit_told(loader: TorchLoader) -> None:
    """Gives a new loader what its dataset was told last: frameworks make new loaders."""
    if _TOLD not in vars(loader):
        setattr(loader, _TOLD, _last_of(loader))


def begin_in_pool(loader: TorchLoader) -> None:
    """Decides what a pool's workers tell their dataset, whatever it was told before."""
    inherit_told(loader)
    if told_by(loader) is None and _last_of(loader) is not None:
        # Another loader's epoch, which the dataset may have, is not this one's.
        setattr(loader, _TOLD, Told(0))


def _last_of(loader: TorchLoader) -> Told | None:
    if not _told_last:
        return None
    found = (_told_last.get(one) for one in epoch_listeners(loader.dataset))
    return next((told for told in found if told is not None), None)


def told_by(loader: TorchLoader) -> Told | None:
    """Returns what ``set_epoch`` of a loader has told last; None: it was not called."""
    found: Told | None = vars(loader).get(_TOLD)
    return found


def next_of(loader: TorchLoader) -> int:
    """Returns the number of the epoch that begins next, as ``Seeds`` count."""
    return int(vars(loader).get(_NEXT, 0))


def count_from(loader: TorchLoader, epoch: int) -> None:
    """Sets that number, and tells nobody."""
    setattr(loader, _NEXT, epoch)


def count(loader: TorchLoader, begun: int) -> None:
    """Counts an epoch that has begun. Another number that was set meanwhile stays."""
    if next_of(loader) == begun:
        count_from(loader, begun + 1)


def set_next(loader: TorchLoader, epoch: int) -> None:
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
    listeners = [*(one for one in samplers if has_method(one, "set_epoch")), *datasets]
    distinct: dict[int, Any] = {id(one): one for one in listeners}
    for one in distinct.values():
        one.set_epoch(epoch)
    told = Told(epoch)
    # Workers of an iterator that is made from now on get the dataset as it is; others are told with the plan.
    setattr(loader, _TOLD, told)
    for one in datasets:
        _told_last.put(one, told)
    iterator = loader._iterator
    if datasets and iterator is not None and not hasattr(iterator, "_transport"):
        select_path.log_once("set_epoch() does not reach persistent workers on torch's own path")


def distributed_sampler(loader: TorchLoader) -> Any:
    """Returns the ``DistributedSampler`` of a loader, or None."""
    # Where the program has made a batch sampler, torch makes a sampler that nobody reads, and no batch size.
    holder = loader.batch_sampler if loader.batch_size is None else None
    sampler = loader.sampler if holder is None else stored(holder, "sampler")
    return sampler if issubclass(type(sampler), DistributedSampler) else None


def log_if_forgotten(loader: TorchLoader, is_resumed: bool) -> None:
    """Logs once if a sampler shuffles as in the epoch before. Call it when a loader has begun an epoch.

    Args:
        loader: The loader.
        is_resumed: True if the epoch resumes from a loaded state: it has the number of one before.
    """
    sampler = distributed_sampler(loader)
    if sampler is None:
        return
    # A subclass with an order of its own may count epochs in its own way.
    if type(sampler).__iter__ is not DistributedSampler.__iter__ or not sampler.shuffle:
        return
    if _shuffled_last.get(loader) == sampler.epoch and not is_resumed:
        select_path.log_once(
            "a DistributedSampler begins another epoch with the same number, and gives the same order again: "
            "call its set_epoch(epoch) before each epoch"
        )
    _shuffled_last.put(loader, sampler.epoch)
