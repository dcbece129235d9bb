"""The epoch of a loader that began last: its beginning, and how much of it was returned."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterDataPipe

import ringloader._native as _native
from ringloader._common.weak_registry import WeakRegistry
from ringloader._log import logger
from ringloader._options import epochs
from ringloader._sources import samplers
from ringloader._state import datasets, saved
from ringloader._state.datasets import DatasetState, MapDatasetState
from ringloader._state.order import NativeOrder, draw_base_seed
from ringloader._state.parts import Workers
from ringloader._state.reading import ReadOrder
from ringloader._state.saved import Saved
from ringloader._torch import data_pipes, select_path
from ringloader._worker.options import InFront, WorkerOption

if TYPE_CHECKING:
    from ringloader._options.collecting import Collecting

# By loader: the epoch that began last.
_epochs: WeakRegistry[Epoch] = WeakRegistry()
# The attribute of a loader with the state from which its next epoch begins: copies and pickles have it too.
_LOADED = "_ringloader_loaded_state"


class Epoch:
    """One epoch of one iterator.

    A ledger notes which indices are read and which batches are handed out. What else is needed is noted when
    the epoch begins, when it ends, and when ``next`` raises.

    Args:
        begun: The epoch's beginning, or the state from which it goes on.
        order: The order of its samples; None for an iterable dataset, which decides itself where it is.
        dataset: The states of the dataset, if it may have any.
        why_not: The reason why the epoch has no state.
    """

    def __init__(
        self,
        begun: Saved,
        order: NativeOrder | ReadOrder | None = None,
        dataset: DatasetState | None = None,
        why_not: str | None = None,
    ) -> None:
        self.begun = begun
        self.dataset = dataset
        self.why_not = why_not
        # The seed of the workers, which the iterator then does not draw.
        self.given_seed = begun.base_seed
        self._order = order
        # Notes which indices are read and which batches the caller gets.
        self.ledger: _native.Ledger | None = None
        if order is not None:
            self.ledger = order.begin(begun)
        elif dataset is None:
            # No worker sends its state: the batches of all are counted.
            self.ledger = _native.Ledger([], begun.batches, None, None, whole=True)
        self._resumes = begun.has_begun
        self._is_finished = False
        self._collecting: Collecting | None = None

    @property
    def is_iterable(self) -> bool:
        """True if the dataset decides where the epoch is, and no sampler."""
        return self._order is None

    @property
    def resumed(self) -> Saved | None:
        """The state from which the epoch goes on; None: it began anew."""
        return self.begun if self._resumes else None

    @property
    def is_whole(self) -> bool:
        """True if the order is one of whole batches."""
        return isinstance(self._order, ReadOrder) and self._order.is_whole

    def begin(self, iterator: Any, drawn: bool) -> None:
        """Notes the seeds of an iterator; workers' seed it drew in this epoch, or had before."""
        if not self._resumes:
            base_seed: int = iterator._base_seed
            self.begun = dataclasses.replace(self.begun, base_seed=base_seed, base_seed_drawn=drawn)
        if self.dataset is None:
            return
        if self._resumes and self.dataset.shared_seed is not None:
            iterator._shared_seed = self.dataset.shared_seed
            iterator._dataset = data_pipes.seeded(iterator._dataset, iterator._shared_seed)
        self.dataset.shared_seed = iterator._shared_seed

    def give_starts(self, options: Sequence[WorkerOption]) -> None:
        """Has workers that are about to begin go on where the epoch does."""
        if self.dataset is not None:
            self.dataset.give_starts(options, self.begun.batch_size)

    def read(self, iterator: Any) -> None:
        """Has an iterator without workers read the epoch from where it is."""
        iterator._sampler_iter = self.indices(iterator._sampler_iter, at_once=True)
        if self.dataset is not None:
            self.dataset.ask_here()

    def indices(self, made: Any, at_once: bool = False) -> Any:
        """Returns an iterator of the epoch's indices.

        Args:
            made: The iterator that torch has made of the loader's index sampler.
            at_once: True if other indices than those of the state are an error now.
        """
        return made if self._order is None else self._order.read(made, at_once)

    def index_source(self, iterator: Any, places: _native.Places | None) -> _native.IndexSource:
        """Returns the source of the tasks of an iterator with workers."""
        if self._order is None:
            source = samplers.index_source(iterator._index_sampler, places)
        else:
            native = self._order.source(places)
            if native is None:
                iterator._sampler_iter = self.indices(iterator._sampler_iter)
            source = native or _native.IndexSource.python(self.ledger, places)
        if self.dataset is not None:
            source.count(self.dataset.turns)
        return source

    def next_index(self, read: Callable[[], Any]) -> Any:
        """Returns the index that ``read`` gives an iterator without workers, whose batch it gets."""
        if self.ledger is not None:
            self.ledger.begin_call()
        index = read()
        if self.ledger is not None:
            self.ledger.take(index)
        if self.dataset is not None and not self._is_finished:
            self.dataset.turns.take()
        return index

    def count_errors(self, collecting: Collecting) -> None:
        """Has the bad samples of the whole epoch count, and the batches that are left out be passed."""
        collecting.number = self.begun.bad_samples
        collecting.has_given = self._resumes and self.begun.num_yielded > 0
        collecting.leave_out = None if self.ledger is None else self.ledger.left_out
        self._collecting = collecting

    def note_number(self, number: int) -> None:
        """Notes the number of the epoch, as ``Seeds`` count."""
        self.begun = dataclasses.replace(self.begun, number=number)

    def note_raised(self, iterator: Any, error: BaseException) -> None:
        """Notes that ``next`` has raised."""
        if self._is_finished:
            return
        if self.ledger is not None:
            self.ledger.raised()
        if self.dataset is not None:
            self.dataset.note_raised(iterator)
        if isinstance(error, StopIteration) and not iterator.is_paused():
            self._is_finished = True
            if self.dataset is not None:
                self.dataset.finish()

    def saved(self) -> Saved:
        """Returns the state of what ``next`` has returned."""
        if self._order is None:
            return self._saved_by_dataset()
        if not isinstance(self.dataset, MapDatasetState):
            return self.position()
        if self.dataset.to_drop:
            # Nothing, or not all, was read yet of what is read again.
            batches = self.begun.batches + self.dataset.to_drop
            return dataclasses.replace(self.begun, num_yielded=batches, batches=batches)
        return self.dataset.add_to(self.position())

    def _saved_by_dataset(self) -> Saved:
        before = self.begun.workers
        assert before is not None
        if self.ledger is not None:
            workers = Workers.uncounted(before.num_workers, self.ledger.position().batches)
        else:
            assert self.dataset is not None
            workers = self.dataset.saved()
            if self.dataset.to_drop:
                return self.begun
        batches = workers.batches()
        if self._resumes:
            batches += self.begun.num_yielded - before.batches()
        return dataclasses.replace(
            self.begun,
            num_yielded=batches,
            batches=batches,
            is_finished=self._is_finished,
            bad_samples=self._bad_samples(),
            workers=workers,
        )

    def position(self) -> Saved:
        """Returns the state without that of the dataset."""
        assert self._order is not None
        assert self.ledger is not None
        found = self.ledger.position()
        ranges = found.ranges
        samples = ranges.pop(0)[1] if ranges and ranges[0][0] == 0 else 0
        state, ended = self._order.state_after(found.tasks, self._is_finished)
        return dataclasses.replace(
            self.begun,
            drawn=self._order.drawn(),
            num_yielded=found.batches,
            is_finished=self._is_finished,
            batches=found.batches,
            samples=samples,
            overtaken=tuple(itertools.chain.from_iterable(ranges)),
            passed=found.passed,
            fingerprint=found.fingerprint,
            bad_samples=self._bad_samples(),
            sampler_state=state,
            sampler_ended=ended,
        )

    def _bad_samples(self) -> int:
        return 0 if self._collecting is None else self._collecting.number

    def fingerprint(self) -> int | None:
        """Returns the fingerprint of the samples that were returned."""
        return None if self.ledger is None else self.ledger.position().fingerprint


