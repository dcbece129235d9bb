"""`Sharded`: a source that every process can read, dealt out to ranks and workers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch.utils.data

from ringloader._common import proc
from ringloader._common.attributes import has_method

_UNEVEN = ("keep", "drop", "pad")


class Sharded(torch.utils.data.IterableDataset[Any]):
    """An ``IterableDataset`` that gives each rank and worker its own part of a source.

    The source is divided into ``num_replicas * num_workers`` shards, in turns: item ``k`` belongs to shard
    ``k % (num_replicas * num_workers)``. Worker ``w`` of rank ``r`` reads shard ``w * num_replicas + r``. So
    the items of a rank do not depend on its number of workers. They are the same as with
    ``DistributedSampler`` without ``shuffle``.

    Each worker reads the whole source, and drops the items of other shards. If the source has a method
    ``shard(n, i)``, each worker iterates only its result, and the source decides which items belong to a
    shard. The source must return the same items in each process.

    Any loader can read it, torch's too, with and without workers. It may be inside another dataset.

    Args:
        iterable: The source.
        uneven: The rule if the number of items is not a multiple of the number of shards:

            - ``"keep"``: some shards have one item more.
            - ``"drop"``: the last ``n % shards`` items are dropped. A round has one item for each shard. A
              shard gives its item once the source has filled the round.
            - ``"pad"``: shards without an item in the last round get one of the first items again, in order,
              as in ``DistributedSampler``. For this, each shard keeps first items of the source in memory, at
              most one for each shard.

            With ``"drop"`` and ``"pad"``, all ranks have the same number of batches.
        num_replicas: The number of ranks. Default: the number of ``torch.distributed``, if it is initialized
            when the dataset is read or pickled; otherwise 1.
        rank: This rank. Default: the rank of ``torch.distributed``, as for ``num_replicas``; otherwise 0.

    Raises:
        TypeError: If ``iterable`` is not iterable.
        ValueError: If ``uneven`` has another value, or is not ``"keep"`` and the source has ``shard``; if
            only one of ``num_replicas`` and ``rank`` is given; if ``rank`` is not below ``num_replicas``.
    """

    def __init__(
        self,
        iterable: Iterable[Any],
        *,
        uneven: Literal["keep", "drop", "pad"] = "keep",
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        if not hasattr(type(iterable), "__iter__") and not hasattr(type(iterable), "__getitem__"):
            raise TypeError(f"Sharded needs an iterable, not an object of type {type(iterable).__name__}")
        if uneven not in _UNEVEN:
            raise ValueError(f"uneven must be one of {', '.join(map(repr, _UNEVEN))}, not {uneven!r}")
        self._shards_itself = has_method(iterable, "shard")
        if self._shards_itself and uneven != "keep":
            raise ValueError(
                f"uneven={uneven!r} is for items that are dealt out one by one, and the source has its own "
                "shard(): use uneven='keep'"
            )
        if (num_replicas is None) != (rank is None):
            raise ValueError(
                f"num_replicas={num_replicas} and rank={rank} go together: give both, or neither"
            )
        if num_replicas is not None and rank is not None and not 0 <= rank < num_replicas:
            raise ValueError(
                f"rank={rank} must be from 0 to {num_replicas - 1}, for num_replicas={num_replicas}"
            )
        self._source = iterable
        self._uneven = uneven
        self._place = None if num_replicas is None else (num_replicas, rank or 0)

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker has no process group.
        return {**vars(self), "_place": self._replicas_and_rank()}

    def _replicas_and_rank(self) -> tuple[int, int]:
        if self._place is not None:
            return self._place
        rank, replicas = proc.in_group() or (0, 1)
        return replicas, rank

    def __iter__(self) -> Iterator[Any]:
        replicas, rank = self._replicas_and_rank()
        info = torch.utils.data.get_worker_info()
        workers, worker = (1, 0) if info is None else (info.num_workers, info.id)
        shards, shard = replicas * workers, worker * replicas + rank
        if self._shards_itself:
            return iter(self._source.shard(shards, shard))  # type: ignore[attr-defined]
        if self._uneven == "keep":
            return itertools.islice(self._source, shard, None, shards)
        deal = _padded if self._uneven == "pad" else _dropped
        return deal(self._source, shards, shard)

    def __len__(self) -> int:
        if self._uneven != "keep":
            raise TypeError(f"with uneven={self._uneven!r} the length depends on the number of workers")
        replicas, rank = self._replicas_and_rank()
        if self._shards_itself and replicas > 1:
            raise TypeError("only the source's shard() knows how many items a rank has")
        return len(range(rank, len(self._source), replicas))  # type: ignore[arg-type]


def _dropped(source: Iterable[Any], shards: int, shard: int) -> Iterator[Any]:
    own = None
    for number, item in enumerate(source):
        place = number % shards
        if place == shard:
            own = item
        if place == shards - 1:
            yield own
            own = None


def _padded(source: Iterable[Any], shards: int, shard: int) -> Iterator[Any]:
    first = []
    total = 0
    for number, item in enumerate(source):
        total = number + 1
        # No shard is filled with one that comes later.
        if number < shard:
            first.append(item)
        if number % shards == shard:
            yield item
    last = total % shards
    if 0 < last <= shard:
        yield first[(shard - last) % min(total, shards)]
