"""The iterator of a loader that has no workers, options or states: it costs little more than torch's.

Each question of ``make.py`` that such a loader has an answer to is asked in its cheapest form here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.utils.data

from ringloader._common import states
from ringloader._options import epochs
from ringloader._report import asked, report
from ringloader._torch import select_path
from ringloader._torch.replaced import recovers
from ringloader._worker import gather

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

REASON = "num_workers is 0"


class _Bare(torch.utils.data.DataLoader[Any]):
    """The attributes of a loader, without ``__getattr__``, with which each read takes three times as long."""

    # Not torch's, which look at what is set.
    __init__ = object.__init__
    __setattr__ = object.__setattr__  # type: ignore[assignment]


# Errors name it: an attribute may be missing.
_Bare.__name__ = _Bare.__qualname__ = torch.utils.data.DataLoader.__name__


def make(loader: TorchLoader, get_iterator: Any, own: dict[str, Any] | None = None) -> Any:
    """Returns the iterator; None for a loader that is not plain, or where ``make.py`` must look closer.

    Args:
        loader: A loader of any class whose options are the defaults.
        get_iterator: What stands in the place of torch's ``DataLoader._get_iterator``, be it our hook.
        own: The attributes of the loader, if its class has only methods of torch's and ours.
    """
    read = loader
    if own is not None:
        read = _Bare()
        read.__dict__ = own
    if read.num_workers != 0 or recovers(read) or not select_path.may_be_ours(get_iterator):
        return None
    kept = report.plain(loader)
    cls = _class_for(loader, read) if kept is None else kept.record.plain
    if cls is None:
        return None
    made = cls(read)
    if kept is None or not kept.record.count.follow_next(made):
        report.record(loader, made, "single-process", REASON, plain=cls)
    else:
        kept.times += 1
        made._noted = kept.record
    return made


def _class_for(loader: TorchLoader, read: TorchLoader) -> Any:
    """Returns the class of a loader's iterators; None if it is not plain. Called for the first one only."""
    # One whose epoch was forgotten is told in the log.
    if epochs.distributed_sampler(read) is not None or states.of(loader) is not None or asked.mode():
        return None
    # A torch without a private name that it needs has torch's path.
    from ringloader._iterator import without_workers

    is_gathered = gather.is_gathered(read.dataset)
    return without_workers.GatheringIterator if is_gathered else without_workers.SingleProcessIterator
