"""The cases of `make chaos` that take a second or two: what must hold does, with ringloader's loader."""

from __future__ import annotations

import pytest

from chaos import judge
from chaos.all import CASES, MODULES

FAST = sorted(name for name, case in CASES.items() if case.fast)


@pytest.mark.rings_only
@pytest.mark.parametrize("name", FAST)
def test_case(name):
    result = judge.run(CASES[name], "ringloader")
    if result.status == "skipped":
        pytest.skip(result.why)
    assert result.status == "ok", f"{result.why}\n{result.err}"


def test_each_case_says_what_must_hold():
    assert len(CASES) >= 60
    assert {name.partition("/")[0] for name in CASES} == {
        module.__name__.rpartition(".")[2] for module in MODULES
    }
    assert [name for name, case in CASES.items() if not case.must_hold.endswith(".")] == []
