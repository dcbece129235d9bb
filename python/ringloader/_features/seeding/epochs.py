"""``worker_reset_fn``, ``seeding="epoch"``: the work of options when an epoch begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.utils.data import get_worker_info

from ringloader._common import proc
from ringloader._core.feature import InWorkers, Setup
from ringloader._features.seeding import generators
from ringloader._features.table import Options
from ringloader._torch import internals
from ringloader._worker.options import EpochStart, Position, WorkerOption
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
            generators.of_this_worker().set_words(seeds.generator_words(10))
        if self._reset_fn is None:
            return dataset
        try:
            returned = self._reset_fn(dataset, info, seeds)
        except StopIteration as error:
            # To the worker loop that would be the end of an iterable dataset.
            raise RuntimeError("worker_reset_fn raised StopIteration") from error
        return dataset if returned is None else returned


def feature_for(_loader: TorchLoader, options: Options, setup: Setup) -> InWorkers | None:
    """Returns the feature of work when an epoch begins, if there is such work."""
    # Without workers the generators are the program's own.
    reseeds = options.seeding == "epoch" and setup.workers > 0
    if options.worker_reset_fn is None and not reseeds:
        return None
    option = EpochOption(options.worker_reset_fn, reseeds, options.seed, *proc.ranks())
    return InWorkers(option, counts_epochs=True)
