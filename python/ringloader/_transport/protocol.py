"""The main process's end of a transport, as iterators use it, and the part that all transports share."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import ringloader._native as _native
from ringloader._common.protocols import Handle
from ringloader._transport.overdue import LostWorker
from ringloader._worker.loop import Work
from ringloader._worker.options import EpochStart, WorkerOption, in_order

if TYPE_CHECKING:
    from ringloader._common.protocols import PathName


class Counters:
    """The counts of a transport's epoch, for a report. They lead to no object of the user's.

    A report lives as long as its loader: an option of a worker may be a method of the loader's owner.

    Args:
        count: Returns the counts with their names, until :meth:`finish`.
    """

    def __init__(self, count: Callable[[], Iterable[tuple[str, int]]]) -> None:
        self._count = count
        self._final: dict[str, int] | None = None

    def __call__(self) -> dict[str, int]:
        """Returns what a report counts of this epoch."""
        return dict(self._count() if self._final is None else self._final)

    @property
    def are_final(self) -> bool:
        """True once they are counted no further."""
        return self._final is not None

    def finish(self) -> None:
        """Keeps the counts as they are, before the engine closes."""
        self._final = self()


class Transport(abc.ABC):
    """Tasks to the workers of one iterator, and their results.

    A worker is known by its number. Its handle is what ``iterator._workers`` lists: a process object of
    ``multiprocessing``, or an object with the same methods.

    Args:
        engine: The native end.
        options: The options that workers ask.
        features: The features that are on. The transport closes them.

    Attributes:
        path: The path of its iterators, as a report names it.
        about: The path in words.
        counters: Returns what a report counts of this epoch.
        sound: False once an iteration has ended as it should not.
        scheduled: The native end that the scheduler uses.
        scheduler: The class of the native scheduler for this end.
        joint_tasks: Returns the most tasks that may be out, for a number of workers that share all of them;
            None where each task is one worker's.
    """

    joint_tasks: Callable[[int], int] | None = None

    # An attribute: an iterator that lives on while modules are torn down finds their names None.
    _process_identity = staticmethod(_native.process_identity)
    path: PathName
    about: str
    scheduler: Any

    def __init__(self, engine: Any, options: Sequence[WorkerOption], features: Sequence[Any]) -> None:
        self.engine = self.scheduled = engine
        self.options = options
        self._features = features
        self.sound = True
        self._owner = self._process_identity()
        self._ended: set[int] = set()
        self.counters = Counters(engine.counters)

    def add(self, *options: WorkerOption) -> None:
        """Adds options that workers ask, before they start."""
        self.options = in_order(*self.options, *options)

    @abc.abstractmethod
    def start(self, work: Work) -> Any:
        """Starts the worker of ``work``, with the options of the transport, and returns its handle.

        Raises:
            BaseException: An error of the start. No worker runs then.
        """

    @abc.abstractmethod
    def start_later(self, work: Work) -> Any:
        """Starts a worker while others run, and returns its handle.

        It never ran, or has ended, and its results were taken. Tasks without an answer must be sent again.

        Raises:
            BaseException: An error of the start. No worker runs then.
        """

    def send(self, worker: int, message: EpochStart | None) -> None:
        """Sends a message after the tasks of a worker: None to end it. Never waits."""
        self.engine.put(worker, message)
        if message is None:
            self._ended.add(worker)

    def has_been_ended(self, worker: int) -> bool:
        """True once a worker was told to end."""
        return worker in self._ended

    def has_left(self, _worker: int, handle: Handle) -> bool:
        """True once a worker that was told to end has ended, or has left the memory."""
        return not handle.is_alive()

    def retire(self, worker: int, handle: Handle) -> None:  # noqa: B027
        """Notes that a worker has left, and that all its results were taken."""

    @abc.abstractmethod
    def end(self, workers: Sequence[Any], told: Callable[[int], bool]) -> None:
        """Ends workers, and waits for their ends as long as torch does.

        Args:
            workers: Their handles.
            told: True for a worker that is still to be told.
        """

    @abc.abstractmethod
    def error_of_lost(self, worker: int, handle: Any, in_hand: Any, *notes: str) -> RuntimeError:
        """Returns the error for a worker that has ended and should not have.

        Args:
            worker: The worker.
            handle: Its handle.
            in_hand: The worker, its task and the index of that; None if that is not known.
            *notes: Notes for the error.
        """

    def schedule(self, scheduler: Any) -> None:  # noqa: B027
        """Sets up the scheduler, before its first task."""

    def lost(self, lost: LostWorker) -> Any:
        """Returns the handle of a lost worker's successor, which runs; None if there may be none."""
        return next(filter(None, (feature.lost(lost) for feature in self._features)), None)

    def is_inherited(self) -> bool:
        """True in a forked child of the process that made it."""
        return self._process_identity() != self._owner

    def begin_epoch(self) -> None:
        """Begins another epoch of the same workers, before they are told."""
        self.engine.begin_epoch()

    @abc.abstractmethod
    def close(self, may_keep: bool = False) -> None:
        """Gives back memory and descriptors, once the workers have ended.

        Args:
            may_keep: True if another iterator of the loader may find some of the memory warm.
        """

    def _begin_close(self) -> bool:
        """Returns True if there is something to close: not again, and not for a forked child."""
        if self.counters.are_final or self.is_inherited():
            return False
        self.counters.finish()
        return True

    def _close_features(self) -> None:
        for feature in self._features:
            feature.close()
