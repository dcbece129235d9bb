"""torch's iterator over a transport, scheduled by torch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ringloader._main import epochs, forgotten_epoch, overdue, pausing
from ringloader._main.bad_samples import Collecting
from ringloader._main.device import Moving
from ringloader._main.failed_arrival import forget_locals_of_reraise
from ringloader._main.lookahead import Placement
from ringloader._main.pausing import Pausing
from ringloader._main.stages import Stage, passed
from ringloader._main.watchdog import Watchdog
from ringloader._torch import internals, iterating


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
    # The same, where it is a device.
    _moving: Moving | None = None
    # Ends it where the scheduler has batches prepared ahead. A native function: its call is not interrupted.
    _close_placed: Callable[[], None] | None = None
    # What takes batches with `on_error` apart.
    _collecting: Collecting | None = None
    # What `set_epoch` said since the last epoch began.
    _epoch_to_tell: int | None = None

    def __init__(
        self,
        loader: Any,
        transport: Transport,
        stages: Sequence[Stage] = (),
        moving: Moving | None = None,
        collecting: Collecting | None = None,
    ) -> None:
        self._transport = transport
        self._stages = stages
        if collecting is not None:
            self._collecting = collecting
        if moving is not None:
            self._placement = self._moving = moving
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
        except BaseException as error:
            forget_locals_of_reraise(error)
            if isinstance(error, Exception):
                pausing.raise_if_ended(self)
            if isinstance(error, RuntimeError) and overdue.is_timeout(error, self._timeout):
                self._with_late(error, self._late())
            raise
        return passed(batch, self._stages)

    def _with_late(self, error: RuntimeError, late: list[overdue.Late]) -> RuntimeError:
        """The error of a timeout, which then names what is late."""
        overdue.add_notes(error, self._workers, late)
        if self._transport.watchdog is not None:
            self._transport.watchdog.add_notes(error, self._workers, late)
        return error

    def _late(self, every: bool = False) -> list[overdue.Late]:
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
            if self._moving is not None:
                self._moving.begin_epoch()
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
            try:
                # Before the memory goes that batches are copied from. Behind the end of the workers: by then
                # no other thread waits for one of theirs.
                if self._close_placed is not None:
                    self._close_placed()
            finally:
                if self._shutdown:
                    self._transport.close(may_keep=not self._persistent_workers)

    def _stop(self, _message: str) -> None:
        """Wakes a thread that waits for a batch, which finds that the iterator was ended."""
        # Once all is closed, none waits.
        with contextlib.suppress(RuntimeError):
            self._data_queue.put(None)
