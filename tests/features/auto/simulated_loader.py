"""A loader with ``num_workers="auto"`` in simulated time: its workers, its caller, and other programs.

:class:`SimulatedLoader` is the iterator that ``_features.auto.auto_workers`` sees, so the real counting and
the real decisions run. Nothing sleeps and no process starts.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ringloader._core.workers import Workers
from ringloader._features.auto import auto_workers, measuring
from ringloader._features.auto.auto_workers import AutoWorkers, Limits
from ringloader._features.auto.controller import Controller, Measured

PREFETCH_FACTOR = 2


@dataclasses.dataclass(frozen=True)
class Batch:
    """The costs of a batch, in seconds: a worker waits, holds what all share, and needs a processor."""

    wait: float = 0.0
    shared: float = 0.0
    cpu: float = 0.0


@dataclasses.dataclass(frozen=True)
class Workload:
    """A loader's work, and the machine.

    Attributes:
        batch: Makes the costs of a batch from its number.
        step: Seconds that the caller takes for a batch, by its number. They need no processor.
        main: Seconds of a processor that the main process needs for a batch.
        cores: Processors.
        quota: Processors that the control group may use.
        others: Makes the number of other programs' processes that run, from the time.
        others_each: Seconds after which it is asked again.
        start: Seconds until a worker that is started does its first task.
    """

    batch: Callable[[random.Random, int], Batch]
    step: Callable[[random.Random, int], float] = lambda _, __: 0.0
    main: float = 0.0
    cores: int = 2
    quota: float = math.inf
    others: Callable[[random.Random, float], int] = lambda _, __: 0
    others_each: float = math.inf
    start: float = 0.05


class Worker:
    """A worker: it does its tasks in their order."""

    def __init__(self) -> None:
        self.tasks: collections.deque[int] = collections.deque()
        # The parts of the task that it does, each with the seconds that are left.
        self.parts: list[list[Any]] = []
        self.ran = self.ready = 0.0
        # The first parts are those of its start.
        self.has_begun = self.is_ending = False


class SimulatedLoader:
    """An iterator.

    Args:
        workload: What is simulated.
        seed: Of all random numbers.
        controller: Decides. None for a fixed number.
        workers: The number of workers at the beginning.
    """

    _shutdown = False
    _features = ()
    # Each task is one worker's.
    joint_tasks = None

    def __init__(
        self, workload: Workload, seed: int, controller: Controller | None = None, workers: int = 1
    ) -> None:
        self.workload = workload
        # The costs of batches are those of any number of workers.
        self.seed = seed
        self.rng = random.Random(seed)
        self.now = 0.0
        self.others, self.others_until = 0, 0.0
        self._all_workers = Workers(self, 99, workers, PREFETCH_FACTOR, statuses=[True] * 99, scheduler=self)
        self._workers: list[Any] = self._all_workers.handles
        self.used = workers
        self.ready: set[int] = set()
        self.holders: list[Worker] = []
        self.sent = self.returned = 0
        self.waited_for = self.idle = self.throttled = 0.0
        self.turn = 0
        # The worker that was added last, and its first task: -1 if there is none.
        self.added, self.first_of_added = -1, -1.0
        self.history: list[tuple[float, int]] = [(0.0, workers)]
        self._scheduler = self
        self.take: Callable[[Any], Any] = SimulatedLoader._take
        if controller is not None:
            self.auto_workers = AutoWorkers(Owner(), Limits(controller.bound, controller.most))
            self.auto_workers._controller = controller
            self.auto_workers._monotonic = lambda: self.now  # type: ignore[method-assign]
            self.take = self.auto_workers.around(self.take)
        for _ in range(workers):
            self._workers.append(self.start_later(None))
        for _ in range(workers * PREFETCH_FACTOR):
            self._try_put_index()

    # The iterator, its scheduler and its transport, as `AutoWorkers` calls them.

    def waited(self) -> float:
        return self.waited_for

    def unanswered(self) -> list[int]:
        return [len(worker.tasks) for worker in self._workers]

    def use_first(self, workers: int, most: int) -> None:
        assert most == PREFETCH_FACTOR * workers
        if workers != self.used:
            self.history.append((self.now, workers))
        self.used = workers
        if self.added >= workers:
            self.added = self.first_of_added = -1

    def begin_worker(self, worker: int) -> None:
        self.added, self.first_of_added = worker, math.inf

    def has_begun(self) -> bool:
        first = self.first_of_added
        return first < self.returned or first in self.ready

    def positions(self) -> Any:
        return collections.namedtuple("Positions", "sent")(self.sent)

    def is_at_end(self) -> bool:
        return False

    def _start_of(self, worker: int, tells: bool) -> None:
        pass

    def _work_of(self, worker: int, start: None) -> None:
        pass

    def start_later(self, work: None) -> Worker:  # noqa: ARG002
        worker = Worker()
        worker.parts = [["cpu", self.workload.start / 2], ["wait", self.workload.start / 2]]
        return worker

    def has_been_ended(self, worker: int) -> bool:
        return self._workers[worker].is_ending

    def send(self, worker: int, task: None) -> None:  # noqa: ARG002
        self._workers[worker].is_ending = True

    def has_left(self, worker: int, _handle: Worker) -> bool:
        return self._workers[worker].is_ending

    def take_committed(self) -> None:
        pass

    def retire(self, worker: int, _handle: Worker | None = None) -> bool:  # noqa: ARG002
        return True

    def _try_put_index(self) -> None:
        if self.sent - self.returned >= PREFETCH_FACTOR * self.used:
            return
        turns = [(self.turn + at) % self.used for at in range(self.used)]
        chosen = min(turns, key=lambda at: len(self._workers[at].tasks))
        self.turn = chosen + 1
        if chosen == self.added:
            self.first_of_added = min(self.first_of_added, self.sent)
        self._workers[chosen].tasks.append(self.sent)
        self.sent += 1

    # Time.

    def _take(self) -> None:
        since = self.now
        while self.returned not in self.ready:
            self._advance(math.inf)
        self.waited_for += self.now - since
        self.ready.discard(self.returned)
        self.returned += 1
        self._try_put_index()

    def run(self, seconds: float) -> None:
        """Takes batches for some seconds."""
        until = self.now + seconds
        while self.now < until:
            self.take(self)
            step = self.workload.step(random.Random(f"{self.seed} step {self.returned}"), self.returned)
            end = self.now + step
            while self.now < end:
                self._advance(end)
            left = self.workload.main
            while left > 1e-12:
                left -= self._advance(math.inf, left)

    def _begin_tasks(self) -> None:
        for worker in self._workers:
            if not worker.parts and worker.tasks:
                number = worker.tasks[0]
                one = self.workload.batch(random.Random(f"{self.seed} {number}"), number)
                parts = [["wait", one.wait], ["shared", one.shared], ["cpu", one.cpu]]
                worker.parts = [part for part in parts if part[1] > 0]

    def _advance(self, until: float, main: float = 0.0) -> float:
        """Goes to the next event. Returns the seconds of a processor that the main process got."""
        if self.now >= self.others_until:
            self.others = self.workload.others(self.rng, self.now)
            self.others_until = self.now + self.workload.others_each
        self._begin_tasks()
        active = [worker for worker in self._workers if worker.parts]
        need = sum(worker.parts[0][0] == "cpu" for worker in active) + (main > 0)
        room = float(self.workload.cores)
        speed = min(1.0, room / (need + self.others)) if need else 1.0
        quota = min(1.0, self.workload.quota / (need * speed)) if need else 1.0
        holder = next((worker for worker in self.holders if worker.parts), None)
        span = min(until, self.others_until) - self.now
        speeds = []
        for worker in active:
            kind, left = worker.parts[0]
            if kind == "shared":
                if worker not in self.holders:
                    self.holders.append(worker)
                    holder = holder or worker
                at = 1.0 if worker is holder else 0.0
            else:
                at = speed * quota if kind == "cpu" else 1.0
            speeds.append(at)
            if at:
                span = min(span, left / at)
        if main:
            span = min(span, main / (speed * quota))
        assert span < math.inf, "nothing happens any more"
        self.now += span
        used = min(room, need + self.others)
        self.idle += (room - used) * span
        self.throttled += (1 - quota) * span
        for worker, at in zip(active, speeds, strict=True):
            part = worker.parts[0]
            if part[0] == "cpu":
                worker.ran += at * span
                worker.ready += (1 - at) * span
            part[1] -= at * span
            if part[1] <= 1e-9:
                if part[0] == "shared":
                    self.holders.remove(worker)
                del worker.parts[0]
                if not worker.parts and not worker.has_begun:
                    worker.has_begun = True
                elif not worker.parts:
                    self.ready.add(worker.tasks.popleft())
        return main and speed * quota * span


class Owner:
    """The loader that owns the iterator."""

    num_workers = 1


class SimulatedMeter:
    """Stands for ``measuring.Meter``."""

    simulated: SimulatedLoader

    def __init__(self, pids: Iterable[int], waited: float) -> None:  # noqa: ARG002
        self.noted: list[Sequence[int]] = []
        self._begin(waited)

    def _begin(self, waited: float) -> None:
        one = self.simulated
        self.before = (one.now, waited, one.idle, one.throttled)
        self.times = {id(worker): (worker.ran, worker.ready) for worker in one._workers}

    def note_tasks(self, unanswered: Sequence[int]) -> None:
        self.noted.append(unanswered)

    def look(self, pids: Sequence[int], waited: float, batches: int) -> Measured:  # noqa: ARG002
        one = self.simulated
        begun, before, idle, throttled = self.before
        seconds = max(one.now - begun, 1e-9)
        times = [
            (worker.ran - was[0], worker.ready - was[1])
            for worker in one._workers
            if (was := self.times.get(id(worker))) is not None
        ]
        running, ready = (sum(part) / len(times) / seconds for part in zip(*times, strict=True))
        found = Measured(
            seconds=seconds,
            batches=batches,
            waited=waited - before,
            busy=measuring._busy_share(self.noted, len(one._workers)),
            running=running,
            waiting=max(1.0 - running - ready, 0.0),
            # As the system counts: in hundredths of a second.
            idle_cores=(math.floor(one.idle * 100) - math.floor(idle * 100)) / 100 / seconds,
            throttled=(one.throttled - throttled) / seconds,
        )
        self.noted = []
        self._begin(waited)
        return found


def simulated(
    monkeypatch: Any, workload: Workload, seed: int, controller: Controller | None = None, workers: int = 1
) -> SimulatedLoader:
    """Returns an iterator whose measurements are those of the simulation."""
    found = SimulatedLoader(workload, seed, controller, workers)
    meter = type("Meter", (SimulatedMeter,), {"simulated": found})
    monkeypatch.setattr(auto_workers, "Meter", meter)
    monkeypatch.setattr(auto_workers, "_tasks_of", lambda workers: [0] * len(workers.handles))
    monkeypatch.setattr(auto_workers, "_has_memory", lambda *_: True)
    return found
