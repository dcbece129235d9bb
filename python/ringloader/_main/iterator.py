"""torch's iterator over the rings, scheduled by torch and scheduled natively."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import ringloader._native as _native
from ringloader._main import decoding, epochs, forgotten_epoch, overdue, pinning, samplers
from ringloader._main.bad_samples import Collecting
from ringloader._main.lookahead import Lookahead, Placement
from ringloader._main.pausing import Pausing
from ringloader._main.restarting import Restarting
from ringloader._main.stages import Stage, passed
from ringloader._main.watchdog import Watchdog
from ringloader._report import report
from ringloader._torch import accelerator, internals, iterating, replacements, select_path, versions

if TYPE_CHECKING:
    # torch's iterator is untyped, so only a base shows mypy what the scheduler calls.
    _SchedulerCallbacks = _native.SchedulerCallbacks
else:
    _SchedulerCallbacks = object


class Transport(Protocol):
    """What an iterator has its batches from, as the ``multiprocessing_context`` that it is given too."""

    # Whether an iteration of this one ended as it should, as far as is known.
    sound: bool
    # Whether workers have the main process's dataset itself.
    shares_dataset: bool
    # What says that a batch is late, and what workers do then.
    watchdog: Watchdog | None

    @property
    def engine(self) -> Any:
        """The native side, which its scheduler takes."""

    @property
    def scheduler(self) -> Any:
        """The class of its scheduler."""

    def Event(self) -> Any:  # noqa: N802
        """The event that ends the workers."""

    def is_inherited(self) -> bool:
        """Whether this process is a forked child of the one that made it."""

    def counters(self) -> Mapping[str, int]:
        """What went over it."""

    def index_of(self, worker: int, number: int, /) -> Any:
        """The index of a task that torch's iterator has sent; None if that is not known."""

    def end_workers(self, iterator: Any, shut_down: Callable[[], None], /) -> None:
        """Has torch's shutdown of an iterator end its workers, however they are."""

    def unregister(self) -> None:
        """Has nothing of its memory registered."""

    def close(self, may_keep: bool = False) -> None:
        """Gives back what it has."""


class LoaderView:
    """A loader as torch's iterator sees it: the same, but for some attributes.

    Also to a constructor that other code put in place of torch's, and that writes to the loader.
    """

    def __init__(self, loader: Any, **others: Any) -> None:
        vars(self).update(_loader=loader, **others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._loader, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._loader, name)


