"""The ``get_worker_info()`` of a thread that is a worker, or works for one, and its generators."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch

from ringloader._torch import internals, stand_ins

# The info of the process, and that of the worker for which this context works; None: it works for none.
# A new thread has a context of its own, and the coroutines and threads of `asyncio` have copies.
_noted: contextvars.ContextVar[tuple[Any, Any] | None] = contextvars.ContextVar(
    "ringloader_info", default=None
)
# True once `get_worker_info` asks for it.
_is_put = False
_starting = threading.Lock()


def _begin_anew() -> None:
    # In a forked child no thread starts a worker.
    global _starting
    _starting = threading.Lock()


# Other systems have no fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


@dataclasses.dataclass(frozen=True, slots=True)
class RNG:
    """Generators of a worker's own. MIRRORS torch worker.py::_RNG, for versions that have none."""

    random_generator: random.Random
    torch_generator: torch.Generator
    numpy_generator: numpy.random.Generator | None = None


def put_in_place() -> None:
    """Makes torch's ``get_worker_info`` look at the thread too, from now on. Changes nothing else.

    In such a thread torch's collation, and others', would allocate shared memory: there it is private.
    """
    global _is_put
    with _starting:
        if not _is_put:
            stand_ins.replace_worker_info(_of_thread)
            stand_ins.replace_new_shared(_private_in_threads)
            _is_put = True


def take_over(info: Any) -> None:
    """Makes this context work for a worker that is no process, with its info."""
    _noted.set((internals.worker_module._worker_info, info))


def generators(seed: int, numpy_seed: Any) -> Any:
    """Returns generators with a seed, that of numpy with another one."""
    return (internals.RNG or RNG)(
        random_generator=random.Random(seed),
        torch_generator=torch.Generator().manual_seed(seed),
        numpy_generator=numpy.random.default_rng(numpy_seed),
    )


@contextlib.contextmanager
def threads_put_back() -> Iterator[None]:
    """Lets a block start a thread that calls ``use_one_thread``, and waits until it has.

    One at a time: a caller that has not asked before would take another's worker's number for its own, and
    leave it to all threads that begin later.
    """
    with _starting:
        threads = torch.get_num_threads()
        yield
        # The number that a thread sets is that of all which begin later too.
        torch.set_num_threads(threads)


def use_one_thread() -> None:
    """Makes the operators that this thread calls use one thread, as in a worker process."""
    # A thread takes the number of all threads when it first asks, or works: before, not after.
    torch.get_num_threads()
    torch.set_num_threads(1)


def _of_thread(of_process: Any) -> Any:
    found = _noted.get()
    # A process that was forked by the thread, and became a worker of torch's, is that worker.
    return of_process if found is None or found[0] is not of_process else found[1]


def _private_in_threads(torchs_own: Callable[..., Any]) -> Callable[..., Any]:
    def _new_shared(cls: Any, size: int, *, device: Any = "cpu") -> Any:
        info = torch.utils.data.get_worker_info()
        is_threads = info is not None and (_noted.get() or (None, None))[1] is info
        if is_threads and torch.device(device).type == "cpu":
            return cls(size)
        return torchs_own(cls, size, device=device)

    return _new_shared
