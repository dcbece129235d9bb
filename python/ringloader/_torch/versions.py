"""Differences between the versions of torch that are supported."""

from __future__ import annotations

import functools

from ringloader._torch import internals


def counts_tasks_per_worker() -> bool:
    """True if torch, with ``in_order=False``, chooses a worker with room: 2.6 goes round in any case."""
    return "_workers_num_tasks" in internals.Iterator._try_put_index.__code__.co_names


def pins_for_named_device() -> bool:
    """True if torch pins for ``pin_memory_device``: newer ones pin for the current accelerator."""
    return "current_accelerator" not in internals.BaseIterator.__init__.__code__.co_names


@functools.cache
def pins_each_tensor_alike() -> bool:
    """True if torch keeps a batch's lists, tuples and dicts and pins each tensor: 2.6 makes tuples lists."""
    pinned = internals.pin_memory(("", [""], {"": ""}), None)
    return [type(pinned), *(type(item) for item in pinned)] == [tuple, str, list, dict]


def warns_of_pickle_errors() -> bool:
    """True if torch warns of ``spawn`` and ``forkserver`` where a worker's arguments cannot be pickled."""
    return "PicklingError" in internals.Iterator.__init__.__code__.co_names
