"""Memory on a device, and copies to it, for the tensors of a batch that the native side has no layout for."""

from __future__ import annotations

import torch

from ringloader._placement.device_block import Block, copy_each

# MIRRORS `rust/py/src/batch/limits.rs`.
PACKED = 64 << 10
LARGEST_BLOCK = 1 << 20
_ALIGNMENT = 32


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
        """Copies the small ones to pinned memory. To be called once, when all are there."""
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
