"""A batch as plain values that can be compared: types, layouts, bytes and which parts are one object."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import struct
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

Description = Any

_SHORT = 64


def describe(value: Any) -> Description:
    """Equal descriptions mean: a reader of the two values cannot tell them apart.

    Left out are the documented differences: `is_shared()`, `owndata`, offset and size of a storage.
    """
    return _Describer().of(value)


def difference(expected: Description, actual: Description, path: str = "") -> str:
    """Returns where two descriptions part for the first time, with both sides; empty if they are equal."""
    if expected == actual:
        return ""
    if isinstance(expected, (list, tuple)) and isinstance(actual, (list, tuple)):
        for number, (left, right) in enumerate(zip(expected, actual, strict=False)):
            if left != right:
                if not isinstance(left, (list, tuple)) or not isinstance(right, (list, tuple)):
                    return f"{path}[{number}]: expected {expected!r:.1000}, got {actual!r:.1000}"
                return difference(left, right, f"{path}[{number}]")
    return f"{path}: expected {expected!r:.1000}, got {actual!r:.1000}"


# A frame of the worker loop, torch's or ours, with its lines of source.
_LOOP_FRAME = (
    r'  File "[^"]*?'
    r'(?:/_utils/worker\.py", line \d+, in _worker_loop|/ringloader/_[\w/]+\.py", line \d+, in \w+)'
    r"END(?:    (?:(?!END).)*?END)*"
)


def normalise(text: str) -> str:
    """A message without what differs from run to run: process ids and addresses.

    And without the frames of the worker loops, and those beneath an error of pinning, which is not raised in
    a thread of torch's.
    """
    # Once as lines, and once in the `repr` of an exception's arguments.
    for end in ("\n", r"\\n"):
        text = re.sub(_LOOP_FRAME.replace("END", end), "", text)
    text = re.sub(r"0x[0-9a-f]+", "0x?", text)
    if "in pin memory thread for device" in text:
        # Once as lines, and once in the `repr` of an exception's arguments.
        text = re.sub(r"(?<=\n)  .*\n|(?<=\\n)  .*?\\n", "", text)
    return re.sub(r"\(pid(\(s\))? [\d, ]+\)", r"(pid\1 ?)", text)


def digest(data: bytes) -> str:
    if len(data) <= _SHORT:
        return data.hex()
    return f"{len(data)} bytes {hashlib.blake2b(data, digest_size=12).hexdigest()}"


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order, whatever the layout in memory."""
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    if plain.numel() == 0:
        return b""
    flat = plain.contiguous().reshape(-1)
    if flat.numel() == 1:
        # Contiguous with any stride, which `view` does not accept.
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8).numpy().tobytes()


def _has_grad(tensor: torch.Tensor) -> bool:
    # Others may not be asked without a warning.
    return tensor.is_leaf and tensor.grad is not None


@functools.cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


def _pinned(tensor: torch.Tensor) -> Description:
    """Tells if it is pinned, and then where it lies in its storage: torch's events guard whole blocks."""
    if not _has_accelerator() or not tensor.is_pinned():
        return ()
    return ("pinned", tensor.storage_offset(), tensor.untyped_storage().nbytes())


