"""The feature of states: the state of a loader's epoch, and the beginning of epochs, new or resumed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

import ringloader._native as _native
from ringloader._core import epochs
from ringloader._core.feature import Feature, Setup, Stage
from ringloader._features.state import dataset_state, saved
from ringloader._features.state.epoch import Epoch, SampledEpoch, StreamedEpoch, TorchsEpoch
from ringloader._features.state.order import NativeOrder
from ringloader._features.state.reading import ReadOrder
from ringloader._features.state.saved import Saved
from ringloader._features.state.snapshots import Snapshots
from ringloader._log import logger
from ringloader._sources import samplers
from ringloader._torch import internals, select_path

if TYPE_CHECKING:
    from ringloader._common.protocols import OurIterator
    from ringloader._torch.protocols import TorchIterator, TorchLoader

# The attribute of a loader with the epoch that began last.
_EPOCH = "_ringloader_epoch"
# The attribute of a loader with the state from which its next epoch begins: copies and pickles have it too.
_LOADED = "_ringloader_loaded_state"


def state_of(loader: TorchLoader) -> dict[str, Any]:
    """Implements ``StatefulDataLoader.state_dict``."""
    found = loaded_of(loader)
    if found is None:
        epoch = _last_epoch(loader)
        if epoch is None:
            found = _beginning(loader, _order_of(loader))
            # Another thread may have begun the first epoch meanwhile, which moves the sampler.
            if _last_epoch(loader) is not None:
                return state_of(loader)
        elif epoch.why_not is None:
            found = epoch.saved()
        else:
            select_path.log_once(
                f"state_dict() returns {{}}, so a resumed run starts its epoch over: {epoch.why_not}"
            )
            return {}
    return saved.to_dict(found)


def fingerprint_of(loader: TorchLoader) -> int | None:
    """Implements ``StatefulDataLoader.fingerprint``."""
    epoch = _last_epoch(loader)
    return 0 if epoch is None else epoch.fingerprint()


def load(loader: TorchLoader, state: object) -> None:
    """Implements ``StatefulDataLoader.load_state_dict``."""
    if not isinstance(state, dict):
        raise TypeError(f"load_state_dict() needs the dict that state_dict() returned, not {state!r:.80}")
    # accelerate adds its keys to an empty state too.
    if not set(state) - saved.EDITED:
        return
    found = saved.from_dict(state)
    order = _order_of(loader)
    _check_alike(found, _beginning(loader, order))
    dataset_state.check(loader, found.workers)
    if order is not None:
        order.set_epoch(found.epoch)
    epochs.count_from(loader, found.number + found.is_finished)
    epochs.forget_shuffled(loader)
    setattr(loader, _LOADED, found)


def loaded_of(loader: TorchLoader) -> Saved | None:
    """Returns the state with which the next epoch begins, if one was loaded."""
    found: Saved | None = vars(loader).get(_LOADED)
    return found


class State(Feature):
    """The state of a loader in one of its iterators.

    Args:
        option: Takes the states of its dataset, if it may have one.
    """

    def __init__(self, option: Snapshots | None) -> None:
        self._option = option
        # The epoch that was planned last, and the one that has begun.
        self._planned: SampledEpoch | StreamedEpoch | None = None
        self._epoch: SampledEpoch | StreamedEpoch | None = None

    def workers(self) -> Iterable[Snapshots]:
        return () if self._option is None else (self._option,)

    def stages(self) -> Iterable[Stage]:
        return () if self._planned is None else self._planned.stages()

    def loaded(self, loader: TorchLoader) -> Saved | None:
        return loaded_of(loader)

    def track(
        self, loader: TorchLoader, iterator: OurIterator, number: int, loaded: Saved | None, are_same: bool
    ) -> SampledEpoch | StreamedEpoch:
        self._planned = _planned(loader, iterator, number, loaded, are_same, self._option)
        return self._planned

    def torchs(
        self, loader: TorchLoader, reason: str, get_iterator: Any, iterator: TorchIterator | None = None
    ) -> Any:
        """Makes torch's own iterator, or begins another epoch of it. None: the epoch has no state.

        Raises:
            RuntimeError: If the epoch was to go on from a state, and cannot.
        """
        self._planned = None
        loaded, why_not = loaded_of(loader), _why_not(loader, get_iterator)
        if why_not is not None and loaded is not None:
            raise RuntimeError(
                f"the state that was loaded cannot take effect where torch's own loader runs: {reason}; "
                f"{why_not}; to start the epoch over, make a new loader and load no state"
            )
        if why_not is not None:
            why_not = f"torch's own loader runs: {reason}; {why_not}"
            _set_last_epoch(loader, Epoch(Saved("", fingerprint=None), None, why_not=why_not))
            return None
        epoch = _planned(loader, None, epochs.next_of(loader), loaded, iterator is not None)
        assert isinstance(epoch, TorchsEpoch)
        if iterator is None:
            iterator = epoch.make(loader, get_iterator)
        else:
            epoch.reset(loader, iterator)
        self._planned = epoch
        return iterator

    def begun(self, loader: TorchLoader, iterator: OurIterator) -> None:
        """Makes the loader's state that of the epoch, and no loaded one any more."""
        epoch = self._epoch = self._planned
        if epoch is not None:
            epoch.attach(iterator)
            # In this order: another thread that asks finds the loaded state, or that of this epoch.
            _set_last_epoch(loader, epoch)
            vars(loader).pop(_LOADED, None)

    def raised(self, iterator: OurIterator, error: BaseException) -> None:
        if self._epoch is not None:
            self._epoch.record_error(iterator, error)


