"""torch's iterator over a transport, scheduled natively."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import ringloader._native as _native
from ringloader._main import decoding, epochs, forgotten_epoch, lookahead, overdue, pinning, samplers
from ringloader._main.bad_samples import Collecting
from ringloader._main.device import Moving
from ringloader._main.restarting import Restarting
from ringloader._main.stages import Stage, passed
from ringloader._main.transport_iterator import Transport, TransportIterator
from ringloader._report import report
from ringloader._torch import accelerator, internals, iterating, replacements, select_path, versions

if TYPE_CHECKING:
    # torch's iterator is untyped, so only a base shows mypy what the scheduler calls.
    _SchedulerCallbacks = _native.SchedulerCallbacks
else:
    _SchedulerCallbacks = object


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

    def __init__(
        self,
        loader: Any,
        transport: Transport,
        stages: Sequence[Stage] = (),
        moving: Moving | None = None,
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
                prepare = functools.partial(lookahead.prepare, self._placement)
                self._take_next = functools.partial(self._scheduler.next_placed, self._placement, prepare)
                self._close_placed = functools.partial(self._scheduler.close_placed, self._placement)
            if self._collecting is not None:
                self._take_next = functools.partial(self._collecting.next, self._take_next)
        else:
            epochs.resume(self, loader)
            if self._moving is not None:
                self._moving.begin_epoch()
            if self._restarting is not None:
                self._restarting.begin_epoch()
            if self._collecting is not None:
                self._collecting.begin_epoch(loader)
            # Behind the tasks of an abandoned epoch, which still run, as torch's do. They are not waited for:
            # their results are told by their epoch.
            forgotten_epoch.note(loader)
            for index_queue in self._index_queues:
                index_queue.put(internals.ResumeIteration(self._shared_seed))
            if self._placement is not None:
                self._scheduler.forget_placed(self._placement)
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
        if self._close_placed is not None:
            self._close_placed()
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
        finally:
            super()._shutdown_workers()

    def _stop(self, message: str) -> None:
        if self._torch_schedules:
            super()._stop(message)
            return
        self._scheduler.stop(message)
        if self._placement is not None:
            self._placement.stop()

    def _raise_timeout(self, late: list[overdue.Late]) -> NoReturn:
        # In a local variable the error, and with it this frame, would keep the iterator.
        raise self._with_late(RuntimeError(f"DataLoader timed out after {self._timeout} seconds"), late)

    def _note_wait(self, seconds: float, owing: list[overdue.Late]) -> None:
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
        why_not = () if self._restarting is None else (self._restarting.why_not(worker_id),)
        raise overdue.error_of_lost(process, in_hand, *why_not)

    _send_idx = _Position("sent")
    _rcvd_idx = _Position("received")
    _tasks_outstanding = _Position("outstanding")


def _order(in_order: bool) -> _native.Order:
    if in_order:
        return _native.Order.IN_ORDER
    if versions.counts_tasks_per_worker():
        return _native.Order.AS_COMPLETED
    return _native.Order.AS_COMPLETED_ROUND_ROBIN
