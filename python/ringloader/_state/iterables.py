"""The epoch of a loader whose dataset decides where it is: an iterable one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterDataPipe

import ringloader._native as _native
from ringloader._log import logger
from ringloader._options import epochs
from ringloader._sources import samplers
from ringloader._state.datasets import DatasetState, lives_on
from ringloader._state.order import draw_base_seed
from ringloader._state.parts import Workers
from ringloader._state.saved import Saved
from ringloader._torch import data_pipes
from ringloader._worker.options import WorkerOption

if TYPE_CHECKING:
    from ringloader._options.collecting import Collecting

# In place of a sampler's name.
KIND = "IterableDataset"


def beginning(loader: Any) -> Saved:
    """Returns the state before the next epoch. Draws nothing."""
    generator = loader.generator
    has_generator = generator is not None and generator is not torch.default_generator
    return Saved(
        sampler=KIND,
        number=epochs.next_of(loader),
        batch_size=loader._index_sampler.batch_size if loader._auto_collation else 1,
        passed=None,
        fingerprint=None,
        loader_generator=generator.get_state() if has_generator else None,
        workers=DatasetState(loader).saved(),
    )


class Counted:
    """The number of batches of an iterable dataset, which takes the place of the states of its workers.

    Args:
        loader: The loader.
        resumed: The positions from which the epoch goes on; None: it begins.
    """

    shared_seed = None

    def __init__(self, loader: Any, resumed: Workers | None = None) -> None:
        self._workers = loader.num_workers
        # Batches that are read again and dropped.
        self.to_drop = 0 if resumed is None else resumed.batches()
        self.ledger = _native.Ledger([], self.to_drop, None, None, whole=True)

    def note_raised(self, _iterator: Any) -> None:
        """``next`` has raised."""
        self.ledger.raised()

    def finish(self) -> None:
        """The epoch is over."""

    def saved(self) -> Workers:
        """Returns the position, which is that of all workers together."""
        return Workers.uncounted(self._workers, self.ledger.position().batches)


class IterableEpoch:
    """One epoch of one iterator.

    Args:
        loader: The loader.
        begun: The epoch's beginning, or the state from which it goes on.
        dataset: The states of the dataset, or the number of its batches where torch's own loader runs.
    """

    def __init__(self, begun: Saved, dataset: DatasetState | Counted) -> None:
        self.begun = begun
        self.dataset: Any = dataset
        # The seed of the workers, which the iterator then does not draw.
        self.given_seed = begun.base_seed
        self.is_resumed = begun.has_begun
        # True if the order is one of whole batches.
        self.is_whole = False
        self._is_finished = False
        self._collecting: Collecting | None = None

    def begin(self, iterator: Any, drawn: bool) -> None:
        """The iterator has its seeds. Workers' seed it drew in this epoch, or had before."""
        if not self.is_resumed:
            base_seed: int = iterator._base_seed
            self.begun = dataclasses.replace(self.begun, base_seed=base_seed, base_seed_drawn=drawn)
        elif self.dataset.shared_seed is not None:
            iterator._shared_seed = self.dataset.shared_seed
            iterator._dataset = data_pipes.seeded(iterator._dataset, iterator._shared_seed)
        self.dataset.shared_seed = iterator._shared_seed

    def give_starts(self, options: Sequence[WorkerOption]) -> None:
        """Has workers that are about to begin go on where the epoch does."""
        self.dataset.give_starts(options, self.begun.batch_size)

    def read(self, iterator: Any) -> None:  # noqa: ARG002
        """An iterator without workers has its fetcher."""
        self.dataset.ask_here()

    def index_source(self, iterator: Any, places: _native.Places | None) -> _native.IndexSource:
        """Returns the source of the tasks of an iterator with workers."""
        source = samplers.index_source(iterator._index_sampler, places)
        source.count(self.dataset.turns)
        return source

    def count_errors(self, collecting: Collecting) -> None:
        """Has the bad samples of the whole epoch count."""
        collecting.number = self.begun.bad_samples
        self._collecting = collecting

    def note_number(self, number: int) -> None:
        """The epoch has this number, as ``Seeds`` count."""
        self.begun = dataclasses.replace(self.begun, number=number)

    @property
    def resumed(self) -> Saved | None:
        """The state from which the epoch goes on; None: it began anew."""
        return self.begun if self.is_resumed else None

    def begin_call(self) -> None:
        """An iterator without workers is asked for a batch."""

    def note_taken(self, index: Any) -> None:  # noqa: ARG002
        """An iterator without workers asks for a batch."""
        if not self._is_finished:
            self.dataset.turns.take()

    def note_raised(self, iterator: Any, error: BaseException) -> None:
        """``next`` has raised."""
        if self._is_finished:
            return
        self.dataset.note_raised(iterator)
        if isinstance(error, StopIteration) and not iterator.is_paused():
            self._is_finished = True
            self.dataset.finish()

    def saved(self) -> Saved:
        """Returns the state of what ``next`` has returned."""
        workers = self.dataset.saved()
        if self.dataset.to_drop:
            return self.begun
        before = self.begun.workers
        batches = workers.batches()
        if self.is_resumed and before is not None:
            batches += self.begun.num_yielded - before.batches()
        return dataclasses.replace(
            self.begun,
            num_yielded=batches,
            batches=batches,
            is_finished=self._is_finished,
            bad_samples=0 if self._collecting is None else self._collecting.number,
            workers=workers,
        )

    def fingerprint(self) -> int | None:
        """Returns None: the samples have no indices."""
        return None


