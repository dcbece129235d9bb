"""The worker loop, in processes and in threads. MIRRORS torch worker.py::_worker_loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from ringloader._torch import internals
from ringloader._worker import options as worker_options
from ringloader._worker.options import EpochStart, Fetcher, WorkerOption


class Channel(Protocol):
    """A worker's end of the transport."""

    # True if the worker has the main process's dataset itself.
    shares_dataset: bool

    def get(self) -> Any:
        """Waits for the next message, and makes the calls that come before it.

        Returns:
            A task, which is its number and its index; an :class:`EpochStart`; or None: the worker is to
            end, or its main process has ended.
        """

    def ahead(self) -> Any:
        """Returns the next message in a tuple, before its turn; None if there is none. Never waits."""

    def begin_task(self) -> None:
        """Notes the turn of a task that was taken before it."""

    def put(self, message: tuple[Any, Any], /) -> None:
        """Sends a result: the number of a task and its batch, or an :class:`EpochStart` and None.

        Raises:
            Exception: The error of an object that cannot be sent.
        """

    def is_done(self) -> bool:
        """True once nothing more is wanted of the workers."""

    def failure(self) -> Any:
        """Wraps the error that is being handled, to be a task's result."""


class Work(NamedTuple):
    """The work of one worker: the arguments of torch's ``_worker_loop``, and the options."""

    dataset_kind: Any
    dataset: Any
    auto_collation: bool
    collate_fn: Callable[[Any], Any]
    drop_last: bool
    base_seed: int
    init_fn: Callable[[int], object] | None
    worker: int
    workers: int
    start: EpochStart
    options: Sequence[WorkerOption]


def run(channel: Channel, work: Work, prepare: Callable[[Any], None] | None = None) -> None:
    """Answers tasks until the worker is told to end.

    Args:
        channel: The worker's end of the transport.
        work: The work. ``get_worker_info()`` knows the worker.
        prepare: Called with torch's fetcher of an epoch, before the options get it.

    Raises:
        BaseException: An error of the dataset that is no ``Exception``, or an error where a later epoch
            begins. The worker ends by it.
    """
    dataset, options = work.dataset, work.options
    is_iterable = work.dataset_kind == internals.ITERABLE

    def make(dataset: Any) -> Any:
        made = internals.create_fetcher(
            work.dataset_kind, dataset, work.auto_collation, work.collate_fn, work.drop_last
        )
        if prepare is not None:
            prepare(made)
        return made

    def begin(dataset: Any, start: EpochStart) -> Fetcher:
        if channel.shares_dataset:
            # The main process has told its own dataset already.
            start = dataclasses.replace(start, told=None)
        return worker_options.begin_epoch(options, make, dataset, start, is_iterable)

    init_exception: Any = None
    try:
        if work.init_fn is not None:
            work.init_fn(work.worker)
        fetcher = begin(dataset, work.start)
    except Exception:
        init_exception = channel.failure()
        for option in options:
            option.miss(False)
    has_ended = False
    # For each batch the loop itself is a part of the cost.
    get, put, is_done = channel.get, channel.put, channel.is_done
    while (message := get()) is not None:
        if isinstance(message, EpochStart):
            put((message, None))
            has_ended = False
            dataset = internals.seeded(dataset, message.shared_seed)
            fetcher = begin(dataset, message)
            continue
        if has_ended or is_done():
            continue
        number, index = message
        data: Any
        if init_exception is not None:
            data, init_exception = init_exception, None
        else:
            try:
                data = fetcher.fetch(index)
            except Exception as error:
                if is_iterable and isinstance(error, StopIteration):
                    data = internals.IterableDatasetStopIteration(work.worker)
                    # The next tasks are for an iterator that has ended.
                    has_ended = True
                else:
                    data = channel.failure()
        try:
            put((number, data))
        except Exception:
            put((number, channel.failure()))
        # Objects that the caller has dropped must not live on here until the next task comes.
        del data, index, message
