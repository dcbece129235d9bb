"""The transport of one iterator with actors: the rings are as for local workers, served by a relay."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ray.exceptions import RayActorError, RayTaskError

import ringloader._native as _native
from ringloader._core.feature import Feature, Options, Setup
from ringloader._features.pools.crew import Lent
from ringloader._log import logger
from ringloader._ray.actor import Assignment, UnreachableError, dumps
from ringloader._ray.crew import Actor, ActorWorker, Crew, address_of, wait_until
from ringloader._torch import internals
from ringloader._transport import budget, overdue
from ringloader._transport.overdue import Late, LostWorker
from ringloader._transport.protocol import Counters, Transport
from ringloader._transport.segment_cache import Beside
from ringloader._worker.loop import Work
from ringloader._worker.options import WorkerOption

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader

# Seconds between two looks whether an actor that is waited for has died.
_POLL_SECONDS = 0.1


class Settings(NamedTuple):
    """Arguments of ``Workers``."""

    max_bytes: int | None
    retries: int
    start_timeout: float
    host: str | None


class _Counts:
    """Counts of one epoch after another, for a report."""

    def __init__(self, engine: _native.Engine, relay: _native.MainRelay) -> None:
        self._engine = engine
        self._relay = relay
        self.begin_epoch()

    def begin_epoch(self) -> None:
        self.replaced_workers = 0
        self._received_before = self._relay.received

    def __call__(self) -> list[tuple[str, int]]:
        received = self._relay.received - self._received_before
        own = [("received_bytes", received), ("replaced_workers", self.replaced_workers)]
        return self._engine.counters() + own


class RayTransport(Transport):
    """The transport of one iterator with actors.

    Args:
        loader: The loader.
        options: Its options.
        worker_options: The options that workers ask.
        features: The features that are on.
        pool: The pool of the actors, which ends them when it goes.
        crew: The actors of the pool.
        settings: Arguments of ``Workers``.

    Raises:
        TypeError: If an object of the loader cannot be pickled. No actor was started then.
    """

    engine: _native.Engine
    path = "ray"
    about = "native scheduling, with actors of a Ray cluster for workers"
    scheduler = _native.Scheduler
    # Attributes: an iterator that lives on while modules are torn down finds their names None.
    _join_seconds = internals.JOIN_SECONDS
    _wait_until = staticmethod(wait_until)

    def __init__(
        self,
        loader: TorchLoader,
        options: Options,
        worker_options: Sequence[WorkerOption],
        features: Sequence[Feature],
        pool: object,
        crew: Crew,
        settings: Settings,
    ) -> None:
        self._host = host = address_of(settings.host)
        workers = loader.num_workers
        self._record = crew.records.record_of(loader)
        in_turn = all(feature.in_turn for feature in features)
        self._max_tasks = budget.most_tasks(loader, workers, in_turn)
        share = budget.share_per_worker(workers, options.max_shared_bytes, _native.available_memory())
        with budget.asking(OSError, ValueError):
            engine = _native.Engine(workers, self._max_tasks, share)
        super().__init__(engine, worker_options, features)
        # By worker: the first batch that it has not answered when it was lost, and how often there.
        self._losses: dict[int, tuple[int | None, int]] = {}
        # Until it is closed.
        self._keeps_alive: object = pool
        self._crew = crew
        self._settings = settings
        self._count = workers
        self.beside: Beside | None = None
        self._work: dict[int, Work] = {}
        self._handles: dict[int, ActorWorker] = {}
        # The numbers under which the workers are expected.
        self._numbers: dict[int, int] = {}
        # Why each was lost, as Ray has it, by its worker and number.
        self._why: dict[tuple[int, int], str] = {}
        try:
            self._token = secrets.token_bytes(32)
            self._relay = _native.MainRelay(engine, host, self._token, settings.max_bytes)
        except OSError as error:
            engine.close()
            raise RuntimeError(
                f"the main process cannot listen for workers at {host} ({error}); pass host= to the "
                "Workers: an address of this machine"
            ) from error
        except BaseException:
            engine.close()
            raise
        self._counts = _Counts(engine, self._relay)
        self.counters = Counters(self._counts)
        # So that they start side by side.
        self._waiting = [crew.take(self._record.number) for _ in range(workers)]

    def start(self, work: Work) -> ActorWorker:
        """Gives a worker's actor its work. The last call waits until all are connected."""
        self._work[work.worker] = work
        handle = self._begin(work, self._waiting.pop(0), self._relay.expect(self.engine, work.worker))
        if len(self._handles) == self._count:
            left = self._wait_until(self._settings.start_timeout)
            for worker in range(self._count):
                self._connect(worker, left)
        return self._handles.get(work.worker, handle)

    def _begin(self, work: Work, actor: Actor, number: int) -> ActorWorker:
        fields = tuple(work._replace(options=()))
        try:
            pickled = dumps((fields, self.options), self._record.keys())
            assignment = Assignment(
                self._host,
                self._relay.port,
                self._token,
                work.worker,
                number,
                self._max_tasks,
                self.engine.share,
                self._record.number,
                [self._record.ref],
                pickled,
                self._crew.records.numbers(),
            )
            relay, worker, why = self._relay, work.worker, self._why

            def lose(how: str) -> None:
                why[worker, number] = how
                relay.lose(worker, number, how)

            handle = ActorWorker(actor, assignment, lose, self._crew)
        except BaseException:
            self._crew.discard(actor)
            raise
        actor.assignments += 1
        actor.numbers = (actor.numbers & assignment.keep) | {self._record.number}
        self._handles[work.worker] = handle
        self._numbers[work.worker] = number
        return handle

    def _connect(self, worker: int, left: Callable[[], float]) -> None:
        """Waits until a worker is connected, and takes another actor where one dies before.

        Raises:
            RuntimeError: If there is no room, or an actor cannot work with this process.
        """
        deaths = 0
        while True:
            self._crew.check_open()
            handle = self._handles[worker]
            handle.actor.check()
            timeout = min(max(left(), 0.0), _POLL_SECONDS)
            is_connected, lost = self._relay.standing(worker, self._numbers[worker], timeout)
            # Raises for other versions, and may arrive after the connection.
            birth = handle.actor.birth
            if is_connected and birth is not None:
                return
            # Ray tells of a death later than the connection ends, or never.
            error = handle.failure() or handle.actor.has_failed()
            if isinstance(error, RayTaskError):
                raise self._error_of_start(worker, error)
            if lost is not None or error is not None:
                self._relay.lose(worker, self._numbers[worker], "it has not begun")
                if error is not None and not isinstance(error, RayActorError):
                    raise RuntimeError(f"DataLoader worker {worker} could not be started: {error}") from error
                # One that has worked before may have gone since, with its node.
                deaths += handle.actor.assignments == 1
                if deaths > self._settings.retries:
                    raise RuntimeError(
                        f"DataLoader worker {worker} could not be started: its actor has died {deaths} times"
                    ) from error
                self._another(worker)
            elif left() <= 0:
                raise self._error_of_room(worker, birth is not None)

    def _error_of_start(self, worker: int, error: RayTaskError) -> RuntimeError:
        cause = error.cause if isinstance(error.cause, BaseException) else None
        if isinstance(cause, UnreachableError):
            return RuntimeError(str(cause))
        what = error if cause is None else f"{type(cause).__name__}: {cause}"
        made = RuntimeError(f"DataLoader worker {worker} could not be started: {what}")
        made.__cause__ = error
        return made

    def _error_of_room(self, worker: int, lives: bool) -> RuntimeError:
        seconds = f"start_timeout={self._settings.start_timeout:g} s"
        if lives:
            return RuntimeError(
                f"DataLoader worker {worker} did not connect to {self._host}:{self._relay.port} "
                f"within {seconds}: its actor lives, and unpickles the dataset or cannot reach this address"
            )
        return RuntimeError(
            f"the cluster had no room for DataLoader worker {worker} within {seconds}: each of the "
            f"{self._count} workers asks for {self._crew.options}; `ray status` shows "
            "what is left: use fewer workers, ask for less, or add nodes"
        )

    def _another(self, worker: int) -> None:
        """Gives the work of a worker that has ended, and whose results were taken, to another actor."""
        # The relay has given the worker up, so this takes a moment.
        while not self.engine.has_ended(worker):
            time.sleep(0.001)
        number = self._relay.expect(self.engine, worker, self.engine.succeed(worker))
        self._begin(self._work[worker], self._crew.take(self._record.number), number)

    def start_later(self, work: Work) -> ActorWorker:
        """Starts a successor of a lost worker. Waits until it is connected."""
        worker = work.worker
        self._crew.check_open()
        lost = self._handles[worker]
        lost.actor.check()
        lost.kill()
        self._work[worker] = work
        self._counts.replaced_workers += 1
        self._another(worker)
        self._connect(worker, self._wait_until(self._settings.start_timeout))
        return self._handles[worker]

    def schedule(self, scheduler: Any) -> None:
        """Makes the scheduler keep the indices of tasks that have no answer, for successors."""
        super().schedule(scheduler)
        scheduler.keep_sent()

    def lost(self, lost: LostWorker) -> ActorWorker | None:
        """Returns a lost worker's successor, which is connected; None if there may be none."""
        # Another one would send the batch again that this process could not take.
        if self._relay.failure(lost.worker) is not None:
            return None
        # This is the first batch of the worker without an answer.
        batch = None if lost.in_hand is None else lost.in_hand[1]
        before, times = self._losses.get(lost.worker, (None, 0))
        times = times + 1 if before == batch else 1
        self._losses[lost.worker] = batch, times
        retries = self._settings.retries
        if lost.refusal is not None or times > retries:
            lost.notes.append(lost.refusal or f"retries={retries}: it was lost {times} times in this batch")
            return None
        logger.warning(
            "DataLoader worker %d (pid %s on %s) was lost: %s; another actor makes its batches",
            lost.worker,
            lost.handle.pid,
            lost.handle.node,
            self._why_lost(lost.worker),
        )
        successor: ActorWorker = lost.restart()
        return successor

    def _why_lost(self, worker: int) -> str:
        """Returns why a worker was lost, in words."""
        lost, known = self._relay.why_lost(worker), self._why.get((worker, self._numbers[worker]))
        return "; ".join(text for text in dict.fromkeys((lost, known)) if text) or "it has ended"

    def error_of_lost(
        self, worker: int, handle: ActorWorker, in_hand: Late | None, *notes: str
    ) -> RuntimeError:
        """Returns the error for a worker that was lost and gets no successor."""
        failure = self._relay.failure(worker)
        who = f"DataLoader worker {worker} (pid(s) {handle.pid}) on {handle.node}"
        if failure is None:
            error = RuntimeError(f"{who} exited unexpectedly: {self._why_lost(worker)}")
        else:
            error = RuntimeError(f"the main process could not take a batch of {who}: {failure}")
        error.__cause__ = handle.failure()
        if in_hand is not None:
            error.add_note(f"it was in {overdue.batch(*in_hand[1:])}")
        for note in notes:
            error.add_note(note)
        return error

    def end(self, workers: Sequence[ActorWorker], told: Callable[[int], bool]) -> None:
        """Ends the workers. Kills the actors that are still at work after torch's timeout."""
        left = self._wait_until(self._join_seconds)
        try:
            self.engine.set_done()
            for worker in range(len(workers)):
                if told(worker):
                    self.send(worker, None)
            for handle in workers:
                handle.join(max(left(), 0.0))
        finally:
            for handle in workers:
                handle.kill()

    def begin_epoch(self) -> None:
        """Begins another epoch of the same workers, before they are told."""
        super().begin_epoch()
        self._losses.clear()
        self._counts.begin_epoch()

    def close(self, may_keep: bool = False) -> None:  # noqa: ARG002
        """Gives back all memory that no tensor holds, and the actors."""
        if not self._begin_close():
            return
        self._relay.close()
        self.engine.close()
        if self.beside is not None:
            self.beside.close()
        for handle in self._handles.values():
            handle.kill()
        while self._waiting:
            self._crew.give_back(self._waiting.pop())
        self._handles.clear()
        self._work.clear()
        self._keeps_alive = None
        self._close_features()


class Actors(Lent):
    """The workers of an iterator that are actors.

    Args:
        pool: The pool of the actors.
        crew: The actors.
        settings: Arguments of ``Workers``.
    """

    path = "ray"
    are_here = False

    def __init__(self, pool: object, crew: Crew, settings: Settings) -> None:
        super().__init__(pool, crew)
        self._settings = settings

    def while_made(self) -> contextlib.AbstractContextManager[None]:
        # A start on other machines may take long, and needs no lock here.
        return contextlib.nullcontext()

    def transport(
        self,
        loader: TorchLoader,
        options: Options,
        _setup: Setup,
        worker_options: Sequence[WorkerOption],
        features: Sequence[Feature],
    ) -> RayTransport:
        """Makes the transport of one iterator. Its actors begin to start."""
        self._crew.connect()
        return RayTransport(loader, options, worker_options, features, self._pool, self._crew, self._settings)
