"""The epoch of a loader that began last, its state, and the state that was loaded for the next one.

Iterators find this module by the loader's class. MIRRORS _core/states.py::States.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from ringloader._core import epochs
from ringloader._features.state import datasets, saved, torchs
from ringloader._features.state.epoch import Epoch, SampledEpoch, StreamedEpoch
from ringloader._features.state.resuming import beginning, check_alike, order_of, resumed
from ringloader._features.state.saved import Saved
from ringloader._features.state.torchs import TorchsEpoch
from ringloader._torch import select_path

if TYPE_CHECKING:
    from ringloader._common.protocols import OurIterator
    from ringloader._torch.protocols import TorchLoader

# The attribute of a loader with the epoch that began last.
_EPOCH = "_ringloader_epoch"
# The attribute of a loader with the state from which its next epoch begins: copies and pickles have it too.
_LOADED = "_ringloader_loaded_state"

ask_dataset, worker_option = datasets.is_asked, datasets.option_for


class _Own:
    """Holds the epoch of a loader. Copies and pickles of the loader do not have it.

    It is an attribute of the loader, so that a dataset may refer to its loader, and both be freed.
    """

    __slots__ = ("epoch", "owner")

    def __init__(self, owner: weakref.ref[Any] | None = None, epoch: Epoch | None = None) -> None:
        self.owner = owner
        self.epoch = epoch

    def __reduce__(self) -> Any:
        return _Own, ()


def state_of(loader: TorchLoader) -> dict[str, Any]:
    """Implements ``StatefulDataLoader.state_dict``."""
    found = loaded_of(loader)
    if found is None:
        epoch = last_epoch(loader)
        if epoch is None:
            found = beginning(loader, order_of(loader))
        elif epoch.why_not is None:
            found = epoch.saved()
        else:
            select_path.log_once(
                f"state_dict() returns {{}}, by which a run begins its epoch anew: {epoch.why_not}"
            )
            return {}
    return saved.to_dict(found)


def fingerprint_of(loader: TorchLoader) -> int | None:
    """Implements ``StatefulDataLoader.fingerprint``."""
    epoch = last_epoch(loader)
    return 0 if epoch is None else epoch.fingerprint()


def load(loader: TorchLoader, state: object) -> None:
    """Implements ``StatefulDataLoader.load_state_dict``."""
    if not isinstance(state, dict):
        raise TypeError(f"load_state_dict() needs the dict that state_dict() returned, not {state!r:.80}")
    # accelerate adds its keys to an empty state too.
    if not set(state) - saved.EDITED:
        return
    found = saved.from_dict(state)
    order = order_of(loader)
    check_alike(found, beginning(loader, order))
    datasets.check(loader, found.workers)
    if found.epoch is not None and order is not None:
        order.set_epoch(found.epoch)
    epochs.count_from(loader, found.number + found.is_finished)
    setattr(loader, _LOADED, found)


def loaded_of(loader: TorchLoader) -> Saved | None:
    """Returns the state with which the next epoch begins, if one was loaded."""
    found: Saved | None = vars(loader).get(_LOADED)
    return found


def begin(
    loader: TorchLoader,
    iterator: OurIterator | None,
    number: int,
    loaded: Saved | None,
    are_same: bool = False,
) -> SampledEpoch | StreamedEpoch:
    """Begins an epoch of a loader, before anything is drawn for it.

    Until :func:`has_begun`, the loader's state is that of the epoch before, or the loaded one.

    Args:
        loader: The loader.
        iterator: Its iterator, which the epoch does not keep alive; None: torch's own loader
            runs, which knows no worker's state, and its iterator is attached later.
        number: The number of the epoch.
        loaded: The state from which it resumes; None: it begins.
        are_same: True if the workers are those of the epoch before.
    """
    previous = last_epoch(loader)
    if previous is not None:
        previous.end()
    # Workers that live on keep their iterator, which has asked the loader for its sampler.
    order = order_of(loader, None if iterator is None or not are_same else iterator._index_sampler)
    if loaded is None:
        begun, seed = beginning(loader, order, number), None
        if previous is None:
            set_last_epoch(loader, Epoch(begun, None))
    else:
        begun, order, seed = resumed(loader, order, loaded, number, are_same, iterator is None)
    is_resumed = loaded is not None
    dataset = None if iterator is None else datasets.state_for(loader, iterator, begun, is_resumed)
    if order is not None:
        return SampledEpoch(begun, iterator, order, dataset, seed)
    return StreamedEpoch(begun, iterator, dataset, seed)


def begin_torchs(
    loader: TorchLoader, reason: str, get_iterator: Any, are_same: bool = False
) -> TorchsEpoch | None:
    """Begins an epoch that torch's own loader runs whole. None: it has no state.

    Args:
        loader: The loader.
        reason: The reason why torch's loader runs.
        get_iterator: What stands in the place of torch's ``DataLoader._get_iterator``, our hook aside.
        are_same: True if the workers are those of the epoch before.

    Raises:
        RuntimeError: If the epoch was to go on from a state, and cannot.
    """
    loaded = loaded_of(loader)
    why_not = torchs.why_not(loader, get_iterator)
    if why_not is None:
        epoch = begin(loader, None, epochs.next_of(loader), loaded, are_same)
        assert isinstance(epoch, SampledEpoch)
        return TorchsEpoch(loader, epoch)
    if loaded is not None:
        raise RuntimeError(
            f"the state that was loaded cannot take effect where torch's own loader runs: {reason}; "
            f"{why_not}; to begin the epoch anew, make the loader anew and load no state"
        )
    why_not = f"torch's own loader runs: {reason}; {why_not}"
    set_last_epoch(loader, Epoch(Saved("", fingerprint=None), None, why_not=why_not))
    return None


def last_epoch(loader: TorchLoader) -> Epoch | None:
    """Returns the epoch of a loader that began last."""
    found = vars(loader).get(_EPOCH)
    if type(found) is not _Own or found.owner is None or found.owner() is not loader:
        return None
    return found.epoch


def set_last_epoch(loader: TorchLoader, epoch: Epoch) -> None:
    """Sets the epoch of a loader that began last."""
    vars(loader)[_EPOCH] = _Own(weakref.ref(loader), epoch)


def has_begun(loader: TorchLoader, epoch: Epoch) -> None:
    """Records that an epoch has begun: the loader's state is its own, and no loaded one any more.

    Args:
        loader: The loader.
        epoch: The epoch.
    """
    # In this order: another thread that asks for the state finds the loaded one, or that of this epoch.
    set_last_epoch(loader, epoch)
    vars(loader).pop(_LOADED, None)
