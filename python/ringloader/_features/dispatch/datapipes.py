"""IterDataPipes with `sharding_round_robin_dispatch`, as a `Dispatch`.

torchdata's pipes up to version 0.9 have it. Their class is known by its name: torchdata need not be there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch.utils.data
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import apply_sharding

from ringloader._common import proc
from ringloader._features.dispatch import Dispatch, check_rates

_METHOD = "sharding_round_robin_dispatch"
# Pipes after which each worker still takes as many items for a batch as the others.
_EVEN = {
    "BatcherIterDataPipe",
    "CollatorIterDataPipe",
    "EnumeratorIterDataPipe",
    "MapperIterDataPipe",
    "PinMemoryIterDataPipe",
    "PrefetcherIterDataPipe",
    "ShardingFilterIterDataPipe",
    "ShufflerIterDataPipe",
    "ZipperIterDataPipe",
    "_ChildDataPipe",
    "_ForkerIterDataPipe",
}
_DISPATCHER = "ShardingRoundRobinDispatcherIterDataPipe"


def translated(dataset: Any, arguments: Mapping[str, Any]) -> Any:
    """Returns the dataset of a new loader, or for an IterDataPipe that dispatches a `Dispatch` equal to it.

    Args:
        dataset: The dataset.
        arguments: The other arguments of torch's constructor.

    Raises:
        ValueError: If the pipe cannot be translated, with what stands in the way; if workers would take items
            at different rates, and wait for each other.
    """
    # Not issubclass, which takes longer: each new loader asks.
    classes = type(dataset).__mro__
    if torch.utils.data.IterDataPipe in classes and _METHOD in dataset.functions:
        dataset = _dispatch_of(dataset)
    elif Dispatch not in classes:
        return dataset
    workers = arguments.get("num_workers", 0)
    if isinstance(dataset, Dispatch) and isinstance(workers, int):
        check_rates(dataset, workers, arguments.get("in_order", True))
    return dataset


def _dispatch_of(dataset: Any) -> Any:
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
            f"{names} is read in addition to {_METHOD}(), so each worker would read all of it: move "
            f"{_METHOD}() after the pipe in which they meet"
        )
    source = dispatcher.source_datapipe
    nested: dict[int, Any] = {}
    _find(traverse_dps(source), nested, {})
    if nested:
        raise ValueError(f"one {_METHOD}() is read through another: remove the inner one")
    group = proc.in_group()
    if group is not None:
        # torch's iterator shards too. Workers take no part in it: they have other items already.
        rank, world_size = group
        apply_sharding(source, world_size, rank)
    received = _Received()
    # The workers get a copy of the pipes after the dispatcher, and share none with the caller.
    behind = copy.deepcopy(dataset, {id(dispatcher): received})
    uneven = sorted(_names(traverse_dps(dataset), dispatcher) - _EVEN)
    made = Dispatch(source)
    return made._with(_Behind(behind, received), keeps_count=False, uneven=uneven[0] if uneven else None)


def _names(graph: Any, dispatcher: Any) -> set[str]:
    """Returns the names of the classes of the pipes that read a dispatching one."""
    found: set[str] = set()
    for pipe, inputs in graph.values():
        if pipe is not dispatcher:
            found |= {type(pipe).__name__} | _names(inputs, dispatcher)
    return found


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
