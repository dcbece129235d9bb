"""Generated cases beside torch's loader with as many local workers."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch.utils.data

import ringloader
from parity import harness
from parity.datasets import identity
from parity.generated.build import observed_case
from parity.generated.cases import Generated, at_random, every_pair
from parity.test_kinds import TOGETHER, Kinds

# Each pair of properties: many cases, of which `make cluster` runs all.
PAIRS = every_pair(seed=1) if os.environ.get("RINGLOADER_TEST_ALL") else ()
CASES = list(dict.fromkeys([*PAIRS, *at_random(seed=5, count=50)]))


def without_context(case: Generated) -> Generated:
    return dataclasses.replace(case, context="none")


def over_ray(workers: Any) -> type[ringloader.DataLoader]:
    """Returns the class of loaders whose workers come from the cluster."""

    class OverRay(ringloader.DataLoader):
        def __init__(self, *args: Any, **arguments: Any) -> None:
            if arguments.get("num_workers"):
                arguments["worker_pool"] = workers
            super().__init__(*args, **arguments)

    return OverRay


def assert_parity(case: harness.Case, path: str, workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch warns of more workers than there are cores here, which workers elsewhere do not use.
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    expected = harness.run(torch.utils.data.DataLoader, case)
    monkeypatch.setattr(harness, "expected_path", path)
    actual = harness.run(over_ray(workers), case)
    harness.assert_same(expected, actual, unordered=case.unordered)


@pytest.mark.parametrize("case", list(dict.fromkeys(map(without_context, CASES))), ids=str)
def test_case(case, workers, monkeypatch):
    path = "ray" if case.path == "native" else case.path
    assert_parity(observed_case(case), path, workers, monkeypatch)


@pytest.mark.parametrize("names", TOGETHER, ids=" | ".join)
def test_kinds(names, workers, monkeypatch):
    def build():
        return {"dataset": Kinds(names), "batch_size": None, "num_workers": 1, "collate_fn": identity}

    assert_parity(harness.Case(build), "ray", workers, monkeypatch)
