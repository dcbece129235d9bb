"""``worker_concurrency``: its feature."""

from __future__ import annotations

from collections.abc import Iterable
from multiprocessing import util
from typing import TYPE_CHECKING, Any

from ringloader._core.feature import Feature, Setup
from ringloader._core.notes import beyond_iterators
from ringloader._features.concurrency.event_loop import Holder, Kept
from ringloader._features.concurrency.making import Samples, Tasks
from ringloader._features.rules import has_remote_pool
from ringloader._features.shared_words import SharedWords
from ringloader._features.table import Options
from ringloader._worker.options import WorkerOption

if TYPE_CHECKING:
    from ringloader._common.protocols import OurIterator
    from ringloader._torch.protocols import TorchLoader


class Concurrency(Feature):
    """Makes the samples of each worker several at once.

    Args:
        samples: Makes them.
        reads_ahead: True if workers take tasks before their turn.
        are_processes: True if the workers are processes of this one.
        words: The most samples under way, by worker; None: not noted.
    """

    def __init__(
        self, samples: Samples, reads_ahead: bool, are_processes: bool, words: SharedWords | None
    ) -> None:
        self._options = samples, Tasks()
        self._reads_ahead = reads_ahead
        self._are_processes = are_processes
        # Ends the workers where the program exits.
        self._at_exit: Any = None
        self._words = words
        # The most samples under way, by worker, read before the memory was given back.
        self._last: list[int] = []

    def setup(self, setup: Setup) -> Setup:
        return setup._replace(under_way=self._under_way)

    def _under_way(self, worker: int) -> int:
        if self._last or self._words is None:
            return self._last[worker] if worker < len(self._last) else 0
        return self._words.get(worker, 0)

    def workers(self) -> Iterable[WorkerOption]:
        return self._options

    def schedule(self, scheduler: Any) -> None:
        if self._reads_ahead:
            scheduler.take_ahead()

    def begun(self, loader: TorchLoader, iterator: OurIterator) -> None:  # noqa: ARG002
        workers: Any = getattr(iterator, "_all_workers", None)
        if self._are_processes and self._at_exit is None:
            # Before `multiprocessing` terminates them, so that they close their datasets.
            self._at_exit = util.Finalize(None, workers.end, (True,), exitpriority=1)

    def close(self) -> None:
        if self._at_exit is not None:
            self._at_exit.cancel()
        if self._words is not None and not self._last:
            self._last = self._words.words.tolist()
            self._words.close()


def feature_for(loader: TorchLoader, options: Options, setup: Setup) -> Concurrency | None:
    """Returns the feature; torch's own loader has none."""
    if setup.path == "torch":
        return None
    are_here, is_remote = setup.path in ("threads", "single-process"), has_remote_pool(options)
    holder = _held_by(loader, one_thread=setup.workers > 0) if are_here else None
    words = None
    # Actors on other machines share no memory.
    if options.stats and not is_remote:
        words = SharedWords.make("ringloader-under-way", 1, max(setup.workers, 1))
    samples = Samples(options.worker_concurrency, options.sample_timeout, holder, words)
    # A worker claims one run of a batch after another.
    return Concurrency(samples, options.worker_task != "sample", not (are_here or is_remote), words)


def _held_by(loader: TorchLoader, one_thread: bool) -> Holder:
    """Returns the loop and lines that a loader has over all its epochs."""
    found = beyond_iterators.get(loader)
    if isinstance(found, Holder) and found.kept.is_of_this_process and found.kept.one_thread == one_thread:
        return found
    made = Holder(Kept(one_thread))
    beyond_iterators.put(loader, made)
    return made
