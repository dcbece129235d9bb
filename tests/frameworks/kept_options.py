"""The options of iterators that a program starts, and a dataset with one bad sample."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ringloader._features.all as features
from ringloader._features import table
from ringloader._features.table import Options


class OneIsBad(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            raise ValueError("the bad sample")
        return torch.full((3,), float(index))


def of_loader(loader: Any, names: dict[str, Any]) -> dict[str, Any]:
    """Returns these options of a loader of ours."""
    found = table.values_of(loader)
    return {name: found[name] for name in names}


@contextlib.contextmanager
def of_iterators() -> Iterator[list[Options]]:
    """The options of each iterator that ``install`` makes meanwhile, in order."""
    found = []
    fitting = features.fitting

    def noted(loader: Any, options: Options) -> Any:
        found.append(options)
        return fitting(loader, options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "fitting", noted)
        yield found
