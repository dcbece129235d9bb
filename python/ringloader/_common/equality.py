"""States as bytes that are compared by value: pickles of equal states may differ, as those of tensors do."""

from __future__ import annotations

import pickle
from typing import Any

import torch


def pickled(state: Any) -> bytes | None:
    """Returns the pickle of a state; None for a state of None."""
    if state is None:
        return None
    # Twice: equal states are mostly equal bytes then, whatever objects in them are one.
    state = pickle.loads(pickle.dumps(state, pickle.HIGHEST_PROTOCOL))
    return pickle.dumps(state, pickle.HIGHEST_PROTOCOL)


def are_equal(first: bytes | None, second: bytes | None) -> bool:
    """True if two pickles are of equal values. None equals nothing."""
    if first is None or second is None:
        return False
    if first == second:
        return True
    try:
        return _are_equal(pickle.loads(first), pickle.loads(second))
    except Exception:
        # An object that refers to itself, or whose parts cannot be had.
        return False


def _are_equal(first: Any, second: Any) -> bool:
    kind = type(first)
    if type(second) is not kind:
        return False
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if kind in (list, tuple):
        return len(first) == len(second) and all(map(_are_equal, first, second))
    if kind is dict:
        return first.keys() == second.keys() and all(_are_equal(first[key], second[key]) for key in first)
    if kind in (set, frozenset):
        return bool(first == second)
    if pickle.dumps(first) == pickle.dumps(second):
        return True
    parts = first.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if isinstance(parts, str) or kind is type:
        return False
    return all(map(_are_same_part, parts, second.__reduce_ex__(pickle.HIGHEST_PROTOCOL)))


def _are_same_part(first: Any, second: Any) -> bool:
    """Compares parts of a reduced object: the items of a container are iterators."""
    if first is None or second is None or callable(first):
        return first is second
    if hasattr(first, "__next__"):
        first, second = list(first), list(second)
    return _are_equal(first, second)