def state_of(loader: Any) -> dict[str, Any]:
    """Implements ``DataLoader.state_dict``."""
    found, epoch = loaded_of(loader), _epochs.get(loader)
    if found is None and epoch is not None and epoch.why_not is not None:
        select_path.say_once(
            f"state_dict() returns {{}}, by which a run begins its epoch anew: {epoch.why_not}"
        )
        return {}
    if found is None:
        found = _beginning(loader, _order_of(loader)) if epoch is None else epoch.saved()
    return saved.to_dict(found)


def fingerprint_of(loader: Any) -> int | None:
    """Implements ``DataLoader.fingerprint``."""
    epoch = _epochs.get(loader)
    return 0 if epoch is None else epoch.fingerprint()


def load(loader: Any, state: object) -> None:
    """Implements ``DataLoader.load_state_dict``."""
    if not isinstance(state, dict):
        raise TypeError(f"load_state_dict() needs the dict that state_dict() returned, not {state!r:.80}")
    # accelerate adds its keys to an empty state too.
    if not set(state) - saved.EDITED:
        return
    found = saved.from_dict(state)
    order = _order_of(loader)
    _check_alike(found, _beginning(loader, order))
    datasets.check(loader, found.workers)
    if found.epoch is not None and order is not None:
        order.set_epoch(found.epoch)
    epochs.count_from(loader, found.number + found.is_finished)
    setattr(loader, _LOADED, found)


