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


WHAT_TO_DO = "; for ringloader's, leave out what replaced it, or put torch's back before the epoch"


def answers(moment):
    """Returns the answers of all parts, replaced at one moment."""
    program = Path(__file__).with_name("patches.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(program.parent.parent), *sys.path])}
    ended = subprocess.run(
        [sys.executable, str(program), moment], capture_output=True, text=True, timeout=240, env=environment
    )
    assert ended.returncode == 0, ended.stderr
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    return {answer["name"]: answer for answer in found}


@pytest.mark.rings_only
@pytest.mark.limit(250)
@pytest.mark.parametrize(
    "moment",
    [
        "after the import",
        *(pytest.param(moment, marks=pytest.mark.slow) for moment in MOMENTS if moment != "after the import"),
    ],
)
def test_a_replaced_part_takes_effect(moment):
    found = answers(moment)
    wrong = {name: wrongs(found[name]) for name in PATCHES}
    assert {name: text for name, text in wrong.items() if text} == {}


def wrongs(answer):
    """Returns what is wrong with the answer of one case."""
    if "failed" in answer:
        return answer["failed"]
    goes_on = "persistent" in answer["moment"]
    is_native = answer["name"] in NATIVE or goes_on
    ours, torchs = answer["ours"], answer["torch"]
    if goes_on and answer["name"] not in NATIVE:
        # Persistent workers that run go on as they began: the batches are the same, the calls need not be.
        ours, torchs = ([epoch[0] for epoch in epochs[:2]] for epochs in (ours, torchs))
    advice = WHAT_TO_DO if "was replaced by" in answer["reason"] else ""
    said = [] if is_native else [f"ringloader: {answer['reason']}, so torch's own loader runs{advice}"]
    expected = (torchs, "native" if is_native else "torch", said)
    found = (ours, answer["path"], answer["said"])
    return "" if found == expected else f"{found}, expected {expected}"
