"""Workers that are processes of their iterator, and their transport, with its memory."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ringloader._native as _native
from ringloader._common import held_memory
from ringloader._core.epochs import Told
from ringloader._core.feature import Feature, MemoryPlan, Options, Setup
from ringloader._start import processes
from ringloader._start.processes import NewProcesses, Starter
from ringloader._torch import select_path
from ringloader._torch.select_path import Reason
from ringloader._transport import budget
from ringloader._transport.processes import ProcessTransport
from ringloader._transport.protocol import Transport
from ringloader._transport.segment_cache import SegmentCache
from ringloader._worker.options import WorkerOption

if TYPE_CHECKING:
    from ringloader._common.protocols import PathName
    from ringloader._torch.protocols import TorchLoader


class WorkerKind:
    """The workers of an iterator: processes that it starts itself, where no option gives it others.

    Attributes:
        path: The path of such iterators, as a report names it.
        are_here: True if they use cores of this machine.
    """

    path: PathName = "native"
    are_here = True

    def reason_for_torch(self, loader: TorchLoader, get_iterator: Any) -> Reason | None:
        """Returns why a loader cannot have these workers, or None.

        Args:
            loader: The loader.
            get_iterator: ``DataLoader._get_iterator`` without our hook.
        """
        return select_path.reason_for_torch(loader, get_iterator)

    def refuse(self, reason: Reason) -> None:
        """Raises a ``RuntimeError`` where torch's own workers may not take their place."""

    def while_made(self) -> contextlib.AbstractContextManager[None]:
        """Returns a block in which the iterator is made."""
        return processes.one_start_at_a_time()

    def told(self, loader: TorchLoader) -> Told | None:  # noqa: ARG002
        """Returns what workers are told whose dataset may have been told another epoch; None: nothing."""
        return None

    def starter(self, loader: TorchLoader, running: int, most: int) -> Starter:  # noqa: ARG002
        """Returns the starter of the workers of one iterator.

        Args:
            loader: The loader.
            running: The workers that it begins with.
            most: The most workers that it may have.
        """
        return NewProcesses(loader)

    def transport(
        self,
        loader: TorchLoader,
        options: Options,
        setup: Setup,
        worker_options: Sequence[WorkerOption],
        features: Sequence[Feature],
    ) -> Transport:
        """Makes the transport of one iterator.

        Args:
            loader: The loader.
            options: Its options.
            setup: The way in which the iterator makes its batches.
            worker_options: The options that workers ask.
            features: The features that are on.

        Raises:
            RefusedError: When shared memory cannot be had, or so many workers with so many tasks have no room
                in the address space.
        """
        workers = setup.workers
        # Before the memory, which a process that is forked now would have too.
        starter = self.starter(loader, setup.running, workers)
        try:
            held_memory.tell_of_forks()
            if held_memory.kept_views:
                held_memory.drop_unread()
            in_turn = all(feature.in_turn for feature in features)
            plan = MemoryPlan(budget.most_tasks(loader, workers, in_turn), workers)
            for feature in features:
                plan = feature.memory(plan)
            cache = SegmentCache(loader, workers, (plan.most_tasks, options.max_shared_bytes, plan.use))
            available = _native.available_memory() + cache.resident
            share = budget.share_per_worker(plan.sharers, options.max_shared_bytes, available)
            share = max(share // plan.parts, 1)
            with budget.asking(OSError, ValueError):
                found = cache.take(share)
                engine, beside = found or (_native.Engine(workers, plan.most_tasks, share), None)
        except BaseException:
            starter.close()
            raise
        return ProcessTransport(engine, beside, starter, workers, cache, worker_options, features)
