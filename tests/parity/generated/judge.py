"""One case through torch's loader and through ours on each of its paths."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator

import torch.utils.data

import ringloader
from parity import harness
from parity.generated.build import observed_case
from parity.generated.cases import Generated
from ringloader._torch import select_path

# How many cases went over each path, how many of them differed from torch, and as is known.
ran: collections.Counter[str] = collections.Counter()
differed: collections.Counter[str] = collections.Counter()
known: collections.Counter[str] = collections.Counter()


@contextlib.contextmanager
def _asked_for(scheduling: str, path: str) -> Iterator[None]:
    """Loaders made inside are scheduled by the named one, and must take `path`."""
    before = harness.expected_path, select_path.reason_for_rings
    harness.expected_path = path
    if scheduling == "torch":
        select_path.reason_for_rings = lambda _loader: "the tests asked for torch's own scheduling"
    try:
        yield
    finally:
        harness.expected_path, select_path.reason_for_rings = before


def assert_parity(case: Generated) -> None:
    """Asserts that the loaders cannot be told apart."""
    observed = observed_case(case)
    expected = harness.run(torch.utils.data.DataLoader, observed)
    assert expected.steps, "the case did nothing"
    told = []
    for scheduling, path in zip(("native", "torch"), case.paths, strict=True):
        with _asked_for(scheduling, path):
            actual = harness.run(ringloader.DataLoader, observed)
        ran[path] += 1
        try:
            harness.assert_same(expected, actual, unordered=observed.unordered)
        except AssertionError as error:
            differed[path] += 1
            told.append(f"{path}: {error}")
    assert not told, "\n".join(told)
