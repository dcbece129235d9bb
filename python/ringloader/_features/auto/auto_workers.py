"""``num_workers="auto"``: the bounds of a loader's workers, which are added and ended while an epoch runs."""

from __future__ import annotations

import collections
import copy
import functools
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ringloader._common import weak_registry
from ringloader._common.proc import local_world_size
from ringloader._core.feature import Feature, MemoryPlan, Setup, StagePosition, any_may_make
from ringloader._features.auto import FoundNumber, measuring
from ringloader._features.auto.controller import Change, Controller
from ringloader._features.auto.measuring import Meter
from ringloader._features.cores import cores
from ringloader._features.rules import AUTO
from ringloader._features.table import Options, has_options
from ringloader._log import logger
from ringloader._torch import internals

if TYPE_CHECKING:
    from ringloader._common.protocols import OurWorkersIterator
    from ringloader._core.workers import Workers
    from ringloader._torch.protocols import TorchLoader

# The least time between two looks at the clock, in seconds, as the mean of some looks: batches come in
# bursts. And the most batches that are counted in it.
_BETWEEN, _LOOKS = 0.01, 16
_MOST_BETWEEN = 1 << 12
# The workers for each processor where they wait, and the most of them all together.
_TIMES, _MOST = 4, 64
# The changes that are kept for the figures of an epoch, at most.
_MOST_CHANGES = 1000

_controllers: weak_registry.WeakRegistry[Controller] = weak_registry.WeakRegistry()


def bound() -> int:
    """Returns the most workers for work that needs processors.

    One processor is left to the caller where this process of the job has more than two.
    """
    own = cores() // local_world_size()
    return max(own - 1 if own > 2 else own, 1)


def most() -> int:
    """Returns the most workers for work that waits."""
    return max(bound(), min(_TIMES * bound(), _MOST))


class Limits(NamedTuple):
    """The most workers of a loader.

    Attributes:
        bound: For work that needs processors.
        most: For work that waits.
    """

    bound: int
    most: int


def limits(pool: Any) -> Limits:
    """Returns the limits of a loader, whose workers may come from a pool."""
    found = Limits(bound(), most())
    return found if pool is None else Limits(*(min(number, pool.num_workers) for number in found))


def controller_of(loader: object, limits: Limits) -> Controller:
    """Returns the controller of a loader's iterator. It continues from the last one that was made."""
    found = _controllers.get(loader)
    # Several iterators may run at once, each with workers of its own.
    found = Controller(*limits) if found is None else copy.deepcopy(found)
    # There may be fewer processors than before, or a smaller pool.
    found.bound, found.most = min(found.bound, limits.bound), min(found.most, limits.most)
    found.number = min(found.number, found.most)
    _controllers.put(loader, found)
    return found


def show(loader: object, number: int) -> None:
    """Makes ``loader.num_workers`` the number of workers that run."""
    vars(loader)["num_workers"] = FoundNumber(number)


def arguments_for(loader: TorchLoader, options: Options, workers: int) -> dict[str, Any]:
    """Returns the ``num_workers`` of a loader that finds its number, or found it before. It starts over."""
    _controllers.pop(loader)
    if options.num_workers == AUTO:
        return {"num_workers": FoundNumber(limits(options.worker_pool).bound)}
    return {"num_workers": int(workers)} if isinstance(workers, FoundNumber) else {}


def bound_for(loader: TorchLoader, options: Options) -> int:
    """Returns the bound of an iterator that finds its number of workers.

    A loader that was made or converted shows it. One that ``install`` reached keeps the program's number.
    """
    # A worker process may have no children.
    workers = 0 if internals.is_in_worker() else limits(options.worker_pool).bound
    if has_options(loader):
        show(loader, workers)
    return workers


def feature_for(loader: TorchLoader, options: Options, setup: Setup) -> Feature | None:
    """Returns the feature that changes the number of workers, or reports the one that cannot change."""
    if not setup.workers or setup.path == "torch":
        return None
    if not any_may_make(loader):
        return Reported(setup.workers)
    return AutoWorkers(loader, limits(options.worker_pool), options.max_shared_bytes is not None)


class Reported(Feature):
    """Reports a number of workers that was found and does not change.

    Args:
        number: The number.
    """

    def __init__(self, number: int) -> None:
        self.counters = functools.partial(dict, workers=number)