def resumed(loader: Any, loaded: Saved, are_same: bool, is_torchs: bool) -> IterableEpoch:
    """Begins an epoch that goes on from a state, before anything is drawn for it.

    Args:
        loader: The loader.
        loaded: The state.
        are_same: True if the workers are those of the epoch before.
        is_torchs: True if torch's own loader runs, which knows no worker's state.
    """
    workers = loaded.workers
    assert workers is not None
    make = Counted if is_torchs else DatasetState
    _restore_generator(loader, loaded, workers, are_same)
    if is_torchs:
        loaded = dataclasses.replace(loaded, batches=loaded.num_yielded)
        workers = Workers.uncounted(workers.num_workers, loaded.num_yielded)
    if loaded.is_finished or not loaded.has_begun:
        begins = beginning(loader)
        if loaded.is_finished:
            workers = workers.next_epoch(lives_on(loader))
        epoch = IterableEpoch(begins, make(loader, workers))
        if loaded.is_finished and loader.persistent_workers:
            # Workers that had lived on would have their seed from before.
            epoch.given_seed = loaded.base_seed
        return epoch
    why = _TORCHS if is_torchs else None if workers.is_stateful else _NO_STATE
    if loaded.is_edited:
        before, workers = workers, workers.moved(loaded.num_yielded - loaded.batches)
        loaded = dataclasses.replace(loaded, batches=loaded.num_yielded)
        if workers.reads_again() > before.reads_again():
            why = why or _MOVED
    _say_read_again(loader, workers, why)
    return IterableEpoch(dataclasses.replace(loaded, workers=workers), make(loader, workers))


_NO_STATE = (
    "it has no state: give it, or the iterator that its __iter__ returns, the methods state_dict and "
    "load_state_dict"
)
_TORCHS = "torch's own loader runs, where no state of a worker can be had"
_MOVED = "the position was moved back before the last state"


def _say_read_again(loader: Any, workers: Workers, why: str | None) -> None:
    """Logs that batches are read again, for a reason."""
    batches = workers.reads_again()
    if batches and why is not None:
        logger.warning(
            "load_state_dict(): %d batches of the %s are read again and dropped, because %s",
            batches,
            type(loader.dataset).__name__,
            why,
        )


def _restore_generator(loader: Any, loaded: Saved, workers: Workers, are_same: bool) -> None:
    """Puts the loader's generator to where the epoch's draws had left it."""
    if loaded.loader_generator is not None:
        loader.generator.set_state(loaded.loader_generator)
    is_pipe = isinstance(loader.dataset, IterDataPipe)
    if not loaded.has_begun:
        # An iterator that is made draws its base seed, and a pipe's seed once more.
        draws = (1 + is_pipe) * are_same
    elif loaded.loader_generator is None:
        return
    else:
        draws = int(loaded.base_seed_drawn)
        if workers.shared_seed is not None and is_pipe:
            # The iterator's constructor draws, and with workers its first epoch does too.
            draws += 2 if loaded.base_seed_drawn and workers.num_workers else 1
    for _ in range(draws):
        draw_base_seed(loader.generator)
