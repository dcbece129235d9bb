"""A part of torch that is replaced, before or after ringloader is imported or between epochs, is used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parity.patches import MOMENTS, PATCHES

# Functions that ringloader's own loader goes through as torch's does.
NATIVE = (
    "DataLoader.__iter__",
    "DataLoader.__len__",
    "DataLoader.check_worker_number_rationality",
    "RandomSampler.__iter__",
    "BatchSampler.__iter__",
    "another of torch's",
    "_index_sampler",
    "_get_iterator of the object",
    "_BaseDataLoaderIter.__next__",
    "_MapDatasetFetcher",
    "_MapDatasetFetcher.fetch",
    "_MapDatasetFetcher.__init__",
    "_IterableDatasetFetcher.fetch",
    "create_fetcher",
)


# One program answers for all.
pytestmark = pytest.mark.xdist_group("patched")


@pytest.fixture(scope="module")
def answers():
    program = Path(__file__).with_name("patches.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(program.parent.parent), *sys.path])}
    ended = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=240, env=environment
    )
    assert ended.returncode == 0, ended.stderr
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    return {(answer["name"], answer["moment"]): answer for answer in found}, ended.stderr


@pytest.mark.rings_only
@pytest.mark.limit(250)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", PATCHES)
def test_a_replaced_part_takes_effect(answers, name, moment):
    answer = answers[0][name, moment]
    assert "failed" not in answer, answer["failed"]
    if name in NATIVE or "persistent" not in moment:
        assert answer["ours"] == answer["torch"]
    else:
        # Persistent workers that run go on as they began: the batches are the same, the calls need not be.
        assert [epoch[0] for epoch in answer["ours"][:2]] == [epoch[0] for epoch in answer["torch"][:2]]
    if name in NATIVE or "persistent" in moment:
        assert (answer["path"], answer["said"]) == ("native", [])
    else:
        assert answer["path"] == "torch"
        assert answer["said"] == [f"ringloader: {answer['reason']}, so torch's own loader runs"]
