"""The epoch of a loader that began last: its beginning, and how much of it was returned."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch
from torch.utils.data import IterableDataset
from torch.utils.data.distributed import DistributedSampler

from ringloader._common.weak_registry import WeakRegistry
from ringloader._options import epochs, kept
from ringloader._sources import samplers
from ringloader._state import order, saved
from ringloader._state.saved import Saved
from ringloader._torch import internals, select_path

# On the classes of loaders that have a state.
HAS_STATE = "_ringloader_has_state"
TORCHS_PATH = "torch's own path"

# By loader: the epoch that began last.
_epochs: WeakRegistry[Epoch] = WeakRegistry()
# By loader: the state with which the next epoch begins.
_loaded: WeakRegistry[Saved] = WeakRegistry()


class Epoch:
    """One epoch of one iterator.

    The iterator counts batches itself, as torch's does. What else is needed is noted when the epoch begins,
    when it ends, and when ``next`` raises.

    Args:
        begun: The epoch's beginning: states of generators, before they are drawn from.
        resumed: The state from which the epoch goes on.
    """

    def __init__(self, begun: Saved, resumed: Saved | None) -> None:
        self.begun = begun
        self.resumed = resumed
        self.drawn: int | torch.Tensor | None = begun.drawn
        self.why_not: str | None = None
        # The seed of the workers, which the iterator then does not draw.
        self.given_seed = None if resumed is None else resumed.base_seed
        # True if the order comes from the program's generator.
        self.draws_from_program = False
        self._is_random = begun.sampler == "RandomSampler"
        self._iterator: weakref.ref[Any] | None = None
        self._yielded = 0
        # Batches that were passed and not got, because `next` raised.
        self.lost = 0
        # The number of batches that were got before the last call of `next`, if that raised and passed some.
        self._raised_at = -1
        self._last_lost = 0
        self._is_finished = False
        self._before: tuple[int, int | None] = (0, 0)
        self._shadow: order.Shadow | None = None

    def note_passed(self, samples: int, fingerprint: int | None) -> None:
        """The epoch goes on behind so many samples."""
        self._before = (samples, fingerprint)

    def begin(self, iterator: Any, base_seed: int, drawn: bool) -> None:
        """The iterator has its seed, which it drew in this epoch or had before."""
        self._iterator = weakref.ref(iterator)
        if self.resumed is None:
            self.begun = dataclasses.replace(self.begun, base_seed=base_seed, base_seed_drawn=drawn)

    def note_number(self, number: int) -> None:
        """The epoch has this number, as ``Seeds`` count."""
        self.begun = dataclasses.replace(self.begun, number=number)

    def leave(self, iterator: Any) -> None:
        """The iterator goes, or begins another epoch."""
        if self._iterator is not None and self._iterator() in (iterator, None):
            self._yielded, self._iterator = iterator._num_yielded, None

    def note_raised(self, iterator: Any, error: BaseException) -> None:
        """``next`` has raised."""
        if isinstance(error, StopIteration):
            if not iterator.is_paused():
                self._is_finished = True
            return
        lost = iterator._count_lost()
        if lost > self.lost:
            self._raised_at, self._last_lost = iterator._num_yielded, lost - self.lost
            self.lost = lost

    def saved(self, loader: Any) -> Saved:
        """Returns the state of what ``next`` has returned."""
        if self.why_not is not None:
            raise NotImplementedError(self.why_not)
        iterator = None if self._iterator is None else self._iterator()
        yielded = self._yielded if iterator is None else iterator._num_yielded
        since = yielded + self.lost - (self._last_lost if self._raised_at == yielded else 0)
        batches, samples = since, since * self.begun.batch_size
        if self.resumed is not None:
            batches += self.resumed.num_yielded
            samples += self._before[0]
        if isinstance(self.drawn, torch.Tensor) and self._is_random:
            self.drawn = order.seed_in(self.drawn)
        begun = dataclasses.replace(self.begun, drawn=self.drawn)
        if self._shadow is None:
            self._shadow = order.Shadow(loader, begun)
        self._shadow.pass_to(samples)
        return dataclasses.replace(
            begun,
            num_yielded=batches,
            is_finished=self._is_finished,
            batches=batches,
            samples=self._shadow.samples,
            fingerprint=self._shadow.fingerprint,
        )


def state_of(loader: Any) -> dict[str, Any]:
    """Implements ``DataLoader.state_dict``."""
    found = _loaded.get(loader)
    if found is None:
        _check(loader)
        epoch = _epochs.get(loader)
        found = _beginning(loader) if epoch is None else epoch.saved(loader)
    return saved.to_dict(found)


def load(loader: Any, state: object) -> None:
    """Implements ``DataLoader.load_state_dict``."""
    if not isinstance(state, dict):
        raise TypeError(f"load_state_dict() needs the dict that state_dict() returned, not {state!r:.80}")
    if not state:
        return
    found = saved.from_dict(state)
    draws = _check(loader)
    now = _beginning(loader)
    _check_alike(found, now)
    if found.epoch is not None:
        draws.sampler.set_epoch(found.epoch)
    epochs.count_from(loader, found.number + found.is_finished)
    _loaded.put(loader, found)


def begin(loader: Any) -> Epoch | None:
    """Begins an epoch of a loader, before anything is drawn for it. None: the loader has no state."""
    if not getattr(type(loader), HAS_STATE, False):
        return None
    loaded = _loaded.get(loader)
    if loaded is None:
        try:
            _check(loader)
            epoch = _fresh(loader)
        except NotImplementedError as error:
            epoch = Epoch(Saved(""), None)
            epoch.why_not = str(error)
        _epochs.put(loader, epoch)
        return epoch
    draws = _check(loader)
    _loaded.pop(loader)
    if loaded.is_finished:
        order.end(loader, draws, loaded)
        epoch = _fresh(loader)
        if loader.persistent_workers and loader.num_workers > 0:
            # Workers that had lived on would have their seed from before.
            epoch.given_seed = loaded.base_seed
    elif not loaded.has_begun:
        order.restored(loader, draws, loaded)
        epoch = _fresh(loader)
    else:
        order.restored(loader, draws, loaded)
        if loaded.epoch is not None and draws.sampler.epoch != loaded.epoch:
            select_path.say_once(
                f"the rest of an epoch is that of epoch {loaded.epoch}, which the loaded state names; "
                f"set_epoch({draws.sampler.epoch}) counts from the next one on"
            )
        size = _batch_size(loader)
        epoch = Epoch(dataclasses.replace(loaded, batch_size=size), loaded)
    _epochs.put(loader, epoch)
    return epoch


def _fresh(loader: Any) -> Epoch:
    epoch = Epoch(_beginning(loader), None)
    epoch.draws_from_program = order.draws_from_program(order.draws_of(loader))
    return epoch


def refuse(loader: Any, path: str) -> None:
    """Notes that an epoch on another path has no state.

    Raises:
        NotImplementedError: If the epoch was to begin with one.
    """
    if not getattr(type(loader), HAS_STATE, False):
        return
    text = f"the state of a loader on {path} cannot be had yet: ringloader.report() says why it is there"
    if _loaded.get(loader) is not None:
        raise NotImplementedError(text)
    epoch = Epoch(Saved(""), None)
    epoch.why_not = text
    _epochs.put(loader, epoch)


def rest_of(epoch: Epoch, index_sampler: Any) -> samplers.TorchDraws:
    """Returns the draws for the rest of an epoch that is resumed."""
    assert epoch.resumed is not None
    draws = samplers.draws_in_any_iter(index_sampler)
    assert draws is not None
    draws.record = epoch
    order.passing(epoch.resumed, draws, epoch.note_passed)
    return draws


class WithoutDrawing:
    """A loader before torch's iterator, which then draws its base seed from a generator of no one's."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.generator = torch.Generator()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _batch_size(loader: Any) -> int:
    if not loader._auto_collation:
        return 1
    return int(loader._index_sampler.batch_size)


