"""Batches as fingerprints, so that two loaders can be compared without keeping what they gave."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import UserDict, deque
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, RandomSampler, Subset

from .loaders import LOADERS
from .workloads import BY_NAME

# A batch is looked at only when this many later ones have come: a slot that is reused too early shows.
HELD_BATCHES = 3


def fingerprint(batch: object) -> str:
    """A digest of types, structure, dtypes, shapes, strides and bytes.

    Raises:
        TypeError: a leaf of a type that this function cannot compare.
    """
    digest = hashlib.sha1(usedforsecurity=False)
    _add(digest, batch)
    return digest.hexdigest()


def _add(digest: Any, value: object) -> None:
    digest.update(type(value).__qualname__.encode())
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.requires_grad}".encode())
        digest.update(memoryview(value.contiguous().reshape(-1).view(torch.uint8).numpy()))
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.dtype} {value.shape} {value.strides}".encode())
        digest.update(value.tobytes())
    elif isinstance(value, (dict, UserDict)):
        for key, item in value.items():
            _add(digest, key)
            _add(digest, item)
        digest.update(b"}")
    elif isinstance(value, (list, tuple)):
        for item in value:
            _add(digest, item)
        digest.update(b"]")
    elif dataclasses.is_dataclass(value):
        for attribute in dataclasses.fields(value):
            _add(digest, getattr(value, attribute.name))
        digest.update(b")")
    elif isinstance(value, (str, int, float, bytes, bool)) or value is None:
        digest.update(repr(value).encode() + b"\0")
    else:
        raise TypeError(f"cannot compare a leaf of type {type(value)}; add it to {__name__}")


def finite(dataset: Dataset[Any], batches: int, arguments: dict[str, Any]) -> Dataset[Any]:
    """Returns as much of a dataset as makes ``batches``."""
    return Subset(dataset, range(batches * (arguments["batch_size"] or 1)))


def fingerprints(loader_name: str, workload_name: str, batches: int) -> list[str]:
    """The first batches of a loader, each looked at late; also checks the path that the loader took.

    Where batches come in no order of torch's, a whole epoch of so many, sorted. A loader that shuffles in an
    order of its own is given torch's.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loader = LOADERS[loader_name]
    workload = BY_NAME[workload_name]
    arguments = workload.loader_arguments()
    dataset = workload.dataset()
    if not workload.in_order:
        dataset = finite(dataset, batches, arguments)
    if loader.own_shuffle and arguments.pop("shuffle", False):
        arguments["sampler"] = RandomSampler(dataset)  # type: ignore[arg-type]
    iterator = iter(loader.make(dataset, **arguments))
    held: deque[object] = deque()
    found = []
    for _ in range(batches):
        held.append(next(iterator))
        if len(held) > HELD_BATCHES:
            found.append(fingerprint(held.popleft()))
    found += map(fingerprint, held)
    loader.checked(iterator)
    return found if workload.in_order else sorted(found)
