"""``Dispatch``: a dataset whose source one process reads for all workers."""

from __future__ import annotations

import copy
import functools
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import torch.utils.data

from ringloader._features.dispatch import stream
from ringloader._torch import internals

# Makes of an iterator another one.
_Pass = Callable[[Iterator[Any]], Iterator[Any]]


class Dispatch(torch.utils.data.IterableDataset[Any]):
    """An ``IterableDataset`` over a source that cannot be split, such as a socket, a queue or one large file.

    With workers, an additional process reads the source: the dispatching process. It sends each item to
    exactly one worker: item ``k`` to worker ``k % num_workers``. Tensors and arrays travel through shared
    memory; other objects are pickled. The workers apply ``map``, ``filter`` and ``batch`` in the order of the
    calls, and then collate. Without workers, the main process does everything.

    Without ``filter`` and ``batch``, and with ``batch_size=None``, batches have the order of the source.
    Otherwise, runs with the same number of workers have the same order.

    The dispatching process starts and ends with the workers. It calls ``iter(iterable)`` at the start of each
    epoch. If the source raises an error, ``next`` raises it in place of that item's batch, and the
    dispatching process asks the source for the next item. Its random numbers are seeded like those of one
    more worker, and its ``get_worker_info()`` is None.

    Pass the ``Dispatch`` itself to the loader as ``dataset``, not inside another dataset. With workers,
    torch's own loader raises an error: use ``ringloader.DataLoader``, ``install`` or ``convert``.

    Args:
        iterable: The source. It must be picklable, unless workers are forked. Workers get no copy of it.
        prefetch: The most items that wait for each worker (default: 16). Their memory is at most
            ``max_shared_bytes``, in addition to the memory of batches.

    Raises:
        TypeError: If ``iterable`` is not iterable, or ``prefetch`` is not an integer.
        ValueError: If ``prefetch`` is not positive.
    """

    # Loaders with workers look for the feature of that name.
    _ringloader_needs = "Dispatch"

    def __init__(self, iterable: Iterable[Any], *, prefetch: int = 16) -> None:
        if not hasattr(type(iterable), "__iter__") and not hasattr(type(iterable), "__getitem__"):
            raise TypeError(f"Dispatch needs an iterable, not an object of type {type(iterable).__name__}")
        _check_count("prefetch", prefetch)
        self._source: Iterable[Any] = iterable
        self._prefetch = prefetch
        self._passes: tuple[_Pass, ...] = ()
        # True if there are as many items as the source has.
        self._keeps_count = True
        # The name of a pass that may drop items, so that workers take them at different rates; None without.
        self._uneven: str | None = None
        # The key with which a worker finds what its dispatching process sends, also for a copy or a pickle.
        self._key = uuid.uuid4().hex

    def map(self, fn: Callable[[Any], Any]) -> Self:
        """Returns a `Dispatch` whose workers replace each item by ``fn(item)``."""
        _check_callable("map", fn)
        return self._with(functools.partial(map, functools.partial(_called, "map", fn)))

    def filter(self, fn: Callable[[Any], Any]) -> Self:
        """Returns a `Dispatch` whose workers drop each item for which ``fn`` returns false.

        With several workers, the loader needs ``in_order=False``. To keep the order, filter in the source.
        """
        _check_callable("filter", fn)
        one = functools.partial(filter, functools.partial(_called, "filter", fn))
        return self._with(one, keeps_count=False, uneven="filter()")

    def batch(self, n: int, *, drop_last: bool = False) -> Self:
        """Returns a `Dispatch` whose workers make a list of each ``n`` successive items.

        The last list of each worker may be shorter; ``drop_last`` drops it. Use it with ``batch_size=None``:
        ``collate_fn`` then gets the list.

        Raises:
            TypeError: If ``n`` is not an integer.
            ValueError: If ``n`` is not positive.
        """
        _check_count("n", n)
        return self._with(functools.partial(_Batches, n=n, drop_last=drop_last), keeps_count=False)

    def _with(self, one: _Pass, *, keeps_count: bool = True, uneven: str | None = None) -> Self:
        made = copy.copy(self)
        made._passes = (*self._passes, one)
        made._keeps_count = self._keeps_count and keeps_count
        made._uneven = self._uneven or uneven
        made._key = uuid.uuid4().hex
        return made

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        items = iter(self._source) if info is None else stream.items_for(self._key, info.id)
        for one in self._passes:
            items = one(items)
        return items

    def __len__(self) -> int:
        if not self._keeps_count:
            raise TypeError("the length is not known before filter and batch have run")
        return len(self._source)  # type: ignore[arg-type]


def without_source(dataset: Dispatch) -> Dispatch:
    """Returns a copy for a worker, which does not read the source."""
    made = copy.copy(dataset)
    made._source = ()
    return made


def are_in_turn(workers: int, in_order: bool) -> bool:
    """True if workers wait for each other: batches come in order, or tasks go to the workers in turn."""
    return workers > 1 and (in_order or not internals.counts_tasks_per_worker())


def check_rates(dataset: Dispatch, workers: int, in_order: bool) -> None:
    """Checks that workers which wait for each other take items at the same rate.

    Raises:
        ValueError: If the dataset may drop items. A full worker would keep an item from one that needs it.
    """
    if dataset._uneven is None or not are_in_turn(workers, in_order):
        return
    remedy = "pass in_order=False" if internals.counts_tasks_per_worker() else "use one worker"
    raise ValueError(
        f"a Dispatch with {dataset._uneven} and in_order={in_order} do not go together with {workers} "
        "workers: each may need another number of items for a batch, and they would wait for each other; "
        f"{remedy}, or filter in the source"
    )


class _Batches:
    """Lists of items. Continues after an error, as `map` does."""

    def __init__(self, items: Iterator[Any], *, n: int, drop_last: bool) -> None:
        self._items = items
        self._n = n
        self._drop_last = drop_last

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> list[Any]:
        found: list[Any] = []
        for item in self._items:
            found.append(item)
            if len(found) == self._n:
                return found
        if not found or self._drop_last:
            raise StopIteration
        return found


def _called(where: str, fn: Callable[[Any], Any], item: Any) -> Any:
    try:
        return fn(item)
    except StopIteration as error:
        # To the loader that would be the end of this worker's items.
        raise RuntimeError(f"the function of Dispatch.{where} raised StopIteration") from error


def _check_callable(where: str, fn: object) -> None:
    if not callable(fn):
        raise TypeError(f"Dispatch.{where} needs a function, and {fn!r} cannot be called")


def _check_count(name: str, count: object) -> None:
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"{name} must be an int, not {count!r}")
    if count < 1:
        raise ValueError(f"{name} must be at least 1, not {count}")