def _beginning(loader: Any) -> Saved:
    """Returns the state before the next epoch. Draws nothing."""
    draws = order.draws_of(loader)
    own = order.sampler_generator(loader, draws)
    sampler = draws.sampler
    is_distributed = isinstance(sampler, DistributedSampler)
    rest = order.rest_of(loader)
    return Saved(
        sampler=order.kind_of(draws),
        number=epochs.next_of(loader),
        batch_size=_batch_size(loader),
        loader_generator=None if loader.generator is None else loader.generator.get_state(),
        sampler_generator=None if own is None else own.get_state(),
        rest=None if rest is None else tuple(rest),
        epoch=sampler.epoch if is_distributed else None,
        rank=sampler.rank if is_distributed else None,
        num_replicas=sampler.num_replicas if is_distributed else None,
    )


def _check_alike(found: Saved, now: Saved) -> None:
    if found.sampler != now.sampler:
        raise ValueError(
            f"load_state_dict(): the state is that of a {found.sampler}, and this loader has a "
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
    if (found.rank, found.num_replicas) != (now.rank, now.num_replicas):
        raise NotImplementedError(
            "load_state_dict() for another rank or number of ranks cannot be had yet: the state is that of "
            f"rank {found.rank} of {found.num_replicas}, and this is rank {now.rank} of {now.num_replicas}"
        )


def _check(loader: Any) -> samplers.TorchDraws:
    """Returns the draws of a loader whose state can be had.

    Raises:
        NotImplementedError: For another one.
    """
    why_not = _why_not(loader)
    if why_not is not None:
        raise NotImplementedError(f"the state of a loader with {why_not} cannot be had yet")
    return order.draws_of(loader)


def _why_not(loader: Any) -> str | None:
    dataset, options = loader.dataset, kept.kept_on(loader)
    if isinstance(dataset, IterableDataset):
        return "an IterableDataset"
    if isinstance(dataset, internals.DATA_PIPES):
        return "a DataPipe"
    if hasattr(dataset, "state_dict"):
        return "a dataset that has a state_dict"
    if loader.num_workers > 0 and not loader.in_order:
        return "in_order=False"
    if options.get("on_error", "raise") != "raise":
        return f"on_error={options['on_error']!r:.50}"
    for name in ("worker_reset_fn", "reseed_workers"):
        if options.get(name):
            return f"{name}={options[name]!r:.50}"
    rest = order.rest_of(loader)
    if rest is not None and any(type(index) is not int for index in rest):
        return "last_batch='rollover' over indices that are no ints"
    return None
