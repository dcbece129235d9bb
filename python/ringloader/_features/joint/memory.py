"""``worker_task="sample"`` in the main process: the memory of tasks that all worker processes share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ringloader._native as _native
from ringloader._features.joint import worker_task
from ringloader._features.joint.channel import ProcessJoint

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

_PAGE = 1 << 12


class JointMemory:
    """The memory, and the option of workers that use it.

    Args:
        loader: The loader.
        engine: The engine of its workers.
        workers: The most workers that it may have.
        nbytes: Bytes of the slots of all workers.
        timed: True if runs are timed.
    """

    def __init__(
        self, loader: TorchLoader, engine: _native.Engine, workers: int, nbytes: int, timed: bool
    ) -> None:
        # Returns the most tasks that may be out while a number of workers share them.
        self.most_tasks = worker_task.most_tasks(loader)
        places = self.most_tasks(workers)
        # All windows have as many bytes as the slots: those of the batches under way, of as many that the
        # caller keeps, and of the one on its way to him.
        window = max(nbytes // (2 * places + 1) // _PAGE, 1) * _PAGE
        whole = worker_task.keeps_whole(loader)
        self.engine = _native.JointEngine(engine, workers, places, window, whole, timed)
        self.option = ProcessJoint(self.engine.fds(), places, window, whole, timed)


def share_of_slots(share: int) -> int:
    """Returns the bytes of a worker's slots, where samples on their way have the other half."""
    return max(share // 2, 1)
