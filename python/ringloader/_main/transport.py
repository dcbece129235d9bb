"""The transport of one iterator: engine, processes, and the context through which torch's iterator uses them.

``_MultiProcessingDataLoaderIter`` takes everything that moves data or starts processes from the loader's
``multiprocessing_context``. A context of ours is all that it takes to run torch's iterator, and torch's
worker loop, unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

# torch seeds it in each worker, where numpy would import it otherwise: it does so at the first use.
import numpy.random  # noqa: F401
import torch.multiprocessing

import ringloader._native as _native
from ringloader._common import forks, moved_storages
from ringloader._launch import forkserver, processes, shared_args, spawn, stuck
from ringloader._launch.pool_crew import Lease
from ringloader._main import budget, registration
from ringloader._main.dispatching import Dispatching, dispatching_for
from ringloader._main.queues import DoneEvent, RememberingTaskQueue, ResultQueue, TaskQueue
from ringloader._main.registration import Registrations
from ringloader._main.segment_cache import SegmentCache
from ringloader._main.watchdog import Watchdog, watch_processes
from ringloader._torch import internals
from ringloader._worker import endpoint, entry
from ringloader._worker.epochs import EpochNote
from ringloader._worker.fetch import Step

# Seconds for which a successor waits for processes that its predecessor forked.
_ORPHANS_END_WITHIN = 2.0


class Transport:
    """Everything of one iterator that must be closed; also the ``multiprocessing_context`` it is given."""

    # The things themselves: an iterator that lives on while modules are torn down finds their names None.
    _process_identity = staticmethod(_native.process_identity)
    _group = stuck.Group
    scheduler = _native.Scheduler
    # Whether workers have the main process's dataset itself.
    shares_dataset = False

    def __init__(
        self,
        engine: _native.Engine,
        registrations: Registrations | None,
        context: Any,
        workers: int,
        cache: SegmentCache,
        steps: Sequence[Step],
        remembered_tasks: int = 0,
        dispatching: Dispatching | None = None,
        lease: Lease | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.engine = engine
        self.watchdog = watchdog
        # Of each worker, where an error is to name them.
        self._remembered_tasks = remembered_tasks
        self._dispatching = dispatching
        self._registrations = registrations
        self._cache = cache
        # The processes, where they are a pool's.
        self._lease = lease
        # What fetching goes through in each worker.
        self.steps = steps
        # Whether an iteration of this one ended as it should, as far as is known.
        self.sound = True
        self._workers = workers
        self._keeps_arguments = False
        # Whose successor's start has failed or was interrupted: its process may run all the same.
        self._not_again: set[int] = set()
        # The function and the arguments of each worker.
        self._arguments: dict[int, tuple[Any, tuple[Any, ...]]] = {}
        self._owner = self._process_identity()
        self._context = context
        self._queues: list[TaskQueue] = []
        self._processes: dict[int, Any] = {}
        is_shared = lease is None and context.get_start_method() != "fork"
        self._shared = shared_args.Shared() if is_shared else None
        self._results_made = False
        self._closed = False
        self._final: dict[str, int] = {}

    def Queue(self) -> ResultQueue | TaskQueue:  # noqa: N802
        """The first is for results, the others are the workers' in order."""
        if not self._results_made:
            self._results_made = True
            # Not kept here: without a cycle everything goes as soon as the iterator does.
            return ResultQueue(self.engine, self.note_end)
        worker = len(self._queues)
        if self._remembered_tasks:
            made: TaskQueue = RememberingTaskQueue(self.engine, worker, self._remembered_tasks)
        else:
            made = TaskQueue(self.engine, worker)
        self._queues.append(made)
        return made

    def index_of(self, worker: int, number: int) -> Any:
        """The index of a task that torch's iterator has sent to a worker; None if that was not remembered."""
        queue = self._queues[worker]
        return queue.index_of(number) if isinstance(queue, RememberingTaskQueue) else None

    def epoch_note(self, _worker: int, epoch: int) -> EpochNote:
        """What a worker calls to know that its next epoch is this one."""
        return EpochNote(epoch)

    def Event(self) -> DoneEvent:  # noqa: N802
        """The event that ends the workers."""
        return DoneEvent(self.engine)

    def Process(self, *, target: Any, args: tuple[Any, ...]) -> Any:  # noqa: N802
        """A process of the user's context that runs ``target`` at a worker's end."""
        worker = next(arg.worker for arg in args if isinstance(arg, TaskQueue))
        stand_ins = tuple(self._stand_in(arg) for arg in args)
        if self._dispatching is not None:
            stand_ins = tuple(self._dispatching.without_source(arg) for arg in stand_ins)
        if self._keeps_arguments:
            self._arguments[worker] = target, stand_ins
        worker_end = endpoint.WorkerEndpoint(self.engine, worker, self.steps)
        shared = self._shared
        return self._process(
            worker_end, target, stand_ins if shared is None else shared_args.Arguments(shared, stand_ins)
        )

    def _process(self, worker_end: endpoint.WorkerEndpoint, target: Any, args: Any) -> Any:
        worker = worker_end.worker
        if self._lease is not None:
            process: Any = self._lease.worker(worker_end, target, args)
        else:
            made = self._context.Process(target=entry.run_worker, args=(worker_end, target, args))
            process = spawn.by_server(made)
        return processes.watched(process, lambda pid: self._started(worker, process, pid))

    def keep_arguments(self) -> None:
        """Has what workers are given kept, for :meth:`restart`. Before they are started."""
        self._keeps_arguments = True

    def restart(self, worker: int) -> Any:
        """Starts a successor of a worker that has ended, whose results were taken.

        Its tasks must be sent again. It gets the dataset as it is now in this process.

        Raises:
            BaseException: What starting a process raises. The worker is not to be started again then.
        """
        self.sound = False
        target, args = self._arguments[worker]
        worker_end = endpoint.WorkerEndpoint(self.engine, worker, self.steps, self.engine.succeed(worker))
        process = self._process(worker_end, target, args)
        process.daemon = True
        try:
            with processes.one_start_at_a_time():
                process.start()
        except BaseException:
            # INVARIANT: no two processes are at the rings of one worker. This one may run unknown.
            self._not_again.add(worker)
            if process.pid is not None:
                processes.kill(process)
            raise
        if self.engine.is_done():
            # Another thread, or a signal handler, has ended the workers meanwhile, without this one.
            processes.kill(process)
        return process

    def may_restart(self, worker: int) -> bool:
        """Whether no process but its own can be at the rings of a worker."""
        return worker not in self._not_again

    def is_deserted(self, worker: int) -> bool:
        """Whether no process is left that a lost worker forked: it has what a successor would fill.

        One that ends with the worker may take a moment.
        """
        until = time.monotonic() + _ORPHANS_END_WITHIN
        while not self.engine.is_deserted(worker):
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True

    def process_of(self, worker: int) -> Any:
        """The process that was started last as a worker; None before."""
        return self._processes.get(worker)

    @staticmethod
    def _stand_in(argument: object) -> object:
        if isinstance(argument, TaskQueue):
            return endpoint.QueueEnd.TASKS
        if isinstance(argument, ResultQueue):
            return endpoint.QueueEnd.RESULTS
        if isinstance(argument, DoneEvent):
            return endpoint.QueueEnd.DONE
        return argument

    def _started(self, worker: int, process: Any, pid: int) -> None:
        self._processes[worker] = process
        if self._lease is None:
            stuck.note_started(process)
        try:
            self.engine.watch_worker(worker, pid)
        except BaseException:
            # torch does not list it yet, so no other code would end it.
            process.terminate()
            stuck.end(process, internals.JOIN_SECONDS)
            raise
        if len(self._processes) == self._workers:
            self._share_nothing_more()

    def _share_nothing_more(self) -> None:
        if self._shared is not None:
            self._shared.close()

    def note_end(self, worker: int) -> bool:
        """Looks at a worker whose process has ended. Returns whether it should not have.

        Raises:
            RuntimeError: In torch's words, where the process object will never tell.
        """
        if self._queues[worker].ended or self.engine.is_done():
            return False
        self.sound = False
        process = self._processes[worker]
        # The handle tells before the exit code is known, and earlier still under forkserver.
        process.join(1.0)
        if process.is_alive():
            raise RuntimeError(f"DataLoader worker (pid(s) {process.pid}) exited unexpectedly")
        return True

    def end_workers(self, iterator: Any, shut_down: Callable[[], None]) -> None:
        """Has torch's shutdown of an iterator end its workers, also those that are stopped.

        What torch's leaves alive, after it has told, waited and terminated, is killed.
        """
        processes = iterator._workers
        group = self._group(processes)
        iterator._workers = group.stand_ins()
        try:
            shut_down()
        finally:
            iterator._workers = processes
            if iterator._shutdown:
                group.kill()

    def unregister(self) -> None:
        """Has nothing of its memory registered. No copy is under way."""
        registrations, self._registrations = self._registrations, None
        if registrations is not None:
            registrations.close()

    def registrations(self, device_type: str) -> Registrations | None:
        """What is registered of the memory for devices of a type, those of epochs before too.

        None where they have no driver that registers. What copies out of it ends before :meth:`close`.
        """
        found = self._registrations
        if found is None or found.device_type != device_type:
            if found is not None:
                found.close()
            self._registrations = registration.registrations_for(self.engine.slot_memory(), device_type)
        return self._registrations

    def is_inherited(self) -> bool:
        """Whether this process is a forked child of the one that made it."""
        return self._process_identity() != self._owner

    def counters(self) -> dict[str, int]:
        """What went over the rings."""
        return dict(self._final) if self._closed else dict(self.engine.counters())

    def close(self, may_keep: bool = False) -> None:
        """Gives back all memory that no tensor holds. A forked child that inherited this does nothing.

        Args:
            may_keep: Whether another epoch may find it warm: some of it then stays with the loader.
        """
        if self._closed or self.is_inherited():
            return
        self._final = dict(self.engine.counters())
        self._closed = True
        if self._dispatching is not None:
            self._dispatching.close()
        registrations, self._registrations = self._registrations, None
        if may_keep and self._ended_well():
            self._note_left()
            self._cache.store(self.engine, registrations)
        else:
            self.engine.close()
            if registrations is not None:
                registrations.close()
        self._share_nothing_more()
        if self._lease is not None:
            self._lease.close()
        if self.watchdog is not None:
            self.watchdog.close()
        self._processes.clear()
        self._arguments.clear()

    def _note_left(self) -> None:
        """Of workers whose processes live on: nothing of them uses the memory any more."""
        if self._lease is not None:
            for worker, process in self._processes.items():
                if process.has_left:
                    self.engine.note_left(worker)

    def _ended_well(self) -> bool:
        started = self._processes.values()
        return self.sound and len(started) == self._workers and all(one.exitcode == 0 for one in started)


