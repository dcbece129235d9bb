"""The result of ``get_worker_info()`` in a thread that is a worker, and what torch does by it."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy
import torch

from ringloader._torch import internals, stand_ins


@dataclasses.dataclass(frozen=True, slots=True)
class RNG:
    """Generators of a worker's own. MIRRORS torch worker.py::_RNG, for versions that have none."""

    random_generator: random.Random
    torch_generator: torch.Generator
    numpy_generator: numpy.random.Generator | None = None


_local = threading.local()
_lock = threading.Lock()
_is_put = False


def put_in_place() -> None:
    """Has torch's ``get_worker_info``, from now on, ask for the thread too. Nothing else is changed by it.

    In such a thread torch's collation, and others', would allocate shared memory: there it is private.
    """
    global _is_put
    with _lock:
        if not _is_put:
            stand_ins.replace_worker_info(_of_thread)
            stand_ins.replace_new_shared(_private_in_threads)
            _is_put = True


def note(base_seed: int, worker: int, workers: int, dataset: Any) -> None:
    """Makes this thread a worker, with torch's seeds for its number, until the thread ends."""
    outside = torch.utils.data.get_worker_info()
    seed = base_seed + worker
    # torch's word for a worker with generators of its own, which `torch.thread_safe_generator` asks for too.
    info = internals.WorkerInfo(
        id=worker,
        num_workers=workers,
        seed=seed,
        dataset=dataset,
        rng=_generators(base_seed, worker, seed),
        worker_method="thread",
    )
    _local.noted = (outside, info)


def _generators(base_seed: int, worker: int, seed: int) -> Any:
    return (internals.RNG or RNG)(
        random_generator=random.Random(seed),
        torch_generator=torch.Generator().manual_seed(seed),
        numpy_generator=numpy.random.default_rng(internals.generate_state(base_seed, worker)),
    )


def _of_thread(of_process: Any) -> Any:
    noted = getattr(_local, "noted", None)
    # A process that was forked by the thread, and became a worker of torch's, is that worker.
    return of_process if noted is None or noted[0] is not of_process else noted[1]


def _private_in_threads(torchs_own: Callable[..., Any]) -> Callable[..., Any]:
    def _new_shared(cls: Any, size: int, *, device: Any = "cpu") -> Any:
        info = torch.utils.data.get_worker_info()
        is_threads = info is not None and getattr(_local, "noted", (None, None))[1] is info
        if is_threads and torch.device(device).type == "cpu":
            return cls(size)
        return torchs_own(cls, size, device=device)

    return _new_shared
