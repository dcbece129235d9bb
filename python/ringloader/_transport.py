"""torch's own control over shared-memory rings: context, queues, event, iterator.

``_MultiProcessingDataLoaderIter`` takes everything that moves data or starts processes from the loader's
``multiprocessing_context``. A view of the loader with a context of ours is all that it takes to run torch's
iterator, and torch's worker loop, unchanged.
"""

from __future__ import annotations

import collections
import queue
from typing import Any

import torch.multiprocessing

from ringloader import _budget, _forks, _forkserver, _moved, _native, _once, _processes, _seam, _spawn, _warm


class FailedArrival(_seam.ExceptionWrapper):  # type: ignore[misc]
    """Stands for a batch that was made and cannot be had here. torch raises it in the batch's turn.

    Args:
        error: What was raised while it arrived.
        was_raised: Whether the caller has had that error already.
    """

    def __init__(self, error: BaseException, was_raised: bool) -> None:
        super().__init__((type(error), error, error.__traceback__), "while a batch arrived")
        self._error: BaseException | None = error
        if was_raised:
            name = type(error).__name__
            self._error = RuntimeError(f"a batch was lost when {name} interrupted its arrival")

    def reraise(self) -> None:
        """Raises the error as it was, and keeps nothing of it: in a cycle with it would hang the iterator."""
        error, self._error = self._error, None
        try:
            assert error is not None
            raise error
        finally:
            del error


class TaskQueue:
    """The parent's end of one worker's task ring, as torch's iterator uses a queue."""

    def __init__(self, engine: _native.Engine, worker: int) -> None:
        self._engine = engine
        self.worker = worker
        # Whether torch's final signal was sent: the worker's end is no failure then.
        self.ended = False

    def put(self, message: object) -> None:
        """Sends a message without ever waiting."""
        self._engine.put(self.worker, message)
        self.ended = self.ended or message is None

    def cancel_join_thread(self) -> None:
        """Does nothing: there is no thread."""

    def close(self) -> None:
        """Does nothing: the transport is closed as a whole."""


class ResultQueue:
    """The parent's end of all result rings, as torch's iterator and pin thread use a queue."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._local: collections.deque[object] = collections.deque()

    def put(self, message: object) -> None:
        """Wakes whoever is in :meth:`get` with a message of the main process's own."""
        self._local.append(message)
        self._transport.engine.wake()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Takes the next result.

        Raises:
            queue.Empty: When there is none in time, or a worker has ended: whoever called looks which.
        """
        while True:
            if self._local:
                return self._local.popleft()
            try:
                found = self._transport.engine.next(timeout if block else 0.0)
            except BaseException:
                interrupted = self._transport.engine.take_interrupted()
                if interrupted is not None:
                    self._local.append(interrupted)
                raise
            if isinstance(found, tuple):
                return found[0]
            if found is not None:
                if not self._transport.note_end(found):
                    continue
                raise queue.Empty
            if not self._local:
                raise queue.Empty

    def qsize(self) -> int:
        """Results that are there."""
        return len(self._local) + self._transport.engine.committed()

    def empty(self) -> bool:
        """Whether none is there."""
        return self.qsize() == 0

    def cancel_join_thread(self) -> None:
        """Does nothing: there is no thread."""

    def close(self) -> None:
        """Does nothing: the transport is closed as a whole."""


class DoneEvent:
    """The event by which torch's iterator ends its workers."""

    def __init__(self, engine: _native.Engine) -> None:
        self._engine = engine

    def set(self) -> None:
        """Sets it and wakes the workers."""
        self._engine.set_done()

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._engine.is_done()


