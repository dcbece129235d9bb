"""The iterator of a loader that has no workers, options or states: it costs little more than torch's.

Each question of ``make.py`` that such a loader has an answer to is asked in its cheapest form here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.utils.data
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from ringloader._common import states
from ringloader._report import asked, report
from ringloader._torch import select_path
from ringloader._worker import gather

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

REASON = "num_workers is 0"

# The class of iterators. A torch without a private name that it needs has torch's path.
_Iterator: Any = None


class _Bare(torch.utils.data.DataLoader[Any]):
    """The attributes of a loader, without ``__getattr__``, with which each read takes three times as long."""


_new: Any = object.__new__
# The descriptor itself: torch's class sets attributes by a method of its own.
_set_attributes = next(vars(one)["__dict__"] for one in _Bare.__mro__ if "__dict__" in vars(one)).__set__


def bare(loader: TorchLoader) -> Any:
    """Returns an object with the same ``__dict__`` as a loader, whose attributes are quicker to read.

    Args:
        loader: A loader whose class has only methods of torch's and ours.
    """
    made = _new(_Bare)
    _set_attributes(made, vars(loader))
    return made


def make(loader: TorchLoader, read: TorchLoader, get_iterator: Any) -> Any:
    """Returns the iterator; None for a loader that is not plain, or where ``make.py`` must look closer.

    Args:
        loader: A loader of any class whose options are the defaults.
        read: The loader, or the object that :func:`bare` returns for it.
        get_iterator: What stands in the place of torch's ``DataLoader._get_iterator``, be it our hook.
    """
    global _Iterator
    if read.num_workers != 0 or asked.mode() or select_path.is_switch_set():
        return None
    batches = read.batch_sampler
    if (
        type(batches) is not BatchSampler
        # One whose epoch was forgotten is told in the log.
        or issubclass(type(batches.sampler), DistributedSampler)
        or gather.is_gathered(read.dataset)
        or (read is loader and states.of(loader) is not None)
        or not select_path.has_torchs_iterator(get_iterator)
    ):
        return None
    if _Iterator is None:
        from ringloader._iterator.without_workers import SingleProcessIterator as _Iterator
    made = _Iterator(read)
    if not report.record_again(loader, made):
        report.record(loader, made, "single-process", REASON)
    return made
