"""One case through torch's loader and through ours."""

from __future__ import annotations

import collections

import pytest
import torch.utils.data

import ringloader
from parity import harness
from parity.generated.build import observed_case
from parity.generated.cases import Generated

# Numbers of cases over each path, of those that differed from torch, and of those known to differ.
ran: collections.Counter[str] = collections.Counter()
differed: collections.Counter[str] = collections.Counter()
known: collections.Counter[str] = collections.Counter()


def assert_parity(case: Generated) -> None:
    """Asserts that the loaders cannot be told apart."""
    observed = observed_case(case)
    expected = harness.run(torch.utils.data.DataLoader, observed)
    assert expected.steps, "the case did nothing"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "expected_path", case.path)
        actual = harness.run(ringloader.DataLoader, observed)
    ran[case.path] += 1
    try:
        harness.assert_same(expected, actual, unordered=observed.unordered)
    except AssertionError as error:
        differed[case.path] += 1
        raise AssertionError(f"{case.path}: {error}") from error