class Transport:
    """Everything of one iterator that must be closed; also the ``multiprocessing_context`` it is given."""

    def __init__(self, engine: _native.Engine, context: Any, workers: int, shelf: _warm.Shelf) -> None:
        self.engine = engine
        self._shelf = shelf
        # Whether an iteration of this one ended as it should, as far as is known.
        self.sound = True
        self._workers = workers
        self.owner = _forks.process_identity()
        self._context = context
        self._queues: list[TaskQueue] = []
        self._processes: dict[int, Any] = {}
        self._shared = None if context.get_start_method() == "fork" else _once.Shared()
        self._results_made = False
        self._closed = False
        self._final: dict[str, int] = {}

    def Queue(self) -> ResultQueue | TaskQueue:  # noqa: N802
        """The first is for results, the others are the workers' in order."""
        if not self._results_made:
            self._results_made = True
            # Not kept here: without a cycle everything goes as soon as the iterator does.
            return ResultQueue(self)
        made = TaskQueue(self.engine, len(self._queues))
        self._queues.append(made)
        return made

    def Event(self) -> DoneEvent:  # noqa: N802
        """The event that ends the workers."""
        return DoneEvent(self.engine)

    def Process(self, *, target: Any, args: tuple[Any, ...]) -> Any:  # noqa: N802
        """A process of the user's context that runs ``target`` at a worker's end."""
        worker = next(arg.worker for arg in args if isinstance(arg, TaskQueue))
        seats = tuple(self._seat(arg) for arg in args)
        seated = seats if self._shared is None else _once.Arguments(self._shared, seats)
        berth = _processes.Berth(self.engine, worker)
        process = self._context.Process(target=_processes.run_worker, args=(berth, target, seated))
        process = _spawn.by_server(process)
        return _processes.watched(process, lambda pid: self._started(worker, process, pid))

    @staticmethod
    def _seat(argument: object) -> object:
        if isinstance(argument, TaskQueue):
            return _processes.Seat.TASKS
        if isinstance(argument, ResultQueue):
            return _processes.Seat.RESULTS
        if isinstance(argument, DoneEvent):
            return _processes.Seat.DONE
        return argument

    def _started(self, worker: int, process: Any, pid: int) -> None:
        self._processes[worker] = process
        try:
            self.engine.watch_worker(worker, pid)
        except BaseException:
            # torch does not list it yet, so nobody else would end it.
            process.terminate()
            process.join()
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

    def counters(self) -> dict[str, int]:
        """What went over the rings."""
        return dict(self._final) if self._closed else dict(self.engine.counters())

    def close(self, may_keep: bool = False) -> None:
        """Gives back all memory that no tensor holds. A forked child that inherited this does nothing.

        Args:
            may_keep: Whether another epoch may find it warm: some of it then stays with the loader.
        """
        if self._closed or _forks.process_identity() != self.owner:
            return
        self._final = dict(self.engine.counters())
        self._closed = True
        if may_keep and self._ended_well():
            self._shelf.keep(self.engine)
        else:
            self.engine.close()
        self._share_nothing_more()
        self._processes.clear()

    def _ended_well(self) -> bool:
        started = self._processes.values()
        return self.sound and len(started) == self._workers and all(one.exitcode == 0 for one in started)


class _LoaderView:
    """A loader as torch's iterator sees it: the same, with another context.

    Also to a constructor that somebody put in place of torch's, and that writes to the loader.
    """

    def __init__(self, loader: Any, transport: Transport) -> None:
        vars(self).update(_loader=loader, multiprocessing_context=transport)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._loader, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._loader, name)


class TransportIterator(_seam.Iterator):  # type: ignore[misc]
    """torch's own iterator, with rings in place of its queues."""

    def __init__(self, loader: Any, transport: Transport) -> None:
        self._transport = transport
        # torch's shutdown reads them, also when its constructor has failed half-way.
        self._shutdown = False
        self._worker_pids_set = False
        self._workers: list[Any] = []
        self._index_queues: list[Any] = []
        self._workers_status = [True] * loader.num_workers
        self._persistent_workers = loader.persistent_workers
        self._workers_done_event = transport.Event()
        try:
            _seam.call_from_torch(super().__init__, _LoaderView(loader, transport))
        except BaseException:
            self._shutdown_workers()
            raise
        # What analysers of traces look for.
        self._profile_name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"

    def _shutdown_workers(self) -> None:
        # While modules are torn down, names of this one are None, and torch does nothing more either.
        if _forks is None or _forks.process_identity() != self._transport.owner:
            # A forked child inherited this iterator: workers and memory are its parent's.
            return
        try:
            super()._shutdown_workers()
        finally:
            if self._shutdown:
                self._transport.close(may_keep=not self._persistent_workers)


def make_transport(loader: Any, max_shared_bytes: int | None) -> Transport:
    """The transport for one iterator of a loader with workers.

    Raises:
        OSError: When shared memory or descriptors cannot be had. Nothing is left then.
        ValueError: When so many workers with so many tasks have no room in the address space.
    """
    workers = loader.num_workers
    context = loader.multiprocessing_context or torch.multiprocessing
    _forks.tell_native()
    _moved.drop_unread()
    _forkserver.preload(context)
    _spawn.prepare(loader)
    most_tasks = _most_tasks(loader)
    shelf = _warm.Shelf(loader, workers, (most_tasks, max_shared_bytes))
    available = _native.available_memory() + shelf.resident
    share = _budget.share_per_worker(workers, max_shared_bytes, available)
    engine = shelf.take(share) or _native.Engine(workers, most_tasks, share)
    return Transport(engine, context, workers, shelf)


def _most_tasks(loader: Any) -> int:
    """Batches of one worker that can be on their way at once."""
    factor = loader.prefetch_factor
    # What else stands there is refused by torch's constructor, which has drawn by then.
    per_worker = max(factor, 1) if isinstance(factor, int) else 1
    if loader.in_order and loader._dataset_kind != _seam.ITERABLE:
        # In turn, so an equal part each; after a reset in mid-epoch, those of the epoch before too.
        return 2 * per_worker + 1
    # Where the others have ended, or are slow, one worker may be asked for all.
    return per_worker * int(loader.num_workers) + per_worker + 1
