"""The tensors of a batch, in whatever tree they are.

MIRRORS torch _utils/pin_memory.py::pin_memory
"""

from __future__ import annotations

import collections
import copy
import gc
import types
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import torch

from ringloader._common.attributes import has_method


def leaves(data: Any) -> list[Any]:
    """Returns the leaves of a batch, in order: its tensors, and other objects that have a method ``to``.

    Such an object is not looked into, be it a container, but for a ``UserDict``. Objects that are no
    containers and have only a method ``pin_memory`` are leaves too. Nothing changes.
    """
    found: list[Any] = []
    _find(data, found.append)
    return found


def with_leaves(data: Any, others: Iterable[Any]) -> Any:
    """A batch with other leaves. Containers of what changes are copied, and keep their types.

    A container whose copies share their items with it changes itself. So all leaves are there before.

    Args:
        data: The batch.
        others: What stands for each of its :func:`leaves`.

    Returns:
        The batch. All else in it is as it was, containers in which nothing changes too.
    """
    return _rebuilt(data, collections.deque(others))


def _is_leaf(data: Any) -> bool:
    if isinstance(data, torch.Tensor):
        return True
    if isinstance(data, type):
        return False
    if has_to(data):
        # A `UserDict` with a method `to`, as transformers' BatchEncoding is, is no more than its items.
        return not isinstance(data, collections.UserDict)
    # A container's items are moved, and the container is not pinned as one.
    return has_method(data, "pin_memory") and not isinstance(data, (Mapping, Sequence))


def has_to(leaf: Any) -> bool:
    """True if an object moves itself."""
    return has_method(leaf, "to")


def _find(data: Any, found: Callable[[Any], None]) -> None:
    if isinstance(data, (str, bytes)):
        return
    if _is_leaf(data):
        found(data)
    elif isinstance(data, Mapping):
        for item in data.values():
            _find(item, found)
    elif isinstance(data, Sequence):
        for item in data:
            _find(item, found)


def _rebuilt(data: Any, others: collections.deque[Any]) -> Any:
    if isinstance(data, (str, bytes)):
        return data
    if _is_leaf(data):
        return others.popleft()
    if isinstance(data, Mapping):
        pairs = {key: (item, _rebuilt(item, others)) for key, item in data.items()}
        if all(one is other for one, other in pairs.values()):
            return data
        return _mapping(data, {key: other for key, (_, other) in pairs.items()})
    if isinstance(data, Sequence):
        before = list(data)
        items = [_rebuilt(item, others) for item in before]
        return data if all(map(_is, items, before)) else _sequence(data, items)
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


def memory_of(data: Any, device: torch.device) -> list[Any]:
    """Returns what a batch has on a device that notes streams: tensors, and objects with that method.

    They may be anywhere in what Python objects refer to. No code of the user's runs.
    """
    found: list[Any] = []
    # Objects that were looked into, which keep their ids meanwhile.
    seen: dict[int, object] = {}
    waiting = collections.deque([data])
    while waiting and len(seen) < _MOST_LOOKED_INTO:
        one = waiting.popleft()
        cls = type(one)
        if issubclass(cls, torch.Tensor) and _has_own_memory(one):
            if one.device == device:
                found.append(one)
        elif id(one) in seen or issubclass(cls, (type, types.ModuleType)):
            continue
        elif not issubclass(cls, torch.Tensor) and callable(getattr(cls, "record_stream", None)):
            seen[id(one)] = one
            found.append(one)
        elif cls is types.FunctionType:
            # Not its globals.
            waiting.extend(one.__closure__ or ())
        elif referents := gc.get_referents(one):
            seen[id(one)] = one
            waiting.extend(referents)
    return found


# A batch may refer to a whole program. Its own tensors are near, and come first.
_MOST_LOOKED_INTO = 10_000


def _has_own_memory(tensor: torch.Tensor) -> bool:
    """False for other layouts, which note no stream, and for subclasses that are around other tensors."""
    return (
        tensor.layout == torch.strided
        and not tensor.is_nested
        and getattr(tensor, "__tensor_flatten__", None) is None
    )
