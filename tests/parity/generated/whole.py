"""All generated cases, for `make parity`. Too many for each run, so the file's name hides it from pytest."""

from __future__ import annotations

import pytest

from parity.batch_values import ALL
from parity.generated.cases import Generated, at_random, every_pair
from parity.generated.judge import assert_parity, differed, known
from parity.test_kinds import WRONG_IN_TORCH

CASES = list(dict.fromkeys([*every_pair(seed=1), *at_random(seed=2, count=100)]))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case):
    assert_parity(case)


def _kind(name: str) -> Generated:
    return Generated(
        dataset=f"kind: {name}", batch="none", workers=1, collate="identity", take=None, length=4
    )


@pytest.mark.parametrize("name", ALL)
def test_kind(name):
    assert_parity(_kind(name))


# A quantized tensor comes out of torch's loader as one that nothing can be asked about.
@pytest.mark.parametrize("name", [name for name in WRONG_IN_TORCH if name != "quantized"])
def test_kind_that_is_known_to_differ(name):
    """Rows of docs/differences.md. One that no longer differs must leave it."""
    before = differed.copy()
    with pytest.raises(AssertionError, match="native: "):
        assert_parity(_kind(name))
    known.update(differed - before)
    differed.subtract(differed - before)
