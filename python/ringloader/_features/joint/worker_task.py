"""``worker_task="sample"`` in the main process: tasks that all workers share, and how many there are."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ringloader._native as _native
from ringloader._core.feature import Feature, MemoryPlan, Setup
from ringloader._features import arrays
from ringloader._features.table import Options, takes_options
from ringloader._worker.fetch import gives_several

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

# The `prefetch_factor` of a loader with workers that was given none.
_TORCHS_DEFAULT = 2
# The most batches under way. Each worker looks through the places of all for samples to make.
_MOST = 1024
# The attribute of a loader with the default that was set as its `prefetch_factor`.
_DEFAULT = "_ringloader_default_prefetch"


def most_tasks(loader: TorchLoader) -> Callable[[int], int]:
    """Returns how many batches may be under way over all workers, as a function of their number."""
    factor = loader.prefetch_factor
    # torch's constructor has set its own, where none was given.
    is_torchs = factor in (_TORCHS_DEFAULT, None) and not takes_options(loader)
    if is_torchs or (factor is not None and factor == vars(loader).get(_DEFAULT)):
        return _default_prefetch(loader)
    # torch's constructor refuses anything else that stands there, and has drawn by then.
    given = min(max(factor, 1), _MOST) if isinstance(factor, int) else 1
    return lambda _: given


def complete(loader: TorchLoader, options: Options, has_default_prefetch: bool) -> None:
    """Sets the default of ``prefetch_factor``: 4, or as many as give each worker two samples.

    It follows the number of workers where that changes.
    """
    if options.worker_task == "sample" and has_default_prefetch and loader.num_workers > 0:
        loader.prefetch_factor = vars(loader)[_DEFAULT] = _default_prefetch(loader)(loader.num_workers)


def _default_prefetch(loader: TorchLoader) -> Callable[[int], int]:
    # A batch sampler's batches may be of any size.
    samples = 1 if keeps_whole(loader) else loader.batch_size
    return lambda workers: 4 if samples is None else min(max(4, -(-2 * workers // samples)), _MOST)


def keeps_whole(loader: TorchLoader) -> bool:
    """True if a batch of a loader is made by one worker: its dataset gives several samples at a time."""
    return (
        not loader._auto_collation or arrays.option_for(loader) is not None or gives_several(loader.dataset)
    )


def feature_for(loader: TorchLoader, options: Options, setup: Setup) -> JointTasks | None:
    """Returns the feature of tasks that all workers share; None without workers."""
    return JointTasks(loader, setup, options.stats) if setup.workers else None


class JointTasks(Feature):
    """Tasks that all workers of an iterator share.

    Args:
        loader: The loader.
        setup: The way in which the iterator makes its batches.
        timed: True if runs are timed.
    """

    def __init__(self, loader: TorchLoader, setup: Setup, timed: bool) -> None:
        # Returns the most tasks that may be out while a number of workers share them.
        self._most_tasks = most_tasks(loader)
        self._whole = keeps_whole(loader)
        self._setup = setup
        self._number = loader.num_workers
        self._sharers = setup.workers
        self._timed = timed
        # The engine over the memory of these tasks.
        self._engine: _native.JointEngine | None = None

    def memory(self, plan: MemoryPlan) -> MemoryPlan:
        self._sharers = plan.sharers
        # Samples on their way have the other part.
        return plan._replace(most_tasks=self._most_tasks(self._setup.workers) + 1, parts=2)

    def attach(self, transport: Any) -> None:
        # Other systems, which ask this module too, lack what these need.
        from ringloader._features.joint.channel import ProcessJoint, ThreadJoint
        from ringloader._transport import budget

        transport.joint_tasks = self._most_tasks
        if self._setup.path == "threads":
            transport.engine.share_tasks(self._most_tasks(self._number), not self._whole)
            transport.add(ThreadJoint(self._whole))
            return
        workers, engine = self._setup.workers, transport.engine
        places = self._most_tasks(workers)
        # All windows have as many bytes as the slots: those of the batches under way, of as many that the
        # caller keeps, and of the one on its way to him. No two share a page.
        window = max(self._sharers * engine.share // (2 * places + 1) // mmap.PAGESIZE, 1) * mmap.PAGESIZE
        with budget.asking(OSError, ValueError):
            self._engine = joint = _native.JointEngine(
                engine, workers, places, window, self._whole, self._timed
            )
        transport.scheduled, transport.scheduler = joint, _native.JointScheduler
        transport.add(ProcessJoint(joint.fds(), places, window, self._whole, self._timed))

    def schedule(self, scheduler: Any) -> None:
        scheduler.share_tasks(self._most_tasks(self._setup.workers))

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
