"""The main function of a thread that is a worker. MIRRORS torch worker.py::_worker_loop.

torch's own cannot run in a thread: it seeds the process's generators, sets its signal handlers, and notes the
worker for the whole process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ringloader._native as _native
from ringloader._common import whole_errors
from ringloader._threads import collate, worker_info
from ringloader._torch import internals
from ringloader._worker import fetch
from ringloader._worker.fetch import Step


class Work(NamedTuple):
    """What torch's iterator gives each of its workers."""

    dataset_kind: Any
    # The same object in all workers.
    dataset: Any
    auto_collation: bool
    collate_fn: Callable[[Any], Any]
    drop_last: bool
    base_seed: int
    init_fn: Callable[[int], object] | None
    worker: int
    workers: int
    steps: Sequence[Step]

    def make_fetcher(self) -> Any:
        """For an epoch."""
        kind = self.dataset_kind
        torchs: Any = None

        def torchs_fetcher(dataset: Any) -> Any:
            nonlocal torchs
            torchs = internals.create_fetcher(
                kind, dataset, self.auto_collation, self.collate_fn, self.drop_last
            )
            return torchs

        fetcher = self._through_steps(torchs_fetcher)
        # Behind the steps, which look at what the fetcher collates with.
        collate.put_native(torchs)
        return fetcher

    def _through_steps(self, torchs_fetcher: Callable[[Any], Any]) -> Any:
        kind = self.dataset_kind
        if not self.steps:
            return torchs_fetcher(self.dataset)
        begin = [step.begin for step in self.steps if hasattr(step, "begin")]
        return fetch.begun(begin, self.steps, torchs_fetcher, self.dataset, kind == internals.ITERABLE)


def run(queues: _native.ThreadQueues, work: Work) -> None:
    """Answers tasks until it is told to end.

    Raises:
        BaseException: What the dataset raises and is no ``Exception``: the worker ends by it.
    """
    worker = work.worker
    where = f"in DataLoader worker thread {worker}"
    worker_info.note(work.base_seed, worker, work.workers, work.dataset)
    init_exception: Any = None
    try:
        if work.init_fn is not None:
            work.init_fn(worker)
        fetcher = work.make_fetcher()
    except Exception:
        init_exception = internals.ExceptionWrapper(where=where)
    iteration_end = False
    while True:
        message = queues.get(worker)
        if message is None:
            return
        if not isinstance(message, tuple):
            if isinstance(message, internals.ResumeIteration):
                queues.reply(worker, (message, None))
                iteration_end = False
                fetcher = work.make_fetcher()
            else:
                # A call, which answers where it wants to.
                message()
            del message
            continue
        if iteration_end or queues.is_done():
            continue
        task, index = message
        data: Any
        if init_exception is not None:
            data, init_exception = init_exception, None
        else:
            try:
                data = fetcher.fetch(index)
            except Exception as error:
                if isinstance(error, StopIteration) and work.dataset_kind == internals.ITERABLE:
                    data = internals.IterableDatasetStopIteration(worker)
                    iteration_end = True
                else:
                    data = whole_errors.whole(internals.ExceptionWrapper(where=where), is_sent=False)
        queues.reply(worker, (task, data))
        # What the caller has dropped must not live on here until the next task comes.
        del data, task, index, message
