"""Blocks of small tensors, each of which crosses to a device in one copy and is taken apart there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringloader._torch import devices

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
        """Returns memory of the current stream, which alone uses it: what is next in it comes behind that."""
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
        # The tensors' numbers, and the arguments of `set_` behind the storage.
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
