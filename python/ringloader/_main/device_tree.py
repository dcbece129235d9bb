"""The tensors of a batch, in whatever tree they are.

MIRRORS torch _utils/pin_memory.py::pin_memory
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import torch


def mapped(data: Any, tensor: Callable[[torch.Tensor], Any], movable: Callable[[Any], Any]) -> Any:
    """A batch with other tensors. Containers of what changes are copied, and keep their types.

    Args:
        data: The batch.
        tensor: What stands for each tensor.
        movable: What stands for each object that is no tensor and has a method ``to``, containers too, but
            for a ``UserDict``.

    Returns:
        The batch. All else in it is as it was, containers in which nothing changes too.
    """

    def each(item: Any) -> Any:
        return mapped(item, tensor, movable)

    if isinstance(data, torch.Tensor):
        return tensor(data)
    if isinstance(data, (str, bytes)):
        return data
    # A `UserDict` with a method `to`, as transformers' BatchEncoding is, is no more than its items.
    has_to = not isinstance(data, type) and callable(getattr(data, "to", None))
    if has_to and not isinstance(data, collections.UserDict):
        return movable(data)
    if isinstance(data, Mapping):
        pairs = {key: each(item) for key, item in data.items()}
        return data if all(pairs[key] is item for key, item in data.items()) else _mapping(data, pairs)
    if isinstance(data, Sequence):
        items = [each(item) for item in data]
        return data if all(map(_is, items, data)) else _sequence(data, items)
    return data


def _is(one: object, other: object) -> bool:
    return one is other


def _mapping(data: Mapping[Any, Any], pairs: dict[Any, Any]) -> Any:
    try:
        if not isinstance(data, MutableMapping):
            return type(data)(pairs)  # type: ignore[call-arg]
        # A copy has what else there may be to the type.
        made = copy.copy(data)
        made.update(pairs)
        return made
    except TypeError:
        # Not all types can be made, or changed, so.
        return pairs


def _sequence(data: Sequence[Any], items: list[Any]) -> Any:
    if isinstance(data, tuple):
        # A named tuple takes its items one by one.
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    try:
        if not isinstance(data, MutableSequence):
            return type(data)(items)  # type: ignore[call-arg]
        made = copy.copy(data)
        for at, item in enumerate(items):
            made[at] = item
        return made
    except TypeError:
        return items
