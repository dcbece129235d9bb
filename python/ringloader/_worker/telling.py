"""``set_epoch`` of datasets: which ones are told the number of an epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import ChainDataset, ConcatDataset, StackDataset, Subset

from ringloader._common.attributes import has_method


def epoch_listeners(dataset: Any) -> list[Any]:
    """Returns the datasets with a ``set_epoch`` in ``dataset``, each once.

    A dataset with a ``set_epoch`` of its own is told alone. Below one without, torch's wrapping datasets are
    searched: ``Subset``, ``ConcatDataset``, ``ChainDataset`` and ``StackDataset``.
    """
    found: list[Any] = []
    seen: set[int] = set()
    pending = [dataset]
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if has_method(one, "set_epoch"):
            found.append(one)
        elif isinstance(one, Subset):
            pending.append(one.dataset)
        elif isinstance(one, (ConcatDataset, ChainDataset, StackDataset)):
            inner: Any = one.datasets
            parts = list(inner.values() if isinstance(inner, Mapping) else inner)
            pending.extend(reversed(parts))
    return found