class TransportIterator(Pausing, internals.Iterator):  # type: ignore[misc]
    """torch's own iterator, with rings in place of its queues."""

    # What brings batches to where they are needed.
    _placement: Placement | None = None
    # What takes batches with `on_error` apart.
    _collecting: Collecting | None = None
    # What `set_epoch` said since the last epoch began.
    _epoch_to_tell: int | None = None

    def __init__(
        self,
        loader: Any,
        transport: Transport,
        stages: Sequence[Stage] = (),
        moving: Placement | None = None,
        collecting: Collecting | None = None,
    ) -> None:
        self._transport = transport
        self._stages = stages
        if collecting is not None:
            self._collecting = collecting
        if moving is not None:
            self._placement = moving
        # torch's shutdown reads them, also when its constructor has failed half-way.
        self._shutdown = False
        self._worker_pids_set = False
        self._workers: list[Any] = []
        self._index_queues: list[Any] = []
        self._workers_status = [True] * loader.num_workers
        self._persistent_workers = loader.persistent_workers
        self._workers_done_event = transport.Event()
        try:
            others: dict[str, Any] = {"multiprocessing_context": transport}
            if moving is not None:
                others["pin_memory"] = False
            iterating.call_from_torch(super().__init__, LoaderView(loader, **others))
        except BaseException:
            self._shutdown_workers()
            raise
        # What analysers of traces look for.
        self._profile_name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"

    def _next_data(self) -> Any:
        take = super()._next_data
        if self._placement is not None:
            take = functools.partial(self._placement.place_next, take)
        try:
            batch = take() if self._collecting is None else self._collecting.next(take)
        except RuntimeError as error:
            if overdue.is_timeout(error, self._timeout):
                overdue.add_notes(error, self._workers, self._late())
                if self._transport.watchdog is not None:
                    self._transport.watchdog.add_notes(error, self._workers, self._late())
            raise
        return passed(batch, self._stages)

    def _late(self, every: bool = False) -> list[tuple[int, int, Any]]:
        """Worker, task and index of each task that torch's scheduling may be waiting for; first of that one.

        With ``every``, also what other workers are in.
        """
        awaited = {number: info[0] for number, info in self._task_info.items() if len(info) == 1}
        if self._in_order and self._rcvd_idx in awaited and not every:
            awaited = {self._rcvd_idx: awaited[self._rcvd_idx]}
        first: dict[int, int] = {}
        for number in sorted(awaited):
            first.setdefault(awaited[number], number)
        return [
            (worker, number, self._transport.index_of(worker, number)) for worker, number in first.items()
        ]

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if self._placement is not None:
            self._placement.abandon()
        if not first_iter:
            forgotten_epoch.note(loader)
            epochs.resume(self, loader)
            if self._collecting is not None:
                self._collecting.begin_epoch(loader)
        super()._reset(loader, first_iter)

    def _shutdown_workers(self) -> None:
        if self._transport.is_inherited():
            # A forked child has this iterator from its parent, whose workers and memory they are.
            return
        try:
            if self._shutdown:
                super()._shutdown_workers()
            else:
                self._transport.end_workers(self, super()._shutdown_workers)
        finally:
            if self._shutdown:
                self._transport.close(may_keep=not self._persistent_workers)


