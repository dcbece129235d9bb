"""What happens in a worker, or without workers in the main process, when an epoch begins."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch.utils.data import get_worker_info

from ringloader._common.epoch_listeners import epoch_listeners
from ringloader._worker import fetch
from ringloader._worker.fetch import Fetcher
from ringloader.seeds import Seeds

# Called with the dataset, torch's worker info and the seeds; returns the dataset for the epoch, or None.
ResetFn = Callable[[Any, Any, Seeds], Any]


class EpochStep:
    """Tells the dataset the epoch, sets generators anew, calls ``worker_reset_fn``: where it was asked for.

    Args:
        reset_fn: The user's function.
        reseeds: Whether the generators of python, numpy and torch are set anew; in a thread, its own three.
        seed: What the seeds come from; None for torch's base seed.
        epoch: The first epoch. Those that follow count up, until :meth:`tell` says another.
        rank: This process's, or that of the main process.
        world_size: How many ranks there are.
    """

    def __init__(
        self,
        reset_fn: ResetFn | None = None,
        reseeds: bool = False,
        seed: int | None = None,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._reset_fn = reset_fn
        self._reseeds = reseeds
        self._seed = seed
        self._epoch = epoch
        self._rank = rank
        self._world_size = world_size
        self._told = False

    def tell(self, epoch: int) -> None:
        """The next epoch that begins is this one, and the dataset is told."""
        self._epoch = epoch
        self._told = True

    def count_from(self, epoch: int) -> None:
        """The same where the dataset was told already."""
        self._epoch = epoch

    def __call__(self, fetcher: Fetcher) -> Fetcher:
        return fetcher

    def begin(self, dataset: Any) -> Any:
        """Begins an epoch in a worker. Returns its dataset."""
        info = get_worker_info()
        assert info is not None
        return self.begin_as(info, info.seed - info.id, dataset)

    def begin_as(self, info: Any, base_seed: int, dataset: Any) -> Any:
        """The same for what ``info`` says, in any process."""
        epoch, told, self._epoch, self._told = self._epoch, self._told, self._epoch + 1, False
        for listener in epoch_listeners(dataset) if told else ():
            listener.set_epoch(epoch)
        if self._reset_fn is None and not self._reseeds:
            return dataset
        agreed = self._seed is not None or self._world_size == 1
        seed = base_seed if self._seed is None else self._seed
        seeds = Seeds(seed, epoch=epoch, rank=self._rank, shared_by_all=agreed).spawn(info.id)
        if self._reseeds:
            _set_generators(seeds, info)
        if self._reset_fn is None:
            return dataset
        try:
            returned = self._reset_fn(dataset, info, seeds)
        except StopIteration as error:
            # To torch's loop that would be the end of an iterable dataset.
            raise RuntimeError("worker_reset_fn raised StopIteration") from error
        return dataset if returned is None else returned


class TellingStep:
    """Tells the dataset of a pool's process, which other loaders may have too, the epoch of one loader."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def __call__(self, fetcher: Fetcher) -> Fetcher:
        return fetcher

    def begin(self, dataset: Any) -> Any:
        """Begins an epoch in a worker. Returns its dataset."""
        for listener in epoch_listeners(dataset):
            listener.set_epoch(self._epoch)
        return dataset


class EpochNote:
    """On its way to a persistent worker, before the message that has it begin the epoch."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def __call__(self) -> None:
        step = next((step for step in fetch.in_place() if isinstance(step, EpochStep)), None)
        if step is None:
            step = EpochStep()
            fetch.put_steps([*fetch.in_place(), step])
        step.tell(self._epoch)


def _set_generators(seeds: Seeds, info: Any) -> None:
    words = seeds.generator_words(10)
    if getattr(info, "worker_method", None) == "thread":
        # Its own: the global ones are the process's.
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