class _Describer:
    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._keep: list[Any] = []
        self._ranges: list[tuple[int, int]] = []
        self._spans: list[tuple[int, int, int]] = []

    def of(self, value: Any) -> Description:
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if value is None or kind in (bool, int, complex, torch.dtype, torch.device, torch.layout):
            return (name, repr(value))
        if kind is float:
            return (name, struct.pack("<d", value).hex(), repr(value))
        if kind is str:
            return (
                name,
                ascii(value) if len(value) < 500 else digest(value.encode("utf-8", "surrogatepass")),
            )
        if kind in (bytes, bytearray):
            return (name, digest(bytes(value)))
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)):
            return ("named", getattr(value, "__module__", ""), getattr(value, "__qualname__", repr(value)))
        if kind is tuple and not value:
            return (name, [])
        if id(value) in self._seen:
            return ("the same object as", self._seen[id(value)])
        self._seen[id(value)] = len(self._seen)
        self._keep.append(value)
        return (name, *self._parts(value), self._attributes(value))

    def _parts(self, value: Any) -> tuple[Description, ...]:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, np.generic):
            padded = value.dtype.char in "gG"
            return (value.dtype.str, "" if padded else digest(value.tobytes()), ascii(value))
        if isinstance(value, torch.UntypedStorage):
            return (digest(bytes(value.tolist())),)
        if isinstance(value, torch.TypedStorage):
            return (str(value.dtype), value._size(), self.of(value._untyped_storage))
        if isinstance(value, torch.Generator):
            return (str(value.device), digest(tensor_bytes(value.get_state())))
        if isinstance(value, Mapping):
            return ([(self.of(key), self.of(item)) for key, item in value.items()],)
        if isinstance(value, (list, tuple)):
            return ([self.of(item) for item in value],)
        if isinstance(value, (set, frozenset)):
            return (sorted(repr(_Describer().of(item)) for item in value),)
        if isinstance(value, BaseException):
            return (self.of(value.args), normalise(str(value)))
        if isinstance(value, (str, bytes, int, float)):
            return (ascii(value),)
        return ()

    def _attributes(self, value: Any) -> Description:
        found = {}
        if dataclasses.is_dataclass(value):
            found.update({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
        for base in type(value).__mro__:
            slots = base.__dict__.get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                if not slot.startswith("__") and hasattr(value, slot):
                    found[slot] = getattr(value, slot)
        if not isinstance(value, (torch.UntypedStorage, torch.TypedStorage)):
            found.update(getattr(value, "__dict__", {}))
        return [(key, self.of(item)) for key, item in sorted(found.items())]

    def _tensor(self, tensor: torch.Tensor) -> tuple[Description, ...]:
        if tensor.is_nested:
            return (str(tensor.dtype), str(tensor.layout), [self.of(part) for part in tensor.unbind()])
        head = (
            str(tensor.dtype),
            tuple(tensor.shape),
            str(tensor.layout),
            str(tensor.device),
            ("requires_grad", tensor.requires_grad, "leaf", tensor.is_leaf, "grad", _has_grad(tensor)),
            ("inference", tensor.is_inference()),
        )
        if tensor.is_quantized:
            scale = (tensor.q_scale(), tensor.q_zero_point())
            return (*head, str(tensor.qscheme()), scale, digest(tensor_bytes(tensor.int_repr())))
        if tensor.layout == torch.sparse_coo:
            parts = (tensor._indices(), tensor._values())
            return (*head, tensor.is_coalesced(), [self.of(part.detach()) for part in parts])
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
            return (*head, [self.of(part.detach()) for part in parts])
        if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            parts = (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
            return (*head, [self.of(part.detach()) for part in parts])
        head = (*head, ("stride", tuple(tensor.stride())), ("bits", tensor.is_conj(), tensor.is_neg()))
        if tensor.device.type != "cpu":
            return head
        if tensor.numel() == 0:
            return (*head, _pinned(tensor), "no elements")
        return (*head, _pinned(tensor), self._aliases(tensor), digest(tensor_bytes(tensor)))

    def _aliases(self, tensor: torch.Tensor) -> Description:
        """Returns the earlier tensors it overlaps, the shift in bytes, and whether the storage is one.

        Views of one storage that nowhere meet may arrive apart: each carries its own elements.
        """
        low = tensor.data_ptr()
        extents = zip(tensor.shape, tensor.stride(), strict=True)
        high = low + (1 + sum((extent - 1) * stride for extent, stride in extents)) * tensor.element_size()
        storage = tensor.untyped_storage()._cdata
        found = [
            (number, low - start, storage == other)
            for number, (start, end, other) in enumerate(self._spans)
            if low < end and start < high
        ]
        self._spans.append((low, high, storage))
        return ("overlaps", found)

    def _array(self, array: np.ndarray[Any, Any]) -> tuple[Description, ...]:
        flags = array.flags
        head = (
            array.dtype.descr if array.dtype.names else array.dtype.str,
            array.shape,
            ("strides", array.strides),
            ("flags", flags.writeable, flags.c_contiguous, flags.f_contiguous, flags.aligned),
        )
        if array.dtype.hasobject:
            return (*head, [self.of(item) for item in array.ravel().tolist()])
        if array.dtype.char in "gG":
            # Ten bytes of sixteen count, the others are whatever was in memory.
            return (*head, ("overlaps", self._overlaps(array)), [repr(item) for item in array.ravel()])
        return (*head, ("overlaps", self._overlaps(array)), digest(array.tobytes()))

    def _overlaps(self, array: np.ndarray[Any, Any]) -> list[int]:
        if array.size == 0:
            return []
        low = high = array.__array_interface__["data"][0]
        for extent, stride in zip(array.shape, array.strides, strict=True):
            low += min(0, (extent - 1) * stride)
            high += max(0, (extent - 1) * stride)
        high += array.itemsize
        found = [number for number, (start, end) in enumerate(self._ranges) if low < end and start < high]
        self._ranges.append((low, high))
        return found
