"""The epoch of a loader that began last: its beginning, and how much of it was returned."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

import ringloader._native as _native
from ringloader._common.weak_registry import WeakRegistry
from ringloader._options import epochs
from ringloader._sources import samplers
from ringloader._state import datasets, iterables, saved
from ringloader._state.datasets import HAS_STATE, DatasetState, MapDatasetState
from ringloader._state.iterables import Counted, IterableEpoch
from ringloader._state.order import NativeOrder, draw_base_seed, seed_in
from ringloader._state.reading import ReadOrder
from ringloader._state.saved import Saved
from ringloader._torch import select_path
from ringloader._worker.options import WorkerOption

if TYPE_CHECKING:
    from ringloader._options.collecting import Collecting

Order = NativeOrder | ReadOrder

# By loader: the epoch that began last.
_epochs: WeakRegistry[Epoch | IterableEpoch] = WeakRegistry()
# By loader: the state with which the next epoch begins.
_loaded: WeakRegistry[Saved] = WeakRegistry()


class Epoch:
    """One epoch of one iterator.

    A ledger notes which indices are read and which batches are handed out. What else is needed is noted when
    the epoch begins, when it ends, and when ``next`` raises.

    Args:
        order: The order of its samples.
        begun: The epoch's beginning, or the state from which it goes on.
        why_not: The reason why it has no state, which then has no order either.
        dataset: The states of the dataset, if it has any.
    """

    def __init__(
        self,
        order: Order | None,
        begun: Saved,
        why_not: str | None = None,
        dataset: MapDatasetState | None = None,
    ) -> None:
        self.begun = begun
        self.dataset = dataset
        self.drawn: int | torch.Tensor | None = begun.drawn
        # The seed of the workers, which the iterator then does not draw.
        self.given_seed = begun.base_seed
        self.why_not = why_not
        self._order = order
        # Notes which indices are read and which batches the caller gets; None: the epoch has no state.
        self.ledger = None if order is None else order.ledger(begun)
        self._resumes = begun.has_begun
        self._is_random = begun.sampler == "RandomSampler"
        self._is_finished = False
        self._collecting: Collecting | None = None

    def begin(self, iterator: Any, drawn: bool) -> None:
        """The iterator has its seed, which it drew in this epoch or had before."""
        base_seed: int = iterator._base_seed
        if not self._resumes:
            self.begun = dataclasses.replace(self.begun, base_seed=base_seed, base_seed_drawn=drawn)

    def give_starts(self, options: Sequence[WorkerOption]) -> None:
        """Has workers that are about to begin go on where the epoch does."""
        if self.dataset is not None:
            self.dataset.give_starts(options)

    def read(self, iterator: Any) -> None:
        """Has an iterator without workers read the epoch from where it is."""
        if self._order is not None and self.ledger is not None:
            self._order.read(iterator, self._from(), self, self.ledger)
        if self.dataset is not None:
            self.dataset.ask_here()

    def index_source(self, iterator: Any, places: _native.Places | None) -> _native.IndexSource:
        """Returns the source of the tasks of an iterator with workers."""
        if self._order is None or self.ledger is None:
            return samplers.index_source(iterator._index_sampler, places)
        if isinstance(self._order, ReadOrder):
            self._order.read(iterator, self._from(), self, self.ledger)
        source = self._order.source(self._from(), self, self.ledger, places)
        if self.dataset is not None:
            source.count(self.dataset.turns)
        return source

    def begin_call(self) -> None:
        """An iterator without workers is asked for a batch."""
        if self.ledger is not None:
            self.ledger.begin_call()

    def note_taken(self, index: Any) -> None:
        """An iterator without workers has read an index, whose batch it gets."""
        if self.ledger is not None:
            self.ledger.take(index)
        if self.dataset is not None:
            self.dataset.turns.take()

    def count_errors(self, collecting: Collecting) -> None:
        """Has the bad samples of the whole epoch count, and the batches that are left out be passed."""
        collecting.number = self.begun.bad_samples
        collecting.leave_out = None if self.ledger is None else self.ledger.left_out
        self._collecting = collecting

    def note_number(self, number: int) -> None:
        """The epoch has this number, as ``Seeds`` count."""
        self.begun = dataclasses.replace(self.begun, number=number)

    @property
    def resumed(self) -> Saved | None:
        """The state from which the epoch goes on; None: it began anew."""
        return self.begun if self._resumes else None

    @property
    def is_whole(self) -> bool:
        """True if the order is one of whole batches."""
        return isinstance(self._order, ReadOrder) and self._order.is_whole

    def note_raised(self, iterator: Any, error: BaseException) -> None:
        """``next`` has raised."""
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
        if self.dataset is None:
            return self.position()
        if self.dataset.to_drop:
            # Nothing, or not all, was read yet of what is read again.
            batches = self.begun.batches + self.dataset.to_drop
            return dataclasses.replace(self.begun, num_yielded=batches, batches=batches)
        return self.dataset.add_to(self.position())

    def position(self) -> Saved:
        """Returns the state without that of the dataset."""
        assert self._order is not None
        assert self.ledger is not None
        if isinstance(self.drawn, torch.Tensor) and self._is_random:
            self.drawn = seed_in(self.drawn)
        found = self.ledger.position()
        ranges = found.ranges
        samples = ranges.pop(0)[1] if ranges and ranges[0][0] == 0 else 0
        state, ended = self._order.state_after(found.tasks, self._is_finished)
        return dataclasses.replace(
            self.begun,
            drawn=self.drawn,
            num_yielded=found.batches,
            is_finished=self._is_finished,
            batches=found.batches,
            samples=samples,
            overtaken=tuple(itertools.chain.from_iterable(ranges)),
            passed=found.passed,
            fingerprint=found.fingerprint,
            bad_samples=0 if self._collecting is None else self._collecting.number,
            sampler_state=state,
            sampler_ended=ended,
        )

    def fingerprint(self) -> int | None:
        """Returns the fingerprint of the samples that were returned."""
        return None if self.ledger is None else self.ledger.position().fingerprint

    def _from(self) -> Saved:
        """Returns the state from which the epoch goes on: without a base seed, from its beginning."""
        return self.begun if self._resumes else dataclasses.replace(self.begun, base_seed=None)


def state_of(loader: Any) -> dict[str, Any]:
    """Implements ``DataLoader.state_dict``."""
    found = _loaded.get(loader)
    if found is None:
        epoch = _epochs.get(loader)
        why_not = epoch.why_not if isinstance(epoch, Epoch) else None
        if why_not is not None:
            select_path.say_once(
                f"state_dict() returns {{}}, by which a run begins its epoch anew: {why_not}"
            )
            return {}
        found = _now(loader) if epoch is None else epoch.saved()
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
    _check_alike(found, _now(loader))
    datasets.check(loader, found.workers)
    if found.epoch is not None:
        _order_of(loader).set_epoch(found.epoch)
    epochs.count_from(loader, found.number + found.is_finished)
    _loaded.put(loader, found)


def _now(loader: Any) -> Saved:
    """Returns the state before the next epoch."""
    return iterables.beginning(loader) if datasets.decides(loader) else _beginning(loader, _order_of(loader))


def begin(loader: Any, are_same: bool = False, is_torchs: bool = False) -> Epoch | IterableEpoch | None:
    """Begins an epoch of a loader, before anything is drawn for it. None: the loader has no state.

    Args:
        loader: The loader.
        are_same: True if the workers are those of the epoch before.
        is_torchs: True if torch's own loader runs, which knows no worker's state.
    """
    if not getattr(type(loader), HAS_STATE, False):
        return None
    previous, loaded = _epochs.get(loader), _loaded.get(loader)
    before = None if previous is None else datasets.before(loader, previous.dataset, are_same)
    if datasets.decides(loader):
        if loaded is None:
            counted = Counted(loader) if is_torchs else DatasetState(loader, None, before)
            made = IterableEpoch(iterables.beginning(loader), counted)
        else:
            made = iterables.resumed(loader, loaded, are_same, is_torchs)
        _epochs.put(loader, made)
        return made
    order, has_states = _order_of(loader), datasets.is_asked(loader) and not is_torchs
    if loaded is None:
        dataset = MapDatasetState(loader, None, before) if has_states else None
        epoch = Epoch(order, _beginning(loader, order), dataset=dataset)
    else:
        epoch = _resumed(
            loader, order, _without_workers(loaded) if is_torchs else loaded, are_same, has_states
        )
    _epochs.put(loader, epoch)
    return epoch


def noted(loader: Any) -> Epoch | IterableEpoch | None:
    """Returns the epoch of a loader that began last."""
    return _epochs.get(loader)


def note(loader: Any, epoch: Epoch | IterableEpoch | None) -> None:
    """Has this be the epoch of a loader that began last."""
    if epoch is not None:
        _epochs.put(loader, epoch)


def is_loaded(loader: Any) -> bool:
    """True if the next epoch of a loader begins from a state."""
    return _loaded.get(loader) is not None


def has_begun(loader: Any, epoch: Epoch | IterableEpoch | None, collecting: Collecting | None) -> None:
    """Notes that an epoch has begun: the next one begins without the state that was loaded.

    Args:
        loader: The loader.
        epoch: The epoch.
        collecting: The part that lists the epoch's bad samples.
    """
    if epoch is None:
        return
    _loaded.pop(loader)
    if collecting is not None:
        epoch.count_errors(collecting)


def _without_workers(loaded: Saved) -> Saved:
    """Returns a state without that of a map-style dataset: batches that came since are passed over."""
    drop = 0 if loaded.workers is None else loaded.workers.drop
    return dataclasses.replace(loaded, batches=loaded.batches - drop, workers=None)


def _resumed(loader: Any, order: Order, loaded: Saved, are_same: bool, has_states: bool) -> Epoch:
    workers = loaded.workers

    def states() -> MapDatasetState | None:
        return MapDatasetState(loader, workers) if has_states else None

    if loaded.loader_generator is not None:
        loader.generator.set_state(loaded.loader_generator)
        if loaded.base_seed_drawn:
            draw_base_seed(loader.generator)
    named = order.named_epoch()
    order.restore(loaded)
    if loaded.is_finished:
        order.pass_epoch(loaded)
        if workers is not None:
            workers = workers.next_epoch(datasets.lives_on(loader))
        begins = _beginning(loader, order)
        epoch = Epoch(_order_of(loader), begins, dataset=states())
        if loader.persistent_workers and loader.num_workers > 0:
            # Workers that had lived on would have their seed from before.
            epoch.given_seed = loaded.base_seed
        return epoch
    if not loaded.has_begun:
        begins = _beginning(loader, order)
        if are_same:
            # The iterator of a new loader draws the base seed, and workers that live on have theirs.
            draw_base_seed(loader.generator)
        return Epoch(order, begins, dataset=states())
    if named != loaded.epoch:
        select_path.say_once(
            f"the rest of an epoch is that of epoch {loaded.epoch}, which the loaded state names; "
            f"set_epoch({named}) counts from the next one on"
        )
    rest = order.resumed(loaded)
    if workers is not None and workers.drop:
        # The position at which the states were taken.
        batches = max(0, rest.batches - workers.drop)
        rest = dataclasses.replace(rest, num_yielded=batches, batches=batches)
    rest = dataclasses.replace(rest, batch_size=_beginning(loader, order).batch_size)
    return Epoch(order, rest, dataset=states())


def loaded_of(loader: Any) -> Saved | None:
    """Returns the state with which the next epoch begins, if one was loaded."""
    return _loaded.get(loader)


def begin_without(loader: Any, why_not: str) -> None:
    """Begins an epoch that has no state, for a reason."""
    _epochs.put(loader, Epoch(None, Saved(""), why_not))


def drawing_from(epoch: Epoch | IterableEpoch | None, loader: Any) -> Any:
    """Returns the loader, or what draws from no one's generator: an epoch that goes on has drawn before."""
    return WithoutDrawing(loader) if isinstance(epoch, IterableEpoch) and epoch.is_resumed else loader


class WithoutDrawing:
    """A loader before torch's iterator, which then draws its base seed from a generator of no one's."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.generator = torch.Generator()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _order_of(loader: Any) -> Order:
    draws = samplers.draws_in_any_iter(loader._index_sampler)
    return ReadOrder(loader) if draws is None else NativeOrder(loader, draws)


def _beginning(loader: Any, order: Order) -> Saved:
    """Returns the state before the next epoch. Draws nothing."""
    found, generator = dataclasses.replace(order.beginning(), number=epochs.next_of(loader)), loader.generator
    if generator is None or generator is torch.default_generator:
        return found
    return dataclasses.replace(found, loader_generator=generator.get_state())


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
