"""``worker_concurrency``: its feature."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ringloader._core.feature import Feature, Setup
from ringloader._core.notes import beyond_iterators
from ringloader._features.concurrency.event_loop import Holder, Kept
from ringloader._features.concurrency.making import Samples, Tasks
from ringloader._features.table import Options
from ringloader._worker.options import WorkerOption

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader


class Concurrency(Feature):
    """Makes the samples of each worker several at once.

    Args:
        samples: Makes them.
        reads_ahead: True if workers take tasks before their turn.
    """

    def __init__(self, samples: Samples, reads_ahead: bool) -> None:
        self._options = samples, Tasks()
        self._reads_ahead = reads_ahead

    def workers(self) -> Iterable[WorkerOption]:
        return self._options

    def schedule(self, scheduler: Any) -> None:
        if self._reads_ahead:
            scheduler.take_ahead()


def feature_for(loader: TorchLoader, options: Options, setup: Setup) -> Concurrency | None:
    """Returns the feature; torch's own loader has none."""
    if setup.path == "torch":
        return None
    are_here = setup.path in ("threads", "single-process")
    holder = _held_by(loader, one_thread=setup.workers > 0) if are_here else None
    samples = Samples(options.worker_concurrency, options.sample_timeout, holder)
    # A worker claims one run of a batch after another.
    return Concurrency(samples, reads_ahead=options.worker_task != "sample")


def _held_by(loader: TorchLoader, one_thread: bool) -> Holder:
    """Returns the loop and lines that a loader has over all its epochs."""
    found = beyond_iterators.get(loader)
    if isinstance(found, Holder) and found.kept.is_of_this_process and found.kept.one_thread == one_thread:
        return found
    made = Holder(Kept(one_thread))
    beyond_iterators.put(loader, made)
    return made