def feature_for(loader: TorchLoader, _options: object, setup: Setup) -> State:
    """Returns the feature of states. torch's own loader takes none of a dataset."""
    return State(None if setup.path == "torch" else dataset_state.option_for(loader))


def _why_not(loader: TorchLoader, get_iterator: TorchIterator) -> str | None:
    """Returns the reason why a loader has no state where torch's own loader runs, or None.

    Args:
        loader: The loader.
        get_iterator: What stands in the place of torch's ``DataLoader._get_iterator``, our hook aside.
    """
    if not _native.SUPPORTED or internals.missing_name() is not None:
        return "this build or torch lacks what a state needs"
    if not isinstance(loader.num_workers, int):
        return "num_workers is no int"
    reason = select_path.reason_against_reading(loader, get_iterator)
    if reason is not None:
        return reason
    if loader.num_workers > 1 and not loader.in_order:
        return "with in_order=False it does not say which batches it has given"
    return "no position of an IterableDataset can be had there" if dataset_state.decides(loader) else None


def _planned(
    loader: TorchLoader,
    iterator: OurIterator | None,
    number: int,
    loaded: Saved | None,
    are_same: bool,
    option: Snapshots | None = None,
) -> SampledEpoch | StreamedEpoch:
    """Returns an epoch before anything is drawn for it. Until it has begun, the loader's state is as before.

    Args:
        loader: The loader.
        iterator: Its iterator, which the epoch does not keep alive; None: torch's own loader
            runs, which knows no worker's state, and its iterator is attached later.
        number: The number of the epoch.
        loaded: The state from which it resumes; None: it begins.
        are_same: True if the workers are those of the epoch before.
        option: Takes the states of its dataset, if it may have one.
    """
    previous = _last_epoch(loader)
    if previous is not None:
        previous.end()
    order = _order_of(loader)
    if loaded is None:
        begun, seed = _beginning(loader, order, number), None
        if previous is None:
            _set_last_epoch(loader, Epoch(begun, None))
    else:
        if option is None:
            # torch's loader takes no state of a map-style dataset.
            loaded = loaded.but(workers=None)
        begun, order, seed = _resumed(loader, order, loaded, number, are_same)
    dataset = None if option is None else dataset_state.state_for(loader, option, begun, loaded is not None)
    if order is None:
        return StreamedEpoch(begun, iterator, dataset, seed)
    kind = TorchsEpoch if iterator is None else SampledEpoch
    return kind(begun, iterator, order, dataset, seed)