class AutoWorkers(Feature):
    """Changes how many workers of an iterator run.

    INVARIANT: no worker is added until the one that is to end has ended. It is told to when it has no task,
    or between two runs of tasks that all workers share.

    An interrupt may come anywhere: each step can be taken again, and the next look goes on with it.

    Args:
        loader: The iterator's loader. Its number of workers is kept for its next iterator.
        limits: Its limits.
        is_bounded: True if the program bounds the memory of all workers together.
    """

    position = StagePosition.WORKERS
    # Attributes: an iterator that lives on while modules are torn down finds their names None.
    _monotonic = staticmethod(time.monotonic)

    def __init__(self, loader: TorchLoader, limits: Limits, is_bounded: bool = False) -> None:
        self._loader = weakref.ref(loader)
        self._shows = has_options(loader)
        self._limits = limits
        self._is_bounded = is_bounded
        self._controller = controller_of(loader, limits)
        self._changes: collections.deque[Change] = collections.deque(maxlen=_MOST_CHANGES)
        # Threads may share an iterator.
        self._lock = threading.Lock()
        self._meter: Meter | None = None
        # Calls that are left until the next look at the clock, and the calls between two looks.
        self._left = self._between = 1
        # The calls until the last look.
        self._counted = 0
        # The looks since a time.
        self._looks, self._since = 0, 0.0
        # Batches and time at the beginning of the look.
        self._first, self._begun = 0, 0.0
        # Tasks that are still to be sent because workers were added.
        self._unsent = 0
        # The tasks that were sent before the last change.
        self._settled_at = 0
        # True once a worker was lost, or could not be started: the number stays. One whose start was
        # interrupted may run unknown.
        self._is_fixed = False
        self._show()

    @property
    def number(self) -> int:
        """The number of workers that get tasks."""
        return self._controller.number

    def history(self) -> tuple[int, Sequence[Change]]:
        """Returns the number of workers, and the last changes of it, the oldest first."""
        return self.number, tuple(self._changes)

    def setup(self, setup: Setup) -> Setup:
        # There is memory for the most workers that there may be.
        return setup._replace(workers=self._limits.most, running=self.number, history=self.history)

    def memory(self, plan: MemoryPlan) -> MemoryPlan:
        # Of the most workers that there may be, few run at a time.
        return plan if self._is_bounded else plan._replace(sharers=min(self._limits.bound, plan.sharers))

    def counters(self) -> Mapping[str, int]:
        """Returns the number of workers that get tasks."""
        return {"workers": self.number}

    def begin_epoch(self, _loader: TorchLoader) -> None:
        """Begins another epoch of the same workers."""
        self._meter = None
        self._left = self._between = 1
        self._counted = self._settled_at = self._unsent = 0

    def around(self, take: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns ``take``, which gives an iterator its next batch, before which the number may change."""

        # Before, and not after: an interrupt would lose the batch.
        def counted(iterator: OurWorkersIterator) -> Any:
            self._left -= 1
            if self._left <= 0 and self._lock.acquire(blocking=False):
                try:
                    self._look(iterator)
                finally:
                    self._lock.release()
            return take(iterator)

        return counted

    def _look(self, iterator: OurWorkersIterator) -> None:
        """Looks at the clock; measures, and changes the number, if enough batches and time have passed."""
        now = self._monotonic()
        self._counted += self._between
        if self._meter is not None:
            self._pace(now)
        self._left = self._between
        if self._is_fixed or iterator._shutdown:
            return
        workers = iterator._all_workers
        if not all(workers.statuses[: len(workers.handles)]):
            # One was lost, and has no successor.
            self._is_fixed = True
            return
        waited = iterator._scheduler.waited()
        if self._meter is None:
            # The calls until now have waited for the start.
            if self._counted > 1:
                self._begin_look(workers, now, waited)
            return
        # Fewer run if an interrupt came after a decision.
        self._controller.number = min(self.number, len(workers.handles))
        if workers.running != self.number and not _has_sent_all(iterator):
            self._unsent = _use(workers, self.number)
        if self._unsent:
            self._fill(iterator)
        unanswered = iterator._scheduler.unanswered()
        self._meter.note_tasks(unanswered)
        self._controller.note(self._counted, now, waited)
        while len(workers.handles) > workers.running:
            if not _end_last(workers, unanswered):
                return
        if _has_sent_all(iterator):
            return
        controller = self._controller
        batches, seconds = self._counted - self._first, now - self._begun
        is_settling = (
            not controller.is_settled and self._counted > self._settled_at and iterator._scheduler.has_begun()
        )
        if not is_settling and not controller.is_due(batches, seconds):
            return
        tasks = _tasks_of(workers)
        look = self._meter.look(tasks, waited, batches)
        self._first, self._begun = self._counted, now
        if is_settling:
            # The rate until now was partly that of another number.
            controller.settle()
            return
        was_ramping = controller.is_ramping
        decision = controller.decide(look, lambda more: _has_memory(workers, tasks, more))
        if was_ramping and not controller.is_ramping and not decision.change:
            bounds = f"at most {controller.bound}, or {controller.most} that wait"
            logger.info("num_workers='auto' stays at %d for now: %s (%s)", self.number, bounds, look)
        while decision.change and not self._is_fixed:
            why = f"{decision.why} ({look})"
            before = self.number - decision.change
            logger.info("num_workers='auto': %d workers instead of %d: %s", self.number, before, why)
            self._changes.append(Change(time.monotonic_ns(), self.number, why))
            if decision.change > 0:
                self._add(iterator)
            else:
                self._unsent = _use(workers, self.number)
                self._show()
            # Tasks that are out were not shared among the workers of now.
            self._settled_at = iterator._scheduler.positions().sent
            if decision.change < 0:
                return
            decision = controller.decide_more(look, lambda more: _has_memory(workers, tasks, more))

    def _pace(self, now: float) -> None:
        """Finds the calls between two looks, by the time that the last ones took."""
        self._looks += 1
        is_long = now - self._since >= _LOOKS * _BETWEEN
        if is_long and self._looks < _LOOKS // 4:
            self._between = max(self._between // 2, 1)
        elif not is_long and self._looks >= _LOOKS:
            self._between = min(2 * self._between, _MOST_BETWEEN)
        elif not is_long:
            return
        self._looks, self._since = 0, now

    def _begin_look(self, workers: Workers, now: float, waited: float) -> None:
        self._meter = Meter(_tasks_of(workers), waited)
        self._first, self._begun = self._counted, now
        self._controller.begin_epoch()
        self._controller.note(self._counted, now, waited)

    def _show(self) -> None:
        loader = self._loader()
        if loader is not None and self._shows:
            show(loader, self.number)

    def _add(self, iterator: OurWorkersIterator) -> None:
        worker, workers = self.number - 1, iterator._all_workers
        try:
            work = iterator._work_of(worker, iterator._start_of(worker, tells=True))
            workers.handles.append(workers.transport.start_later(work))
        except BaseException as error:
            # INVARIANT: no two processes are at the rings of one worker.
            self._is_fixed = True
            self._controller.undo(for_good=isinstance(error, Exception))
            if not isinstance(error, Exception):
                raise
            # The batches of the others come all the same.
            logger.warning("num_workers='auto' stays at %d: another could not be started: %s", worker, error)
            return
        self._unsent = _use(workers, self.number)
        self._show()
        self._fill(iterator)

    def _fill(self, iterator: OurWorkersIterator) -> None:
        """Sends the tasks that more workers are to have."""
        while self._unsent and not iterator._scheduler.is_at_end():
            iterator._try_put_index()
            self._unsent -= 1


def _use(workers: Workers, number: int) -> int:
    """Makes the first workers get the tasks. Returns how many tasks more there may be than before."""
    before, begun = workers.most_tasks(), workers.running
    workers.running = number
    for worker in range(begun, number):
        workers.scheduler.begin_worker(worker)
    workers.scheduler.use_first(number, workers.most_tasks())
    return max(workers.most_tasks() - before, 0)


def _end_last(workers: Workers, unanswered: list[int]) -> bool:
    """Tells the last of the workers that get no tasks to end, once it has none. True if it has left.

    Args:
        workers: The workers.
        unanswered: The tasks of each that have no answer.
    """
    transport, last = workers.transport, len(workers.handles) - 1
    if not transport.has_been_ended(last):
        if not workers.shares_tasks and last < len(unanswered) and unanswered[last]:
            return False
        transport.send(last, None)
    if not transport.has_left(last, workers.handles[last]):
        return False
    # The worker's results may wait for their turn.
    workers.scheduler.take_committed()
    if not workers.scheduler.retire(last):
        # Lost with a task, for which an error, or a successor, comes where the next batch is taken.
        return False
    transport.retire(last, workers.handles[last])
    workers.handles.pop()
    return True


def _tasks_of(workers: Workers) -> list[Any]:
    """Returns the system's numbers of the workers: of processes, or of threads."""
    return [getattr(worker, "native_id", None) or worker.pid for worker in workers.handles]


def _has_memory(workers: Workers, tasks: list[int], more: int) -> bool:
    # Threads have the memory of the process.
    are_threads = isinstance(workers.handles[0], threading.Thread)
    return are_threads or measuring.has_memory(tasks, more)


def _has_sent_all(iterator: OurWorkersIterator) -> bool:
    """True if no tasks of the epoch are left, for which a change would come too late."""
    # The first tasks of the epoch that follows are for the workers that run now.
    begun = any(feature.has_begun_next for feature in iterator._features)
    return begun or iterator._scheduler.is_at_end()
