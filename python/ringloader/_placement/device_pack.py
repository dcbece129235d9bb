"""Memory on a device, and copies to it, for the tensors of a batch that the native side has no layout for."""

from __future__ import annotations

import torch

# MIRRORS `rust/py/src/batch/limits.rs`.
PACKED = 64 << 10
LARGEST_BLOCK = 1 << 20
_ALIGNMENT = 256


class Packing:
    """Small tensors go with others, in one copy; large ones by themselves.

    Args:
        device: Where they go.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Each tensor with its memory on the device, and the offset in its block.
        self._blocks: list[list[tuple[torch.Tensor, torch.Tensor, int]]] = []
        self._used = 0
        # Copies to make: destination and source. Each source is in pinned memory.
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Bytes that were copied to pinned memory.
        self.staged = 0

    def add(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns what ``tensor.to()`` gives, or None if torch must move it.

        :meth:`allocate` gives it its memory.
        """
        if not _is_plain(tensor):
            return None
        if tensor.numel() == 0:
            return torch.empty_like(tensor, device=self._device)
        size = tensor.numel() * tensor.element_size()
        if size > PACKED:
            into = torch.empty_like(tensor, device=self._device)
            self.pairs.append((into, self._pinned(tensor)))
            return into
        if not self._blocks or self._used + size > LARGEST_BLOCK:
            self._blocks.append([])
            self._used = 0
        into = torch.empty(0, dtype=tensor.dtype, device=self._device)
        self._blocks[-1].append((tensor, into, self._used))
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return into

    def allocate(self) -> None:
        """Gives the small ones their memory."""
        for tensors in self._blocks:
            tensor, _, offset = tensors[-1]
            size = offset + tensor.numel() * tensor.element_size()
            staging = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            block = torch.empty(size, dtype=torch.uint8, device=self._device)
            staging_storage, block_storage = staging.untyped_storage(), block.untyped_storage()
            for tensor, into, at in tensors:
                place = (at // tensor.element_size(), tensor.shape, _strides(tensor))
                source = torch.empty(0, dtype=tensor.dtype, device="cpu")
                source.set_(staging_storage, *place).copy_(tensor)
                into.set_(block_storage, *place)
            self.pairs.append((block, staging))
            self.staged += size

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_pinned() and tensor.stride() == _strides(tensor):
            return tensor
        self.staged += tensor.numel() * tensor.element_size()
        pinned = torch.empty_strided(
            tensor.shape, _strides(tensor), dtype=tensor.dtype, device="cpu", pin_memory=True
        )
        return pinned.copy_(tensor)


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
