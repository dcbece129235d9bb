"""The tensors of a batch, in whatever tree they are, and their copies to a device.

Small ones are copied in blocks that are taken apart there, large ones by themselves. The native side packs
the blocks of batches that it has a layout for; others are packed here.

MIRRORS torch _utils/pin_memory.py::pin_memory
"""

from __future__ import annotations

import collections
import copy
import gc
import operator
import types
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import torch

from ringloader._common.attributes import has_method
from ringloader._torch import devices


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
        return data if all(map(operator.is_, items, before)) else _sequence(data, items)
    return data


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


# MIRRORS `rust/py/src/batch/layout.rs`.
PACKED = 64 << 10
LARGEST_BLOCK = 1 << 20
_ALIGNMENT = 32
# For fewer tensors, one copy and a second one that takes them apart are no fewer calls of the device.
_FEWEST = 3
# The units of copies on the device, whose threads read four at once: words are faster than bytes.
_WORDS, _BYTES = torch.int64, torch.uint8


class Block:
    """The places of small tensors in a block of bytes.

    If the device has no code that copies many tensors at once, each crosses in a copy of its own.

    Args:
        nbytes: Bytes of the block, a multiple of 8.
        places: Number, offset and bytes of each tensor in it, in the block's order. Offsets are multiples of
            8; there may be gaps.
        device: The device.

    Attributes:
        nbytes: Bytes of the block.
        copies: Copies to the device that it takes.
    """

    __slots__ = ("_device", "_is_packed", "_parts", "copies", "nbytes")

    def __init__(self, nbytes: int, places: Sequence[tuple[int, int, int]], device: torch.device) -> None:
        self.nbytes = nbytes
        self._device = device
        self._is_packed = len(places) >= _FEWEST and devices.copies_many(device.type)
        self.copies = 1 if self._is_packed else len(places)
        by_unit: dict[torch.dtype, list[tuple[int, int, int]]] = {_WORDS: [], _BYTES: []}
        for place in places:
            has_words = self._is_packed and place[2] % _WORDS.itemsize == 0
            by_unit[_WORDS if has_words else _BYTES].append(place)
        self._parts = [_Parts(unit, nbytes, some, device) for unit, some in by_unit.items() if some]

    def copy(self, staging: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Issues copies to the device on the current stream.

        Args:
            staging: The block, in pinned memory.
            tensors: New tensors on the device, by their numbers. Their versions stay 0.
        """
        if not self._is_packed:
            for parts in self._parts:
                copy_each(parts.flat(tensors), parts.of(staging))
            return
        block = self._new_block()
        block.copy_(staging, non_blocking=True)
        for parts in self._parts:
            devices.copy_many(parts.flat(tensors), parts.of(block))

    def _new_block(self) -> torch.Tensor:
        """Returns memory of the current stream, which alone uses it: its next use waits for this one."""
        return torch.empty(self.nbytes, dtype=_BYTES, device=self._device)


def copy_each(tensors: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Issues a copy to each of some tensors. Their versions stay as they are, as those of torch's `.to()`."""
    for into, source in zip(tensors, sources, strict=True):
        # `data` has a version counter of its own.
        into.data.copy_(source, non_blocking=True)


class _Parts:
    """The tensors of a block that are copied in the same unit."""

    __slots__ = ("_empty", "_numbers", "_picked", "_sizes", "_unit")

    def __init__(
        self, unit: torch.dtype, nbytes: int, places: Sequence[tuple[int, int, int]], device: torch.device
    ) -> None:
        self._unit = unit
        self._empty = torch.empty(0, dtype=unit, device=device)
        # The tensors' numbers, and the arguments of `set_` that follow the storage.
        self._numbers = [(number, (0, (size // unit.itemsize,), (1,))) for number, _, size in places]
        # The pieces in which `split` gives the whole block, and which of them are tensors: None if all are.
        self._sizes: list[int] = []
        picked = []
        end = 0
        for _, offset, size in places:
            if offset > end:
                self._sizes.append((offset - end) // unit.itemsize)
            picked.append(len(self._sizes))
            self._sizes.append(size // unit.itemsize)
            end = offset + size
        if nbytes > end:
            self._sizes.append((nbytes - end) // unit.itemsize)
        self._picked = None if len(picked) == len(self._sizes) else picked

    def flat(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the memory of the tensors, in units, with version counters of its own."""
        empty = self._empty
        return [empty.data.set_(tensors[number].untyped_storage(), *place) for number, place in self._numbers]

    def of(self, block: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the tensors' pieces of a block of bytes."""
        if len(self._sizes) == 1:
            return (block.view(self._unit),)
        pieces = block.view(self._unit).split_with_sizes(self._sizes)
        return pieces if self._picked is None else tuple(pieces[at] for at in self._picked)


class Packing:
    """Small tensors go with others, in one copy; large ones by themselves.

    Args:
        device: Where they go.

    Attributes:
        memory: The tensors on the device.
        sources: Tensors in pinned memory that copies read.
        staged: Bytes that were copied to pinned memory.
        copies: Copies to the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Each small tensor with its memory on the device.
        self._small: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Of each block: number, offset and bytes of the small tensors in it.
        self._places: list[list[tuple[int, int, int]]] = []
        self._used = 0
        self._blocks: list[tuple[Block, torch.Tensor]] = []
        # The large ones on the device, and in pinned memory.
        self._large: list[torch.Tensor] = []
        self._large_sources: list[torch.Tensor] = []
        self.memory: list[torch.Tensor] = []
        self.sources: list[torch.Tensor] = []
        self.staged = self.copies = 0

    def add(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns what ``tensor.to()`` gives, or None if torch must move it.

        :meth:`stage` and :meth:`copy` bring its bytes there.
        """
        if not _is_plain(tensor):
            return None
        into = torch.empty_strided(tensor.shape, _strides(tensor), dtype=tensor.dtype, device=self._device)
        size = tensor.numel() * tensor.element_size()
        if size == 0:
            return into
        self.memory.append(into)
        if size > PACKED:
            self._large.append(into)
            self._large_sources.append(self._pinned(tensor))
            return into
        if not self._places or self._used + size > LARGEST_BLOCK:
            self._places.append([])
            self._used = 0
        self._places[-1].append((len(self._small), self._used, size))
        self._small.append((tensor, into))
        self._used += _aligned(size)
        return into

    def stage(self) -> None:
        """Copies the small ones to pinned memory. Called once, when all have come."""
        self.sources = list(self._large_sources)
        for places in self._places:
            _, offset, size = places[-1]
            block = Block(offset + _aligned(size), places, self._device)
            staging = torch.empty(block.nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            storage = staging.untyped_storage()
            for number, at, _ in places:
                tensor, into = self._small[number]
                source = torch.empty(0, dtype=tensor.dtype, device="cpu")
                source.set_(storage, at // tensor.element_size(), tensor.shape, into.stride()).copy_(tensor)
            self._blocks.append((block, staging))
            self.sources.append(staging)
            self.staged += block.nbytes
        self.copies = len(self._large) + sum(block.copies for block, _ in self._blocks)

    def copy(self) -> None:
        """Issues the copies on the current stream."""
        small = [into for _, into in self._small]
        for block, staging in self._blocks:
            block.copy(staging, small)
        copy_each(self._large, self._large_sources)

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_pinned() and tensor.stride() == _strides(tensor):
            return tensor
        self.staged += tensor.numel() * tensor.element_size()
        pinned = torch.empty_strided(
            tensor.shape, _strides(tensor), dtype=tensor.dtype, device="cpu", pin_memory=True
        )
        return pinned.copy_(tensor)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _is_plain(tensor: torch.Tensor) -> bool:
    """True if the values of a tensor are its bytes, and nothing else comes with it."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested)
        and not (tensor.is_conj() or tensor.is_neg())
        and not any(getattr(tensor, "names", ()))
    )


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides that ``tensor.to()`` gives: the tensor's own, if its elements lie in one piece."""
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta").stride()
