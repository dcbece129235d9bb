"""The main process's end of a transport, as iterators use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ringloader._options.watchdog import Watchdog
from ringloader._worker.loop import Resume, Work
from ringloader._worker.options import WorkerOption


class Transport(Protocol):
    """Tasks to the workers of one iterator, and their results.

    A worker is known by its number. Its handle is what ``iterator._workers`` lists: a process object of
    ``multiprocessing``, or an object with the same methods.

    Attributes:
        sound: False once an iteration has ended as it should not.
        watchdog: Describes late batches; None without ``watchdog`` and ``timeout``.
        options: The options that workers ask.
    """

    sound: bool
    watchdog: Watchdog | None
    options: Sequence[WorkerOption]

    @property
    def engine(self) -> Any:
        """The native end."""

    @property
    def scheduler(self) -> Any:
        """The class of the native scheduler for this end."""

    def start(self, work: Work) -> Any:
        """Starts the worker of ``work``, with the options of the transport, and returns its handle.

        Raises:
            BaseException: An error of the start. No worker runs then.
        """

    def send(self, worker: int, message: Resume | None) -> None:
        """Sends a message behind the tasks of a worker: None to end it. Never waits."""

    def has_been_ended(self, worker: int) -> bool:
        """True once a worker was told to end."""

    def end(self, workers: Sequence[Any], told: Callable[[int], bool]) -> None:
        """Ends workers, and waits for their ends as long as torch does.

        Args:
            workers: Their handles.
            told: True for a worker that is still to be told.
        """

    def error_of_lost(self, worker: int, handle: Any, in_hand: Any, *notes: str) -> RuntimeError:
        """Returns the error for a worker that has ended and should not have.

        Args:
            worker: The worker.
            handle: Its handle.
            in_hand: The worker, its task and the index of that; None if that is not known.
            *notes: Notes for the error.
        """

    def is_inherited(self) -> bool:
        """True in a forked child of the process that made it."""

    def begin_epoch(self) -> None:
        """Begins another epoch of the same workers, before they are told."""

    def counters(self) -> Mapping[str, int]:
        """Returns what a report counts of this epoch."""

    def close(self, may_keep: bool = False) -> None:
        """Gives back memory and descriptors, once the workers have ended.

        Args:
            may_keep: True if another iterator of the loader may find some of the memory warm.
        """
