"""The part of the generated cases that every run of the tests can afford; `whole.py` has them all."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from parity.generated.cases import AXES, Generated, at_random, every_pair, every_value, settled
from parity.generated.judge import assert_parity


@pytest.mark.rings_only
@pytest.mark.parametrize("case", [Generated(), *every_value(seed=1)], ids=str)
def test_case(case):
    assert_parity(case)


def test_every_pair_of_values_meets():
    """The whole list leaves out no pair but those that cannot stand together."""
    cases = every_pair(seed=1)
    names = list(AXES)
    met = {
        pair
        for case in cases
        for pair in itertools.combinations(zip(names, dataclasses.astuple(case), strict=True), 2)
    }
    plain = dataclasses.asdict(Generated())
    for left, right in itertools.combinations(names, 2):
        for one, other in itertools.product(AXES[left], AXES[right]):
            case = settled({**plain, left: one, right: other})
            if getattr(case, left) == one and getattr(case, right) == other:
                assert ((left, one), (right, other)) in met


def test_every_value_occurs():
    cases = every_value(seed=1)
    for name, values in AXES.items():
        assert {getattr(case, name) for case in cases} >= set(values), name


def test_the_list_is_a_function_of_its_seed():
    assert every_pair(seed=3) == every_pair(seed=3) != every_pair(seed=4)
    assert every_value(seed=3) == every_value(seed=3)
    assert at_random(seed=3, count=20) == at_random(seed=3, count=20)


def test_names_tell_cases_apart():
    cases = every_pair(seed=1)
    assert len(set(map(str, cases))) == len(cases)