class _Position:
    """Where the native scheduler is. Where torch schedules, the attribute that it sets hides this one."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, iterator: Any, owner: Any) -> Any:
        return self if iterator is None else getattr(iterator._scheduler.positions(), self._name)


class _PinMemory:
    """torch's attribute. Hidden from torch's code where that would start, or ask, a pinning thread."""

    def __get__(self, iterator: Any, owner: Any) -> Any:
        if iterator is None:
            return self
        is_starting = iterator._workers and not iterator._is_constructed
        return not is_starting and not iterator._torch_schedules and vars(iterator)["_pin_memory"]

    def __set__(self, iterator: Any, value: Any) -> None:
        vars(iterator)["_pin_memory"] = value


class RingIterator(TransportIterator, _SchedulerCallbacks):
    """An iterator that reads the sampler, hands out tasks, reorders and waits natively.

    torch's own constructor runs, so draws, warnings, the order of starts and every attribute are torch's;
    ``_reset``, its last call, takes over.

    INVARIANT: the class stays the same in every epoch, so a bound method that the caller kept stays right.
    Where ``_torch_schedules``, each method is torch's.
    """

    _scheduler: _native.Scheduler | _native.ThreadScheduler
    # From the epoch on in which a method of torch's iterator was found replaced.
    _torch_schedules = False
    # The name of the path that is taken then.
    _path_of_torchs: report.PathName = "rings"
    # Whether a batch goes straight from the scheduler, or what prepares it, to the caller.
    _is_direct = False
    # Whether torch's constructor has come to its last call.
    _is_constructed = False
    _pin_memory = _PinMemory()
    # What gives the next batch to the iterator that it is given.
    _take_next: Callable[[RingIterator], Any]
    _lookahead: Lookahead | None = None

    def __init__(
        self,
        loader: Any,
        transport: Transport,
        stages: Sequence[Stage] = (),
        moving: Placement | None = None,
        collecting: Collecting | None = None,
        main_prefetch: int = 0,
        restarting: Restarting | None = None,
    ) -> None:
        # Batches that a thread decodes before their turn.
        self._main_prefetch = main_prefetch
        # Where workers that were lost get successors.
        self._restarting = restarting
        super().__init__(loader, transport, stages, moving, collecting)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._is_constructed = True
        if not self._torch_schedules:
            replaced = replacements.replaced_method()
            if replaced is not None:
                # With persistent workers: since the epoch before.
                self._leave(loader, f"{replaced} was replaced")
        if self._torch_schedules:
            super()._reset(loader, first_iter)
            return
        internals.BaseIterator._reset(self, loader, first_iter)
        # torch's warning of a stream that is longer than it said comes from torch's `__next__`.
        self._is_direct = self._IterableDataset_len_called is None and not self._stages
        self._workers_status = [True] * self._num_workers
        source = samplers.index_source(self._index_sampler)
        if first_iter:
            # torch's registry would raise in unrelated code, before what a dead worker committed is drained.
            internals.remove_worker_pids(id(self))
            self._worker_pids_set = False
            self._scheduler = self._transport.scheduler(
                self._transport.engine,
                source,
                self._num_workers,
                self._prefetch_factor,
                _order(self._in_order),
                self._dataset_kind == internals.ITERABLE,
                self._timeout,
            )
            if self._restarting is not None:
                self._scheduler.keep_sent()
            watchdog = self._transport.watchdog
            if watchdog is not None and watchdog.seconds is not None:
                self._scheduler.watch(watchdog.seconds)
            self._take_next = self._scheduler.next
            if self._placement is None and self._pin_memory:
                self._placement = pinning.Pinning(self._pin_memory_device, accelerator.current_device_index())
            elif self._placement is None and self._main_prefetch:
                self._placement = decoding.Decoding(self._main_prefetch)
            if self._placement is not None:
                self._lookahead = Lookahead(self._scheduler, self._placement)
                self._take_next = self._lookahead.next
            if self._collecting is not None:
                self._take_next = functools.partial(self._collecting.next, self._take_next)
        else:
            epochs.resume(self, loader)
            if self._restarting is not None:
                self._restarting.begin_epoch()
            if self._collecting is not None:
                self._collecting.begin_epoch(loader)
            # Behind the tasks of an abandoned epoch, which still run, as torch's do. They are not waited for:
            # their results are told by their epoch.
            forgotten_epoch.note(loader)
            for index_queue in self._index_queues:
                index_queue.put(internals.ResumeIteration(self._shared_seed))
            if self._lookahead is not None:
                self._lookahead.clear()
            self._scheduler.reset(source)
        for _ in range(self._prefetch_factor * self._num_workers):
            self._try_put_index()

    def _leave(self, loader: Any, reason: str) -> None:
        """Hands scheduling over to torch, from this epoch on."""
        select_path.say_once(f"{reason}, so torch's own scheduling runs over the rings")
        noted = report.noted(self)
        counters = self._transport.counters if noted is None else noted.counters
        report.record(loader, self, self._path_of_torchs, reason, counters)
        self._torch_schedules, self._is_direct = True, False
        if self._lookahead is not None:
            self._lookahead.close()
        # torch hands out slots, which a user's own copies to a device would read after they went back.
        self._transport.unregister()
        internals.set_worker_pids(id(self), tuple(worker.pid for worker in self._workers))
        self._worker_pids_set = True

    def __next__(self) -> Any:
        if internals.Iterator.__next__ is not internals.next_of_iterator:
            return super().__next__()
        # Most of torch's is the profiler's record, which takes longer than a small batch.
        if self._is_direct and not internals.profiler_enabled():
            data = self._take_next(self)
            self._num_yielded += 1
            return data
        return iterating.next_from_beneath(self)

    def _next_data(self) -> Any:
        if self._torch_schedules:
            return super()._next_data()
        return passed(self._take_next(self), self._stages)

    def _try_put_index(self) -> None:
        if self._torch_schedules:
            super()._try_put_index()
        else:
            self._scheduler.put_index(self)

    def _take_committed(self) -> None:
        """Takes what the workers have committed, and keeps it until its turn, so that none waits for room."""
        if not self._torch_schedules and not self._shutdown:
            self._scheduler.take_committed()

    def _note_exhausted(self, worker_id: int) -> None:
        """A worker's iterable dataset has ended. MIRRORS torch dataloader.py::_next_data."""
        if self._persistent_workers:
            self._workers_status[worker_id] = False
        else:
            self._mark_worker_as_unavailable(worker_id)

    def _end_epoch(self) -> None:
        if not self._persistent_workers:
            self._shutdown_workers()

    def _shutdown_workers(self) -> None:
        try:
            if self._restarting is not None and not self._transport.is_inherited() and not self._shutdown:
                self._restarting.list_all(self._workers)
            if self._lookahead is not None and not self._transport.is_inherited() and not self._shutdown:
                # Memory that they keep could not be stored for the next epoch.
                self._lookahead.close()
        finally:
            super()._shutdown_workers()

    def _raise_timeout(self, late: list[tuple[int, int, Any]]) -> NoReturn:
        error = RuntimeError(f"DataLoader timed out after {self._timeout} seconds")
        overdue.add_notes(error, self._workers, late)
        if self._transport.watchdog is not None:
            self._transport.watchdog.add_notes(error, self._workers, late)
        try:
            raise error
        finally:
            # In a cycle with it would hang the iterator.
            del error

    def _note_wait(self, seconds: float, owing: list[tuple[int, int, Any]]) -> None:
        if self._transport.watchdog is not None:
            self._transport.watchdog.say(seconds, self._workers, owing)

    def _replace_lost(self, worker_id: int, in_hand: overdue.Late | None) -> bool:
        """Starts a successor of a worker whose process has ended, if there may be one."""
        successor = None
        if self._restarting is not None:
            successor = self._restarting.successor(self._workers[worker_id], worker_id, in_hand)
        if successor is None:
            return False
        self._workers[worker_id] = successor
        return True

    def _raise_lost(self, worker_id: int, in_hand: overdue.Late | None) -> NoReturn:
        """Raises for a worker whose process has ended: what torch does, from what its signal handler says."""
        process = self._workers[worker_id]
        process.join(1.0)
        self._transport.sound = False
        self._workers_status[worker_id] = False
        cause = _how_it_ended(process.pid, process.exitcode or 0)
        error = RuntimeError(f"DataLoader worker (pid(s) {process.pid}) exited unexpectedly")
        overdue.add_note_of_lost(error, in_hand)
        if self._restarting is not None:
            error.add_note(self._restarting.why_not(worker_id))
        try:
            raise error from cause
        finally:
            del error

    _send_idx = _Position("sent")
    _rcvd_idx = _Position("received")
    _tasks_outstanding = _Position("outstanding")


def _how_it_ended(pid: int, code: int) -> RuntimeError | None:
    """MIRRORS torch csrc/DataLoader.cpp::THPModule_errorIfAnyWorkerFails."""
    if code == 0:
        return None
    if code > 0:
        return RuntimeError(
            f"DataLoader worker (pid {pid}) exited unexpectedly with exit code {code}. "
            "Details are lost due to multiprocessing. "
            "Rerunning with num_workers=0 may give better error trace."
        )
    hint = ""
    if -code == signal.SIGBUS:
        hint = (
            "It is possible that dataloader's workers are out of shared memory. "
            "Please try to raise your shared memory limit."
        )
    return RuntimeError(
        f"DataLoader worker (pid {pid}) is killed by signal: {signal.strsignal(-code)}. {hint}"
    )


def _order(in_order: bool) -> _native.Order:
    if in_order:
        return _native.Order.IN_ORDER
    if versions.counts_tasks_per_worker():
        return _native.Order.AS_COMPLETED
    return _native.Order.AS_COMPLETED_ROUND_ROBIN
