"""Makes the transport of one iterator whose workers are processes: its memory, and what its options add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.multiprocessing

import ringloader._native as _native
from ringloader._auto import numbers
from ringloader._common import held_memory
from ringloader._common.supervisor import Supervisor
from ringloader._dispatch.process import dispatching_for
from ringloader._late import watchdog
from ringloader._late.restarting import Restarting
from ringloader._late.samples import SampleNotes
from ringloader._options import worker_task
from ringloader._options.checks import AUTO
from ringloader._options.table import Options
from ringloader._start.starter import NewProcesses, Starter
from ringloader._torch import internals
from ringloader._transport import budget, joint
from ringloader._transport.joint import JointMemory
from ringloader._transport.processes import ProcessTransport
from ringloader._transport.segment_cache import SegmentCache
from ringloader._worker.options import WorkerOption, in_order

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader


def make_transport(
    loader: TorchLoader,
    options: Options,
    workers: int,
    worker_options: Sequence[WorkerOption] = (),
    device_type: str | None = None,
    starter: Starter | None = None,
    in_turn: bool = True,
) -> ProcessTransport:
    """Makes the transport of one iterator of a loader with workers.

    Args:
        loader: The loader.
        options: Its options.
        workers: The most workers that it may have.
        worker_options: The options that workers ask.
        device_type: Of the device that batches are moved to. What was registered for it is not for batches
            that the user is given where they lie.
        starter: Starts the workers, and is the transport's; None for new processes.
        in_turn: False if tasks go to the worker that has the fewest, and not by torch's rule.

    Raises:
        RefusedError: When shared memory cannot be had, or so many workers with so many tasks have no room in
            the address space.
        Exception: What starting a dispatching process raises; ``OSError`` where no descriptor is left.
            Nothing is left then.
    """
    context = loader.multiprocessing_context or torch.multiprocessing
    held_memory.tell_of_forks()
    held_memory.drop_unread()
    starter = starter or NewProcesses(loader)
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
        dispatching = dispatching_for(loader, context, workers, share) if is_iterable else None
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
