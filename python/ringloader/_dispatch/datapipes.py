"""IterDataPipes with `sharding_round_robin_dispatch`, as a `Dispatch`.

torchdata's pipes up to version 0.9 have it. Their class is known by its name: torchdata need not be there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch.utils.data
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import apply_sharding

from ringloader._common import ranks
from ringloader._dispatch.dataset import Dispatch

_METHOD = "sharding_round_robin_dispatch"
_DISPATCHER = "ShardingRoundRobinDispatcherIterDataPipe"


def translated(dataset: Any) -> Any:
    """The dataset, or a `Dispatch` that is equal to it: an IterDataPipe that dispatches.

    Raises:
        ValueError: If the pipe cannot be translated, with what stands in the way.
    """
    # Not issubclass, which takes longer: each new loader asks.
    if torch.utils.data.IterDataPipe not in type(dataset).__mro__ or _METHOD not in dataset.functions:
        return dataset
    found: dict[int, Any] = {}
    others: dict[int, Any] = {}
    _find(traverse_dps(dataset), found, others)
    if not found:
        return dataset
    if len(found) > 1:
        raise ValueError(f"{len(found)} pipes {_METHOD}(): one loader has one dispatching process. Use one")
    (dispatcher,) = found.values()
    if others:
        names = ", ".join(sorted(type(one).__name__ for one in others.values()))
        raise ValueError(
            f"{names} is read beside {_METHOD}(), so each worker would read all of it: move {_METHOD}() "
            "after the pipe in which they meet"
        )
    source = dispatcher.source_datapipe
    nested: dict[int, Any] = {}
    _find(traverse_dps(source), nested, {})
    if nested:
        raise ValueError(f"one {_METHOD}() is read through another: remove the inner one")
    group = ranks.in_group()
    if group is not None:
        # torch's iterator shards too. Workers take no part in it: they have other items already.
        rank, world_size = group
        apply_sharding(source, world_size, rank)
    received = _Received()
    # The workers get a copy of the pipes after the dispatcher, and share none with the caller.
    behind = copy.deepcopy(dataset, {id(dispatcher): received})
    return Dispatch(source)._with(_Behind(behind, received), keeps_count=False)


def _find(graph: Any, found: dict[int, Any], others: dict[int, Any]) -> None:
    """Puts the pipes that dispatch into ``found``, and sources that none of them reads into ``others``."""
    for key, (pipe, inputs) in graph.items():
        if type(pipe).__name__ == _DISPATCHER:
            found[key] = pipe
        elif inputs:
            _find(inputs, found, others)
        else:
            others[key] = pipe


class _Received(torch.utils.data.IterDataPipe[Any]):
    """Stands for the pipe that dispatches, in a worker: gives what was sent to the worker."""

    def __init__(self) -> None:
        self._items: Iterator[Any] = iter(())

    def receive(self, items: Iterator[Any]) -> None:
        """Takes the items to give in the epoch that begins."""
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        yield from self._items

    def __reduce__(self) -> tuple[Any, ...]:
        return _Received, ()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self.__reduce__()


class _Behind:
    """The pipes after the one that dispatches."""

    def __init__(self, pipes: Any, received: _Received) -> None:
        self._pipes = pipes
        self._received = received

    def __call__(self, items: Iterator[Any]) -> Iterator[Any]:
        self._received.receive(items)
        return iter(self._pipes)
