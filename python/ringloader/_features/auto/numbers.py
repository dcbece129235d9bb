"""The numbers of workers between which ``num_workers="auto"`` decides, and the decision of each loader."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ringloader._common import weak_registry
from ringloader._common.proc import local_world_size
from ringloader._features.auto import FoundNumber
from ringloader._features.auto.controller import Controller
from ringloader._features.cores import cores
from ringloader._features.rules import AUTO
from ringloader._features.table import has_options
from ringloader._torch import internals, select_path

if TYPE_CHECKING:
    from ringloader._features.table import Options
    from ringloader._torch.protocols import TorchLoader

# The workers for each processor where they wait, and the most of them all together.
_TIMES, _MOST = 4, 64

_controllers: weak_registry.WeakRegistry[Controller] = weak_registry.WeakRegistry()


def bound() -> int:
    """Returns the most workers for work that needs processors.

    One processor is left to the caller where this process of the job has more than two.
    """
    own = cores() // local_world_size()
    return max(own - 1 if own > 2 else own, 1)


def most() -> int:
    """Returns the most workers for work that waits."""
    return max(bound(), min(_TIMES * bound(), _MOST))


def reason_for_one() -> str | None:
    """Returns why a loader has one worker on a machine with more processors, if that is OpenMP's doing."""
    value, there = os.environ.get("OMP_PROC_BIND", ""), os.cpu_count() or 1
    if value.lower() in ("", "0", "false") or cores() > 1 or there == 1:
        return None
    return (
        f"num_workers='auto' has one worker, or some more that wait: OMP_PROC_BIND={value} binds this "
        f"process to 1 of {there} processors; unset it, or pass a number"
    )


class Pool(Protocol):
    """A pool of workers."""

    @property
    def num_workers(self) -> int:
        """The most that a loader may have."""


class Limits(NamedTuple):
    """The most workers of a loader.

    Attributes:
        bound: For work that needs processors.
        most: For work that waits.
    """

    bound: int
    most: int


def limits(pool: Pool | None) -> Limits:
    """Returns the limits of a loader, whose workers may come from a pool."""
    found = Limits(bound(), most())
    return found if pool is None else Limits(*(min(number, pool.num_workers) for number in found))


def controller_of(loader: object, limits: Limits) -> Controller:
    """Returns the controller of a loader's iterator. It continues from the last one that was made."""
    found = _controllers.get(loader)
    # Several iterators may run at once, each with workers of its own.
    found = Controller(*limits) if found is None else copy.deepcopy(found)
    # There may be fewer processors than before, or a smaller pool.
    found.bound, found.most = min(found.bound, limits.bound), min(found.most, limits.most)
    found.number = min(found.number, found.most)
    _controllers.put(loader, found)
    return found


def show(loader: object, number: int) -> None:
    """Makes ``loader.num_workers`` the number of workers that run."""
    vars(loader)["num_workers"] = FoundNumber(number)


def arguments_for(loader: TorchLoader, options: Options, workers: int) -> dict[str, Any]:
    """Returns the ``num_workers`` of a loader that finds its number, or found it before. It starts over."""
    _controllers.pop(loader)
    if options.num_workers == AUTO:
        return {"num_workers": FoundNumber(limits(options.worker_pool).bound)}
    return {"num_workers": int(workers)} if isinstance(workers, FoundNumber) else {}


def bound_for(loader: TorchLoader, options: Options) -> int:
    """Returns the bound of an iterator that finds its number of workers.

    A loader that was made or converted shows it. One that ``install`` reached keeps the program's number.
    """
    # A worker process may have no children.
    workers = 0 if internals.is_in_worker() else limits(options.worker_pool).bound
    if workers == 1 and (why := reason_for_one()):
        select_path.log_once(why)
    if has_options(loader):
        show(loader, workers)
    return workers