def loaded_of(loader: Any) -> Saved | None:
    """Returns the state with which the next epoch begins, if one was loaded."""
    found: Saved | None = vars(loader).get(_LOADED)
    return found


def begin(loader: Any, are_same: bool = False, is_torchs: bool = False) -> Epoch | None:
    """Begins an epoch of a loader, before anything is drawn for it. None: the loader has no state.

    Args:
        loader: The loader.
        are_same: True if the workers are those of the epoch before.
        is_torchs: True if torch's own loader runs, which knows no worker's state.
    """
    if not datasets.has_state_dict(loader):
        return None
    previous, loaded, order = _epochs.get(loader), loaded_of(loader), _order_of(loader)
    if loaded is None:
        before = None if previous is None else previous.dataset
        dataset = None if is_torchs else datasets.state_behind(loader, before, are_same)
        epoch = Epoch(_beginning(loader, order), order, dataset)
    else:
        epoch = _resumed(loader, order, loaded, are_same, is_torchs)
    _epochs.put(loader, epoch)
    return epoch


def begin_without(loader: Any, why_not: str) -> None:
    """Begins an epoch that has no state, for a reason."""
    _epochs.put(loader, Epoch(Saved(""), why_not=why_not))


def noted(loader: Any) -> Epoch | None:
    """Returns the epoch of a loader that began last."""
    return _epochs.get(loader)


def note(loader: Any, epoch: Epoch | None) -> None:
    """Has this be the epoch of a loader that began last."""
    if epoch is not None:
        _epochs.put(loader, epoch)


def has_begun(loader: Any, epoch: Epoch | None, collecting: Collecting | None) -> None:
    """Notes that an epoch has begun: the next one begins without the state that was loaded.

    Args:
        loader: The loader.
        epoch: The epoch.
        collecting: The part that lists the epoch's bad samples.
    """
    if epoch is None:
        return
    vars(loader).pop(_LOADED, None)
    if collecting is not None:
        epoch.count_errors(collecting)


class WithoutDrawing(InFront):
    """A loader before torch's iterator, which then draws its base seed from a generator of no one's."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.generator = torch.Generator()


def drawing_from(epoch: Epoch | None, loader: Any) -> Any:
    """Returns the loader, or what draws from no one's generator: an epoch that goes on has drawn before."""
    goes_on = epoch is not None and epoch.is_iterable and epoch.resumed is not None
    return WithoutDrawing(loader) if goes_on else loader


