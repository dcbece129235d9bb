"""The workers of an iterator that a pool lends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringloader._options import epochs
from ringloader._transport import budget
from ringloader._transport.make import WorkerKind

if TYPE_CHECKING:
    from ringloader._start.starter import Starter
    from ringloader._torch.protocols import TorchLoader
    from ringloader._torch.select_path import Reason


class Lent(WorkerKind):
    """The workers of an iterator that a pool lends.

    Args:
        pool: The pool.
        crew: What the pool lends from.
    """

    def __init__(self, pool: object, crew: Any) -> None:
        self._pool = pool
        self._crew = crew

    def refuse(self, reason: Reason) -> None:
        if not self.are_here:
            # torch would start as many workers on this machine.
            raise RuntimeError(
                f"the workers of {self._pool!r} cannot be used: {reason.text}; leave worker_pool "
                "out for workers on this machine"
            )

    def told(self, loader: TorchLoader) -> int | None:
        return epochs.told_in_pool(loader)

    def starter(self, loader: TorchLoader, running: int, most: int) -> Starter:
        with budget.asking(OSError):
            lease: Starter = self._crew.lend(self._pool, loader, running, most)
        return lease
