"""``DataLoader.call_workers`` where workers are threads: nothing is sent, and nothing copied."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import get_worker_info

from ringloader._torch import internals

# Seconds after which it looks again if a worker that has not answered still lives.
_LOOK_SECONDS = 0.1


def asked(
    workers: Sequence[Any], function: Callable[..., Any], args: tuple[Any, ...], timeout: float | None
) -> list[Any]:
    """Returns, for each worker in order, what ``function`` returned, or torch's wrapper of what it raised.

    Args:
        workers: Transport, number and thread of each.
        function: Called with the dataset and ``args``.
        args: Its further arguments.
        timeout: Seconds that it may take; None for no limit.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    for number, worker in enumerate(workers):
        worker.transport.call(worker.number, _Call(function, args, number, answers))
    found: dict[int, Any] = {}
    while len(found) < len(workers):
        # Before the look: what a worker said before it ended is there then.
        lost = [number for number, worker in enumerate(workers) if not worker.handle.is_alive()]
        left = _LOOK_SECONDS if deadline is None else min(_LOOK_SECONDS, deadline - time.monotonic())
        try:
            number, answer = answers.get(timeout=max(left, 0.0))
        except queue.Empty:
            missing = [str(number) for number in range(len(workers)) if number not in found]
            if any(number not in found for number in lost):
                raise RuntimeError(
                    f"DataLoader worker thread(s) {', '.join(missing)} ended, and call_workers() has no "
                    "answer of theirs"
                ) from None
            if deadline is not None and time.monotonic() >= deadline:
                raise RuntimeError(
                    f"DataLoader timed out after {timeout} seconds: call_workers() has no answer of "
                    f"worker(s) {', '.join(missing)}"
                ) from None
            continue
        found[number] = answer
    return [found[number] for number in range(len(workers))]


class _Call:
    """Among the tasks of a worker."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        number: int,
        answers: queue.SimpleQueue[tuple[int, Any]],
    ) -> None:
        self._function = function
        self._args = args
        self._number = number
        self._answers = answers

    def __call__(self) -> None:
        info = get_worker_info()
        assert info is not None
        try:
            answer = self._function(info.dataset, *self._args)
        except Exception:
            answer = internals.ExceptionWrapper(where=f"in DataLoader worker thread {info.id}")
        self._answers.put((self._number, answer))