def _last_epoch(loader: TorchLoader) -> Epoch | None:
    """Returns the epoch of a loader that began last."""
    found: Epoch | None = vars(loader).get(_EPOCH)
    # A copy of a loader has the other one's.
    return None if found is None or found.loader is None or found.loader() is not loader else found


def _set_last_epoch(loader: TorchLoader, epoch: Epoch) -> None:
    """Sets the epoch of a loader that began last."""
    epoch.loader = weakref.ref(loader)
    vars(loader)[_EPOCH] = epoch


def _resumed(
    loader: TorchLoader,
    order: NativeOrder | ReadOrder | None,
    loaded: Saved,
    number: int,
    are_same: bool,
) -> tuple[Saved, NativeOrder | ReadOrder | None, int | None]:
    """Returns the beginning of an epoch that resumes from a state, its order, and the seed of its workers.

    Args:
        loader: The loader. Its generators, and its sampler, are put to where the epoch goes on.
        order: The order of its samples, if it has one.
        loaded: The state.
        number: The number of the epoch.
        are_same: True if the workers are those of the epoch before.
    """
    named = None if order is None else order.named_epoch()
    _restore_generator(loader, loaded, are_same)
    if order is not None:
        order.restore(loaded)
    if loaded.is_finished or not loaded.has_begun:
        if loaded.is_finished and order is not None:
            order.pass_epoch(loaded)
        order = None if order is None else _order_of(loader)
        # Workers that had lived on would have their seed from before.
        seed = loaded.base_seed if loaded.is_finished and loader.persistent_workers else None
        return _beginning(loader, order, number), order, seed
    if order is None:
        rest = _rest_of_dataset(loader, loaded)
    else:
        if named != loaded.epoch:
            select_path.log_once(
                f"the rest of an epoch is that of epoch {loaded.epoch}, which the loaded state names; "
                f"set_epoch({named}) does not count for it"
            )
        rest = order.resumed(loaded).but(batch_size=_beginning(loader, order).batch_size)
    return rest, order, rest.base_seed


def _rest_of_dataset(loader: TorchLoader, loaded: Saved) -> Saved:
    """Returns the state from which the epoch of an iterable dataset resumes. Logs what is read again."""
    before = loaded.workers
    assert before is not None
    workers = before.moved(loaded.num_yielded - loaded.batches)
    batches = workers.reads_again()
    if batches and not before.is_stateful:
        logger.warning(
            "load_state_dict(): %d batches of the %s are read again and dropped, because the loaded state "
            "has none of it: give it, or the iterator of its __iter__, a state_dict and load_state_dict",
            batches,
            type(loader.dataset).__name__,
        )
    return loaded.but(batches=loaded.num_yielded, workers=workers)


def _restore_generator(loader: TorchLoader, loaded: Saved, are_same: bool) -> None:
    """Puts the loader's generator to where the epoch's draws of seeds had left it."""
    draws = are_same
    if loaded.loader_generator is not None:
        loader.generator.set_state(loaded.loader_generator)
        draws = loaded.base_seed_drawn if loaded.has_begun else are_same
    elif loaded.has_begun:
        return
    if draws:
        # torch's iterator draws it too. MIRRORS torch dataloader.py::_BaseDataLoaderIter.
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)


def _order_of(loader: TorchLoader) -> NativeOrder | ReadOrder | None:
    """Returns the order of a loader's samples; None if its dataset decides."""
    if dataset_state.decides(loader):
        return None
    found = loader._index_sampler
    draws = samplers.draws_of(found, for_state=True)
    return ReadOrder(loader, found) if draws is None else NativeOrder(loader, found, draws)


def _beginning(
    loader: TorchLoader, order: NativeOrder | ReadOrder | None, number: int | None = None
) -> Saved:
    """Returns the state before an epoch: the one with this number, or the next one. Draws nothing."""
    generator = loader.generator
    # torch refuses what is no generator when it draws.
    has_own = isinstance(generator, torch.Generator) and generator is not torch.default_generator
    begun = dataset_state.beginning(loader) if order is None else order.beginning()
    return begun.but(
        number=epochs.next_of(loader) if number is None else number,
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
    if found.rest is not None and found.batch_size != now.batch_size:
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
