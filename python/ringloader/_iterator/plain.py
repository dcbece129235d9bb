"""The iterator of a loader that has no workers, options or states: it costs little more than torch's.

Each question of ``make.py`` that such a loader has an answer to is asked in its cheapest form here.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from ringloader._common import states
from ringloader._report import asked, report
from ringloader._torch import select_path
from ringloader._worker import gather

if TYPE_CHECKING:
    from ringloader._options.table import Options
    from ringloader._torch.protocols import TorchLoader

REASON = "num_workers is 0"


@functools.cache
def _iterator_class() -> Any:
    # A torch without a private name that it needs has torch's path. Once: an import takes long.
    from ringloader._iterator.without_workers import SingleProcessIterator

    return SingleProcessIterator


def make(loader: TorchLoader, options: Options, without_ours: Any) -> Any:
    """Returns the iterator; None for a loader that is not plain, or where ``make.py`` must look closer.

    Args:
        loader: A loader of any class.
        options: Its options.
        without_ours: As ``make_iterator`` takes it.
    """
    if loader.num_workers != 0 or options.changed() or asked.mode() or select_path.is_switch_set():
        return None
    batches = loader.batch_sampler
    if (
        type(batches) is not BatchSampler
        # One whose epoch was forgotten is told in the log.
        or issubclass(type(batches.sampler), DistributedSampler)
        or gather.is_gathered(loader.dataset)
        or states.of(loader) is not None
        or not select_path.has_torchs_iterator(without_ours)
    ):
        return None
    made = _iterator_class()(loader)
    if not report.record_again(loader, made, "single-process", REASON):
        report.record(loader, made, "single-process", REASON)
    return made
