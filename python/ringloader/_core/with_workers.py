"""The iterator of a loader with workers: processes or threads, by its transport."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import ringloader._native as _native
from ringloader._core import epochs
from ringloader._core.base import LoaderIterator
from ringloader._core.epochs import EpochPlan, Told, plan_epoch
from ringloader._core.feature import Feature, chain, first, loaded_of, placement_of
from ringloader._core.workers import Workers
from ringloader._sources import samplers
from ringloader._torch import devices, internals
from ringloader._transport import budget, lookahead, overdue
from ringloader._transport.lookahead import Placement
from ringloader._transport.overdue import Late, LostWorker
from ringloader._transport.protocol import Transport
from ringloader._worker.loop import Work
from ringloader._worker.options import EpochStart

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

    # torch's iterator is untyped, so only a base shows mypy what the scheduler calls.
    _SchedulerCallbacks = _native.SchedulerCallbacks
else:
    _SchedulerCallbacks = object


class WorkersIterator(LoaderIterator, internals.Iterator, _SchedulerCallbacks):  # type: ignore[misc]
    """An iterator that reads the sampler, hands out tasks, reorders and waits natively.

    MIRRORS torch dataloader.py::_MultiProcessingDataLoaderIter, its base class: draws, warnings, the order of
    starts and the attributes that frameworks read are torch's.

    Args:
        loader: The loader.
        transport: Starts the workers, and carries tasks and batches.
        features: The features that are on.
        workers: The most workers that there may be.
        running: The workers that get tasks at first, the first ones. Features may change it.
        told: The epoch that workers are told whose dataset may have been told another one; None: none.
    """

    # The module itself: an iterator that lives on while modules are torn down finds their names None.
    _torch_utils = internals.utils_module
    _scheduler: _native.Scheduler | _native.JointScheduler | _native.ThreadScheduler
    # No type: torch declares None too, which a loader with workers does not have.
    _prefetch_factor: Any
    # Brings batches to where they are needed.
    _placement: Placement | None = None
    # Ends the placement. A native function: its call is not interrupted.
    _close_placed: Callable[[], None] | None = None
    # torch's registry of processes is not used: it would raise in unrelated code, before batches that a dead
    # worker has committed are taken.
    _worker_pids_set = False
    _shutdown = False

    def __init__(
        self,
        loader: TorchLoader,
        transport: Transport,
        features: Sequence[Feature],
        workers: int,
        running: int,
        told: Told | None = None,
    ) -> None:
        self._transport = transport
        self._features = features
        factor = budget.prefetch_factor_of(loader)
        self._all_workers = Workers(transport, workers, running, factor, statuses=[True] * workers)
        self._workers = self._all_workers.handles
        self._workers_status = self._all_workers.statuses
        self._persistent_workers = loader.persistent_workers
        try:
            named = None if told is None else (epochs.next_of(loader), told)
            self._take(*plan_epoch(loader, self, None, loaded_of(features, loader), named))
            if features:
                self._placement = placement_of(features)
            if self._placement is not None:
                self._pin_memory = False
            self._num_workers = workers
            self._prefetch_factor = factor
            if self._prefetch_factor <= 0:
                raise AssertionError(
                    "prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter"
                )
            self._in_order = loader.in_order
            self._worker_init_fn = internals.init_fn_for(self, loader.worker_init_fn)
            self._start_workers(tells=told is not None)
            self._begin_first(loader)
        except BaseException:
            self._shutdown_workers()
            raise
        # Analysers of traces look for it.
        self._profile_name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"

    def _start_workers(self, tells: bool) -> None:
        self._all_workers.begin(lambda worker: self._work_of(worker, self._start_of(worker, tells)))
        if self._persistent_workers and hasattr(self, "_register_persistent_workers_atexit"):
            self._register_persistent_workers_atexit()

    def _work_of(self, worker: int, start: EpochStart) -> Work:
        """Returns the work of a worker that starts with a part of the epoch."""
        work = Work(
            self._dataset_kind,
            self._dataset,
            self._auto_collation,
            self._collate_fn,
            self._drop_last,
            self._base_seed,
            self._worker_init_fn,
            worker,
            self._num_workers,
            start,
            (),
        )
        for feature in self._features:
            work = feature.work(work)
        return work

    def _begin_first(self, loader: TorchLoader) -> None:
        self._plan.begin_again(self, loader)
        source, order = self._index_source(), _order(self._in_order)
        is_iterable = self._dataset_kind == internals.ITERABLE
        self._scheduler = self._all_workers.schedule(
            source, order, is_iterable, self._timeout, self._features
        )
        self._source = self._make_source()
        self._begin_tasks(loader)

    def _reset(self, loader: TorchLoader, first_iter: bool = False) -> None:  # noqa: ARG002
        """Begins another epoch of the same workers."""
        self._remove_gate()
        for feature in self._features:
            feature.begin_times()
        loaded, returned = loaded_of(self._features, loader), self._batches_returned
        begun = first(feature.begun_plan(self, loader, loaded) for feature in self._features)
        source: _native.IndexSource | None = None
        if begun is None:
            self._take(*plan_epoch(loader, self, self._plan, loaded))
            self._transport.begin_epoch()
            source = self._send_start()
        else:
            self._take(*begun)
        if self._noted is not None:
            self._noted.end_epoch(returned)
        for feature in self._features:
            feature.begin_epoch(loader)
        if self._placement is not None:
            self._scheduler.forget_placed(self._placement)
        if source is not None:
            self._scheduler.reset(source)
        self._begin_tasks(loader, are_sent=source is None)
        epochs.log_if_forgotten(loader)

    def _begin_tasks(self, loader: TorchLoader, are_sent: bool = False) -> None:
        """Sends the first tasks of an epoch, unless they have been sent: the last steps of ``iter``."""
        self._workers_status[:] = [True] * self._num_workers
        self._put_stages()
        if not are_sent:
            for _ in range(self._all_workers.most_tasks()):
                self._scheduler.put_index(self)
        self._note_begun(loader)

    def _send_start(self) -> _native.IndexSource:
        """Tells the workers of another epoch, and returns the source of its tasks."""
        # After the tasks of an abandoned epoch, which still run, as torch's do. Nothing waits for them:
        # their results are told by their epoch.
        self._plan = self._plan._replace(of_tasks=self._scheduler.number_next())
        self._all_workers.begin_epoch(lambda worker: self._start_of(worker, self._plan.is_named))
        return self._index_source()

    def _start_of(self, worker: int, tells: bool, plan: EpochPlan | None = None) -> EpochStart:
        """Returns the beginning of a worker's part of an epoch: this one, or that of a plan.

        Args:
            worker: The worker.
            tells: True if its dataset may not have been told the epoch. A worker that starts late may have
                the dataset of an epoch before, or already of the next one.
            plan: The plan of the epoch; None: this one's.
        """
        plan = plan or self._plan
        position = None if plan.tracked is None else plan.tracked.start_of(worker)
        told = plan.told.epoch if tells and plan.told is not None else None
        return EpochStart(
            plan.number, told, self._shared_seed, position=position, of_tasks=plan.of_tasks or 0
        )

    def _index_source(self) -> _native.IndexSource:
        plan = self._plan
        if plan.tracked is None:
            return samplers.index_source(self._index_sampler, plan.places)
        return plan.tracked.index_source(self, plan.places)

    def _make_source(self) -> Callable[[Any], Any]:
        """Returns the function that gives the next batch, from where it is needed."""
        if self._pin_memory:
            self._placement = lookahead.Pinning(self._pin_memory_device, devices.current_device_index())
        take: Callable[[Any], Any] = self._scheduler.next
        if self._placement is not None:
            prepare = functools.partial(lookahead.prepare, self._placement)
            self._close_placed = functools.partial(self._scheduler.close_placed, self._placement)
            take = functools.partial(self._scheduler.next_placed, self._placement, prepare)
        return take

    def _chain(self, gate: Any) -> Callable[[Any], Any]:
        # A loader without features does not look for stages.
        return chain(self._source, self._features, gate) if self._features or gate else self._source

    def _try_put_index(self) -> None:
        self._scheduler.put_index(self)

    def _take_committed(self) -> None:
        """Takes what the workers have committed, and keeps it until its turn, so that none waits for room."""
        if not self._shutdown:
            self._scheduler.take_committed()

    def _note_exhausted(self, worker_id: int) -> None:
        """Notes the end of a worker's iterable dataset. MIRRORS torch dataloader.py::_next_data."""
        self._workers_status[worker_id] = False
        if not self._persistent_workers:
            self._transport.send(worker_id, None)

    def _end_epoch(self) -> None:
        if not self._persistent_workers:
            self._shutdown_workers()

    def _shutdown_workers(self) -> None:
        """Ends the workers. MIRRORS torch dataloader.py::_MultiProcessingDataLoaderIter._shutdown_workers."""
        if self._transport.is_inherited():
            # A forked child has this iterator from its parent, whose workers and memory they are.
            return
        try:
            # True, or None while modules are torn down: the interpreter exits.
            if not self._shutdown and getattr(self._torch_utils, "python_exit_status", None) is False:
                self._shutdown = True
                for feature in self._features:
                    feature.end()
                self._all_workers.end(self._persistent_workers)
        finally:
            try:
                # Before the memory goes that batches are copied from. After the end of the workers: by then
                # no other thread waits for one of their batches.
                if self._close_placed is not None:
                    self._close_placed()
            finally:
                if self._shutdown:
                    self._transport.close(may_keep=not self._persistent_workers)
        self._settle()

    def _seconds_waited(self) -> float | None:
        return self._scheduler.waited()

    def _stop(self, message: str) -> None:
        self._scheduler.stop(message)
        if self._placement is not None:
            self._placement.stop()

    def _raise_timeout(self, late: list[Late]) -> NoReturn:
        error = RuntimeError(f"DataLoader timed out after {self._timeout} seconds")
        try:
            overdue.add_notes(error, self._workers, late)
            for feature in self._features:
                feature.late(error, self._workers, late)
            raise error
        finally:
            # In a local variable the error, and with it this frame, would keep the iterator.
            del error

    def _note_wait(self, seconds: float, owing: list[Late]) -> None:
        for feature in self._features:
            feature.waits(seconds, self._workers, owing)

    def _replace_lost(self, worker_id: int, in_hand: Late | None) -> bool:
        """Starts a successor of a worker that has ended, if there may be one."""
        self._transport.sound = False
        start, refusal = self._start_of(worker_id, tells=True), None
        if self._plan.tracked is not None:
            refusal, position = self._plan.tracked.start_after(worker_id)
            start = dataclasses.replace(start, position=position)
        if self._dataset_kind == internals.ITERABLE:
            refusal = "a worker of an IterableDataset is not restarted, which would begin its part again"
        restart = functools.partial(self._transport.start_later, self._work_of(worker_id, start))
        lost = LostWorker(worker_id, self._workers[worker_id], in_hand, restart, refusal)
        try:
            is_replaced = self._all_workers.replace(lost)
        except BaseException as error:
            # INVARIANT: no two processes are at the rings of one worker. This one may run unknown. An
            # `Exception` is raised with this text, now too.
            self._stop(f"worker {worker_id} was lost, and no successor could be started: {error!r}")
            self._shutdown_workers()
            raise
        if is_replaced:
            for feature in self._features:
                feature.replaced(self, worker_id)
        return is_replaced

    def _raise_lost(self, worker_id: int, in_hand: Late | None) -> NoReturn:
        """Raises for a worker that has ended, and has no successor."""
        raise self._all_workers.error_of_lost(worker_id, in_hand)

    @property
    def _send_idx(self) -> int:
        return self._scheduler.positions().sent

    @property
    def _rcvd_idx(self) -> int:
        return self._scheduler.positions().received

    @property
    def _tasks_outstanding(self) -> int:
        return self._scheduler.positions().outstanding


def _order(in_order: bool) -> _native.Order:
    if in_order:
        return _native.Order.IN_ORDER
    if internals.counts_tasks_per_worker():
        return _native.Order.AS_COMPLETED
    return _native.Order.AS_COMPLETED_ROUND_ROBIN
