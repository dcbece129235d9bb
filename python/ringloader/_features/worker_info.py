"""The ``get_worker_info()`` of threads that are workers, and of samples that are made at once.

Its generators are those of the worker, or of the sample that asks.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch.utils.data import get_worker_info

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


# Makes the generators of the sample of this context when it first asks; None: it has those of its worker.
_draws: contextvars.ContextVar[Callable[[], Any] | None] = contextvars.ContextVar(
    "ringloader_draws", default=None
)


def enter(seed: int | None, info: Any) -> None:
    """Makes this context that of a sample.

    Args:
        seed: Its seed; None: it has none.
        info: The info of its worker; None: that of the process.
    """
    _draws.set(None if seed is None else functools.cache(functools.partial(generators, seed, seed)))
    if info is not None:
        take_over(info)


class SampleInfo(internals.WorkerInfo):  # type: ignore[misc]
    """torch's info of a worker, with the generators of the sample that asks.

    Its ``worker_method`` is ``"thread"``: so torch's functions ask it for generators.
    """

    @property
    def rng(self) -> Any:
        draws = _draws.get()
        return self.__dict__["_own"] if draws is None else draws()

    @rng.setter
    def rng(self, own: Any) -> None:
        self.__dict__["_own"] = own


def of_samples() -> Any:
    """Gives this worker an info with the generators of samples, and returns it; None for a process."""
    info: Any = get_worker_info()
    if type(info) is not SampleInfo:
        rng = getattr(info, "rng", None)
        if rng is None:
            rng = generators(info.seed, internals.generate_state(info.seed - info.id, info.id))
        info = _made(info.id, info.num_workers, info.seed, info.dataset, rng)
        if not stand_ins.is_in_worker_process():
            take_over(info)
        else:
            internals.worker_module._worker_info = info
    return None if info is internals.worker_module._worker_info else info


def without_workers(base_seed: int, dataset: Any) -> Any:
    """Returns the info of samples without workers: worker 0 of 1; None in a worker of another loader."""
    if get_worker_info() is not None:
        return None
    put_in_place()
    rng = generators(base_seed, internals.generate_state(base_seed, 0))
    return _made(0, 1, base_seed, dataset, rng)


def _made(worker: int, workers: int, seed: int, dataset: Any, rng: Any) -> SampleInfo:
    return SampleInfo(
        id=worker, num_workers=workers, seed=seed, dataset=dataset, rng=rng, worker_method="thread"
    )
