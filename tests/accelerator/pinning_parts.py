"""Batches that are pinned, for tests beside torch's own loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.data

from accelerator import pretend
from accelerator.pinned import IS_NAMED, PIN, Made, told
from parity import harness, side_by_side
from parity.datasets import identity

MIB = 1 << 20


def on_each_path(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a test on the paths that the command line names, and checks the device after it."""
    before = harness.paths
    harness.paths = ("torch" if IS_NAMED else request.config.getoption("--path"),)
    with harness.taking(harness.paths[0]):
        yield
    harness.paths = before
    assert not pretend.violations()


def assert_same(scenario: Any, loader_class: Any) -> list[Any]:
    """As `side_by_side.assert_same`, on each path. Returns torch's steps."""
    for path in harness.paths:
        with harness.taking(path):
            steps = side_by_side.assert_same(scenario, loader_class)
    return steps


def whole(*makes: Any, length: int | None = None, **kwargs: Any) -> dict[str, Any]:
    """Elements as they are, from one worker."""
    options = {"num_workers": 1, "batch_size": None, "collate_fn": identity, **PIN, **kwargs}
    return {"dataset": Made(*makes, length=length), **options}


def ones() -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3)


def large(dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return told(3, 2 * MIB).view(dtype)


class Pins:
    """Has a method of its own."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def pin_memory(self) -> Any:
        return ("mine", self.tensor.pin_memory())


class PinsBadly:
    def pin_memory(self) -> Any:
        raise KeyError("not today")