def make_transport(
    loader: Any,
    max_shared_bytes: int | None,
    steps: Sequence[Step] = (),
    device_type: str | None = None,
    lease: Lease | None = None,
    watchdog: float | None = None,
) -> Transport:
    """The transport for one iterator of a loader with workers.

    Args:
        loader: The loader.
        max_shared_bytes: Shared memory for its batches; None for a part of what there is.
        steps: What fetching goes through in each worker.
        device_type: Of the device that batches are moved to. What was registered for it is not for batches
            that the user is given where they lie.
        lease: The processes of a pool; None to start processes. The transport gives them back.
        watchdog: After how many seconds without a batch that is said; None: never.

    Raises:
        OSError: When shared memory or descriptors cannot be had. Nothing is left then.
        ValueError: When so many workers with so many tasks have no room in the address space.
    """
    workers = loader.num_workers
    context = loader.multiprocessing_context or torch.multiprocessing
    forks.tell_native()
    moved_storages.drop_unread()
    if lease is None:
        forkserver.preload(context)
        spawn.prepare(loader)
    most_tasks = _most_tasks(loader)
    cache = SegmentCache(loader, workers, (most_tasks, max_shared_bytes, device_type))
    available = _native.available_memory() + cache.resident
    share = budget.share_per_worker(workers, max_shared_bytes, available)
    engine, registrations = cache.take(share) or (_native.Engine(workers, most_tasks, share), None)
    dispatching = dispatching_for(loader, context, share)
    if dispatching is not None:
        # First: what a later one raises must find it there.
        steps = (dispatching.step, *steps)
    remembered_tasks = most_tasks if loader.timeout or watchdog is not None else 0
    watching = None
    if loader.timeout or watchdog is not None:
        watching, answering = watch_processes(workers, watchdog, loader.in_order)
        # Last: the time in the other steps is time in the batch.
        steps = (*steps, *answering)
    return Transport(
        engine, registrations, context, workers, cache, steps, remembered_tasks, dispatching, lease, watching
    )


def _most_tasks(loader: Any) -> int:
    """Batches of one worker that can be on their way at once."""
    factor = loader.prefetch_factor
    # What else stands there is refused by torch's constructor, which has drawn by then.
    per_worker = max(factor, 1) if isinstance(factor, int) else 1
    if loader.in_order and loader._dataset_kind != internals.ITERABLE:
        # In turn, so an equal part each; after a reset in mid-epoch, those of the epoch before too.
        return 2 * per_worker + 1
    # Where the others have ended, or are slow, one worker may be asked for all.
    return per_worker * int(loader.num_workers) + per_worker + 1
