"""Workers that are processes of their iterator, and their transport: its memory, and what its options add."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ringloader._native as _native
from ringloader._common import held_memory
from ringloader._core.checks import AUTO
from ringloader._features.auto import numbers
from ringloader._features.dispatch.process import dispatching_for
from ringloader._features.joint import memory as joint
from ringloader._features.joint import worker_task
from ringloader._features.joint.memory import JointMemory
from ringloader._features.losses import watchdog
from ringloader._features.losses.restarting import Restarting
from ringloader._features.losses.samples import SampleNotes
from ringloader._features.report.tally import PathName
from ringloader._features.table import Options
from ringloader._start import processes
from ringloader._start.starter import NewProcesses, Starter
from ringloader._torch import internals, select_path
from ringloader._torch.select_path import Reason
from ringloader._transport import budget
from ringloader._transport.processes import ProcessTransport
from ringloader._transport.protocol import Transport
from ringloader._transport.segment_cache import SegmentCache
from ringloader._transport.supervisor import Supervisor
from ringloader._worker.options import WorkerOption, in_order

if TYPE_CHECKING:
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

    def told(self, loader: TorchLoader) -> int | None:  # noqa: ARG002
        """Returns the epoch that workers which may have been told another one tell their dataset."""
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
        workers: int,
        running: int,
        worker_options: Sequence[WorkerOption],
        device_type: str | None,
        in_turn: bool,
    ) -> Transport:
        """Makes the transport of one iterator: see :func:`make_transport`."""
        # Before the memory, which a process that is forked now would have too.
        starter = self.starter(loader, running, workers)
        try:
            return make_transport(loader, options, workers, worker_options, device_type, starter, in_turn)
        except BaseException:
            starter.close()
            raise


def make_transport(
    loader: TorchLoader,
    options: Options,
    workers: int,
    worker_options: Sequence[WorkerOption],
    device_type: str | None,
    starter: Starter,
    in_turn: bool,
) -> ProcessTransport:
    """Makes the transport of one iterator of a loader with workers.

    Args:
        loader: The loader.
        options: Its options.
        workers: The most workers that it may have.
        worker_options: The options that workers ask.
        device_type: Of the device that batches are moved to. What was registered for it is not for batches
            that the user is given where they lie.
        starter: Starts the workers, and is the transport's.
        in_turn: False if tasks go to the worker that has the fewest, and not by torch's rule.

    Raises:
        RefusedError: When shared memory cannot be had, or so many workers with so many tasks have no room in
            the address space.
        Exception: What starting a dispatching process raises; ``OSError`` where no descriptor is left.
            Nothing is left then.
    """
    held_memory.tell_of_forks()
    held_memory.drop_unread()
    shares = options.worker_task == "sample"
    most_tasks = budget.most_tasks(loader, workers, in_turn)
    if shares:
        most_tasks = worker_task.most_tasks(loader)(workers) + 1
    cache = SegmentCache(loader, workers, (most_tasks, options.max_shared_bytes, device_type))
    available = _native.available_memory() + cache.resident
    # Of the most workers that there may be, few run at a time.
    sharers = workers
    if options.num_workers == AUTO and options.max_shared_bytes is None:
        sharers = min(numbers.limits(options.worker_pool).bound, workers)
    share = budget.share_per_worker(sharers, options.max_shared_bytes, available)
    if shares:
        share = joint.share_of_slots(share)
    with budget.asking(OSError, ValueError):
        engine, registrations = cache.take(share) or (_native.Engine(workers, most_tasks, share), None)
    notes = shared = None
    try:
        if shares:
            with budget.asking(OSError, ValueError):
                shared = JointMemory(loader, engine, workers, sharers * share, options.stats)
            worker_options = in_order(*worker_options, shared.option)
        is_iterable = loader._dataset_kind == internals.ITERABLE
        dispatching = dispatching_for(loader, starter.context, workers, share) if is_iterable else None
        restarts = options.restart_workers and not is_iterable
        if restarts or options.sample_timeout is not None:
            # These options exclude a dispatching process.
            crashes, batches = "on_error" in options.changed, loader._auto_collation
            notes = SampleNotes(workers, options.sample_timeout, crashes, batches, shares)
    except BaseException:
        if shared is not None:
            shared.engine.close()
        engine.close()
        if registrations is not None:
            registrations.close()
        raise
    if dispatching is not None:
        worker_options = in_order(dispatching.option, *worker_options)
    supervisors: list[Supervisor] = []
    if loader.timeout or options.watchdog is not None:
        watching, answering = watchdog.of_processes(
            workers, options.watchdog, turn_is_known=loader.in_order and not shares
        )
        supervisors.append(watching)
        worker_options = in_order(*worker_options, *answering)
    if notes is not None:
        worker_options = in_order(*worker_options, *notes.options)
    if options.restart_workers or options.sample_timeout is not None:
        supervisors.append(Restarting(options.restart_workers, engine, notes))
    return ProcessTransport(
        engine,
        registrations,
        starter,
        workers,
        cache,
        worker_options,
        dispatching,
        supervisors,
        shared,
    )
