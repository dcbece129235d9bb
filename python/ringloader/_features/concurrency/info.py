"""The ``get_worker_info()`` of samples that are made at once, with the generators of the one that asks."""

from __future__ import annotations

import contextvars
import random
from typing import Any

import torch
from torch.utils.data import get_worker_info

from ringloader._features import worker_info
from ringloader._log import logger
from ringloader._torch import internals, stand_ins


class _Draws:
    """The generators of one sample, made when it asks for them.

    Args:
        seed: Their seed.
    """

    __slots__ = ("_rng", "_seed")

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._rng: Any = None

    @property
    def rng(self) -> Any:
        if self._rng is None:
            self._rng = worker_info.generators(self._seed, self._seed)
        return self._rng


# The generators of the sample that is made in this context; None: those of its worker.
_draws: contextvars.ContextVar[_Draws | None] = contextvars.ContextVar("ringloader_draws", default=None)


def enter(seed: int | None, info: Any) -> None:
    """Makes this context that of a sample.

    Args:
        seed: Its seed; None: it has none.
        info: The info of its worker; None: that of the process.
    """
    _draws.set(None if seed is None else _Draws(seed))
    if info is not None:
        worker_info.take_over(info)


class SampleInfo(internals.WorkerInfo):  # type: ignore[misc]
    """torch's info of a worker, with the generators of the sample that asks.

    Its ``worker_method`` is ``"thread"``: so torch's functions ask it for generators.
    """

    @property
    def rng(self) -> Any:
        draws = _draws.get()
        return self.__dict__["_own"] if draws is None else draws.rng

    @rng.setter
    def rng(self, own: Any) -> None:
        self.__dict__["_own"] = own


def in_worker() -> Any:
    """Gives this worker an info with the generators of samples, and returns it; None for a process."""
    info: Any = get_worker_info()
    if type(info) is not SampleInfo:
        rng = getattr(info, "rng", None)
        if rng is None:
            rng = worker_info.generators(info.seed, internals.generate_state(info.seed - info.id, info.id))
        info = _made(info.id, info.num_workers, info.seed, info.dataset, rng)
        if not stand_ins.is_in_worker_process():
            worker_info.take_over(info)
        else:
            internals.worker_module._worker_info = info
    return None if info is internals.worker_module._worker_info else info


def without_workers(base_seed: int, dataset: Any) -> Any:
    """Returns the info of samples without workers: worker 0 of 1; None in a worker of another loader."""
    if get_worker_info() is not None:
        return None
    worker_info.put_in_place()
    rng = worker_info.generators(base_seed, internals.generate_state(base_seed, 0))
    return _made(0, 1, base_seed, dataset, rng)


def _made(worker: int, workers: int, seed: int, dataset: Any, rng: Any) -> SampleInfo:
    return SampleInfo(
        id=worker, num_workers=workers, seed=seed, dataset=dataset, rng=rng, worker_method="thread"
    )


def states_of_process() -> Any:
    """Returns the states of the generators that all samples of a process share."""
    return random.getstate(), torch.default_generator.get_state().tolist()


def log_if_drawn(before: Any) -> None:
    """Says that samples have drawn from generators of the process, whose states are no longer as before."""
    if states_of_process() != before:
        logger.warning(
            "worker_concurrency: samples draw from generators of the process, which all of them share, so "
            "seeding='sample' does not make these numbers repeatable; draw from get_worker_info().rng"
        )
