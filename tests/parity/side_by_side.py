"""Scenarios in code: what they do is told step by step, and must be the same with torch's loader."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.utils.data

from parity import harness
from parity.describe import Description, describe, difference, digest, tensor_bytes


class Told:
    """The record of a scenario: each call's outcome, its warnings and the state of the global generator."""

    def __init__(self, loader_class: harness.LoaderClass) -> None:
        self.ours = loader_class is not torch.utils.data.DataLoader
        self.steps: list[Description] = []

    def step(self, name: str, function: Callable[[], Any], *, text: bool = True) -> Any:
        """Calls `function`. `text`: whether an error's text is told too."""
        value = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                value = function()
                outcome: Description = ("value", describe(value) if _is_data(value) else "")
            except StopIteration:
                outcome = ("stop",)
            except Exception as error:
                outcome = harness.describe_error(error) if text else ("error", type(error).__qualname__)
                harness.forget_frames(error)
        state = digest(tensor_bytes(torch.get_rng_state()))
        self.steps.append((name, outcome, harness.seen_warnings(caught), state))
        return value

    def iterate(self, loader: Any, take: int | None = None) -> Any:
        """An epoch, or its first `take` batches. Returns the iterator."""
        iterator = self.step("iter", lambda: iter(loader))
        if iterator is not None:
            if self.ours:
                harness.assert_path(iterator, loader.num_workers)
            self.drain(iterator, take)
        return iterator

    def drain(self, iterator: Any, take: int | None = None) -> None:
        """Takes the rest of an epoch, or its next `take` batches."""
        while take is None or take > 0:
            self.step("next", lambda: next(iterator))
            if self.steps[-1][1] == ("stop",) or len(self.steps) > 300:
                break
            take = None if take is None else take - 1


@contextlib.contextmanager
def _unraisable() -> Iterator[list[str]]:
    """Keeps what `__del__` could not raise."""
    noise: list[str] = []
    before = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: noise.append(f"{unraisable.exc_value!r} in {unraisable.object!r}")
    try:
        yield noise
    finally:
        sys.unraisablehook = before


def _is_data(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray, dict, list, tuple, str, int, float, type(None)))


def assert_same(
    scenario: Callable[[harness.LoaderClass, Told], None], loader_class: harness.LoaderClass
) -> list:
    """Runs `scenario` with torch's class and with `loader_class`. Returns torch's steps."""
    both = []
    for kind in (torch.utils.data.DataLoader, loader_class):
        torch.manual_seed(11)
        random.seed(11)
        np.random.seed(11)
        told = Told(kind)
        with _unraisable() as noise:
            scenario(kind, told)
            gc.collect()
        both.append(told.steps)
    # Our loader need not say what torch's `__del__` says after a failed start.
    assert not noise, noise
    expected, actual = both
    assert expected, "the scenario told nothing"
    for number, (theirs, ours) in enumerate(zip(expected, actual, strict=False)):
        assert ours == theirs, f"step {number} ({theirs[0]}): {difference(theirs, ours)}"
    assert len(actual) == len(expected)
    return expected