def _resumed(
    loader: Any, order: NativeOrder | ReadOrder | None, loaded: Saved, are_same: bool, is_torchs: bool
) -> Epoch:
    """Begins an epoch that goes on from a state."""
    named = None if order is None else order.named_epoch()
    _restore_generator(loader, loaded, are_same)
    if order is not None:
        order.restore(loaded)
    workers = loaded.workers
    if loaded.is_finished or not loaded.has_begun:
        if loaded.is_finished:
            if order is not None:
                order.pass_epoch(loaded)
            workers = None if workers is None else workers.next_epoch(datasets.lives_on(loader))
        order = _order_of(loader)
        dataset = None if is_torchs else datasets.state_for(loader, workers)
        epoch = Epoch(_beginning(loader, order), order, dataset)
        if loaded.is_finished and loader.persistent_workers:
            # Workers that had lived on would have their seed from before.
            epoch.given_seed = loaded.base_seed
        return epoch
    if order is None:
        rest = _rest_of_dataset(loader, loaded, is_torchs)
    else:
        rest = _rest_of_order(order, loaded, named, is_torchs)
        rest = dataclasses.replace(rest, batch_size=_beginning(loader, order).batch_size)
    return Epoch(rest, order, None if is_torchs else datasets.state_for(loader, rest.workers))


def _rest_of_order(
    order: NativeOrder | ReadOrder, loaded: Saved, named: int | None, is_torchs: bool
) -> Saved:
    """Returns the state from which an epoch goes on whose samples come in an order."""
    if named != loaded.epoch:
        select_path.say_once(
            f"the rest of an epoch is that of epoch {loaded.epoch}, which the loaded state names; "
            f"set_epoch({named}) counts from the next one on"
        )
    drop = 0 if loaded.workers is None else loaded.workers.drop
    if is_torchs:
        # Without the state of a map-style dataset: batches that came since are passed over.
        loaded = dataclasses.replace(loaded, batches=loaded.batches - drop, workers=None)
    rest = order.resumed(loaded)
    if drop and not is_torchs:
        # The position at which the states were taken.
        batches = max(0, rest.batches - drop)
        rest = dataclasses.replace(rest, num_yielded=batches, batches=batches)
    return rest


def _rest_of_dataset(loader: Any, loaded: Saved, is_torchs: bool) -> Saved:
    """Returns the state from which the epoch of an iterable dataset goes on. Logs what is read again."""
    before = loaded.workers
    assert before is not None
    why = None if before.is_stateful else _NO_STATE
    workers = before.moved(loaded.num_yielded - loaded.batches)
    if is_torchs:
        why, workers = _TORCHS, Workers.uncounted(before.num_workers, loaded.num_yielded)
    elif workers.reads_again() > before.reads_again():
        why = why or _MOVED
    batches = workers.reads_again()
    if batches and why is not None:
        logger.warning(
            "load_state_dict(): %d batches of the %s are read again and dropped, because %s",
            batches,
            type(loader.dataset).__name__,
            why,
        )
    return dataclasses.replace(loaded, batches=loaded.num_yielded, workers=workers)


_NO_STATE = (
    "it has no state: give it, or the iterator that its __iter__ returns, the methods state_dict and "
    "load_state_dict"
)
_TORCHS = "torch's own loader runs, where no state of a worker can be had"
_MOVED = "the position was moved back before the last state"


def _restore_generator(loader: Any, loaded: Saved, are_same: bool) -> None:
    """Puts the loader's generator to where the epoch's draws of seeds had left it."""
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
        if is_pipe and loaded.workers is not None and loaded.workers.shared_seed is not None:
            # The iterator's constructor draws, and with workers its first epoch does too.
            draws += 2 if loaded.base_seed_drawn and loaded.workers.num_workers else 1
    for _ in range(draws):
        draw_base_seed(loader.generator)


def _order_of(loader: Any) -> NativeOrder | ReadOrder | None:
    """Returns the order of a loader's samples; None if its dataset decides."""
    if datasets.decides(loader):
        return None
    draws = samplers.draws_of(loader._index_sampler, in_iter=True)
    return ReadOrder(loader) if draws is None else NativeOrder(loader, draws)


def _beginning(loader: Any, order: NativeOrder | ReadOrder | None) -> Saved:
    """Returns the state before the next epoch. Draws nothing."""
    generator = loader.generator
    has_own = generator is not None and generator is not torch.default_generator
    return dataclasses.replace(
        datasets.beginning(loader) if order is None else order.beginning(),
        number=epochs.next_of(loader),
        loader_generator=generator.get_state() if has_own else None,
    )


def _check_alike(found: Saved, now: Saved) -> None:
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
