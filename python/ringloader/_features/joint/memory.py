"""``worker_task="sample"`` in the main process: tasks that all workers share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ringloader._native as _native
from ringloader._core.feature import Feature, MemoryPlan, Setup
from ringloader._features.joint import worker_task
from ringloader._features.joint.channel import ProcessJoint
from ringloader._features.joint.thread_channel import ThreadJoint
from ringloader._features.table import Options
from ringloader._transport import budget

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

_PAGE = 1 << 12


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
        self._most_tasks = worker_task.most_tasks(loader)
        self._whole = worker_task.keeps_whole(loader)
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
        transport.joint_tasks = self._most_tasks
        if self._setup.path == "threads":
            transport.engine.share_tasks(self._most_tasks(self._number), not self._whole)
            transport.add(ThreadJoint(self._whole))
            return
        workers, engine = self._setup.workers, transport.engine
        places = self._most_tasks(workers)
        # All windows have as many bytes as the slots: those of the batches under way, of as many that the
        # caller keeps, and of the one on its way to him.
        window = max(self._sharers * engine.share // (2 * places + 1) // _PAGE, 1) * _PAGE
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
