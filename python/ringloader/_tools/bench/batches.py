"""The first batches of a loader as text, and the first difference between two loaders."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import numbers
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ringloader._tools.bench import measure
from ringloader._tools.bench.arguments import Configuration, Target

# A batch: the place of each part, and the part.
Described = list[tuple[str, str]]

_MOST = 20
# After the first batch.
_SECONDS = 5.0
# Elements of a tensor that are written out.
_FEW = 8


def described(target: Target, configuration: Configuration) -> list[Described]:
    """Returns the first 20 batches, or those of an epoch that is shorter.

    Of a slow loader it returns those of five seconds. An epoch's end is a batch without parts.
    """
    loader = measure.make(target, configuration)
    found: list[Described] = []
    for batch in itertools.islice(loader, _MOST):
        if not found:
            until = time.perf_counter() + _SECONDS
        found.append(list(_parts(batch, "")))
        if time.perf_counter() > until:
            return found
    return found if len(found) == _MOST else [*found, []]


def difference(first: list[Described], second: list[Described]) -> tuple[str, str, str] | None:
    """Returns where two loaders' batches differ for the first time, with what each has there, or None."""
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        for here, there in itertools.zip_longest(one, other, fillvalue=("", "nothing")):
            if here != there:
                place = here[0] if here[0] == there[0] else ""
                return f"batch {number}{place}", here[1], there[1]
    return None


def _parts(value: Any, place: str, above: tuple[int, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yields the parts of a value. ``above`` are the objects that it is a part of, by identity."""
    name = type(value).__qualname__
    if id(value) in above:
        yield place, f"the {name} that it is a part of"
        return
    above = (*above, id(value))
    if isinstance(value, (torch.Tensor, np.ndarray)):
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            yield place, f"{name} {value.dtype} {tuple(value.shape)}"
            yield from _parts(value.tolist(), place, above)
        else:
            yield place, f"{name} {value.dtype} {tuple(value.shape)} {_elements(value)}"
    elif isinstance(value, Mapping):
        yield place, f"{name} [{', '.join(map(_key, value))}]"
        for key, item in value.items():
            yield from _parts(item, f"{place}[{_key(key)}]", above)
    elif isinstance(value, (list, tuple)):
        yield place, f"{name} of {len(value)}"
        for number, item in enumerate(value):
            yield from _parts(item, f"{place}[{number}]", above)
    elif value is None or isinstance(value, (str, bytes, numbers.Number, np.generic)):
        yield place, f"{name} {value!r}"
    elif isinstance(value, (set, frozenset)):
        yield place, f"{name} {sorted(map(_key, value))}"
    elif callable(value):
        # A class or a function: its attributes lead anywhere.
        yield place, getattr(value, "__qualname__", name)
    else:
        yield place, _text(value)
        fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        own = {field.name: getattr(value, field.name, None) for field in fields}
        own |= getattr(value, "__dict__", {})
        for attribute, item in own.items():
            yield from _parts(item, f"{place}.{attribute}", above)


def _text(value: Any) -> str:
    """Returns the class of an object with its text, unless it has the object's address or raises."""
    name = type(value).__qualname__
    try:
        text = repr(value)
    except Exception:
        return name
    return name if " at 0x" in text else f"{name} {text:.200}"


def _key(key: Any) -> str:
    """Returns the text of a dict's key, or of an element of a set."""
    return repr(key) if isinstance(key, (str, numbers.Number)) else _text(key)


def _elements(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            return "on meta"
        value = value.detach()
        if value.layout != torch.strided or value.is_nested or value.is_quantized:
            return str(value)
        if value.numel() > _FEW:
            flat = value.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            return _digest(flat.view(torch.uint8).numpy())
    elif value.size > _FEW:
        return _digest(value.tobytes())
    return str(value.tolist())


def _digest(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()
