"""``EpochStats.save_trace``: Chrome trace events, which agree with the figures."""

from __future__ import annotations

import collections
import itertools
import json
import time

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ringloader import DataLoader
from small_datasets import Made

pytestmark = pytest.mark.rings_only

BATCHES = 12


def sleeping(index):
    time.sleep(0.002)
    return torch.full((4,), float(index))


def saved(stats, tmp_path):
    """Returns the whole file, and its events by track and name."""
    stats.save_trace(tmp_path / "trace.json")
    content = json.loads((tmp_path / "trace.json").read_text())
    tracks = {event["tid"]: event["args"]["name"] for event in content["traceEvents"] if event["ph"] == "M"}
    events = collections.defaultdict(list)
    for event in content["traceEvents"]:
        if event["ph"] == "X":
            events[tracks[event["tid"]], event["name"]].append(event)
    return content, events


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 2},
        {"num_workers": 2, "worker_method": "thread"},
        {"num_workers": 2, "main_prefetch": 2},
        {"num_workers": 2, "in_order": False},
        {},
    ],
)
def test_each_batch_has_one_event_of_a_name(options, tmp_path):
    loader = DataLoader(Made(sleeping, 2 * BATCHES), batch_size=2, stats=True, **options)
    for _ in loader:
        time.sleep(0.001)
    stats = loader.epoch_stats()
    _, events = saved(stats, tmp_path)
    for part in ("dataset", "collate", "send"):
        found = [event for (_, name), some in events.items() if name == part for event in some]
        assert sorted(event["args"]["batch"] for event in found) == list(range(BATCHES))
        seconds = sum(getattr(worker, part) for worker in stats.workers)
        # What follows the collation is not drawn.
        assert sum(event["dur"] for event in found) / 1e6 == pytest.approx(seconds, abs=0.01)
        for event in found:
            batch = event["args"]["batch"]
            if options:
                assert event["args"]["indices"] == [2 * batch, 2 * batch + 1]
    if options:
        decoded = events["main process", "decode"]
        assert sorted(event["args"]["batch"] for event in decoded) == list(range(BATCHES))
    main = {name: events["main process", name] for name in ("startup", "wait", "caller")}
    assert [len(some) for some in main.values()] == [1, BATCHES, BATCHES]
    for name, seconds in (("startup", stats.startup), ("wait", stats.waiting), ("caller", stats.caller)):
        assert sum(event["dur"] for event in main[name]) / 1e6 == pytest.approx(seconds)
    # One behind the other, and nothing between them.
    ends = sorted((event["ts"], event["ts"] + event["dur"]) for some in main.values() for event in some)
    for (_, ended), (begun, _) in itertools.pairwise(ends):
        assert begun == pytest.approx(ended, abs=0.5)


def test_a_workers_events_follow_each_other(tmp_path):
    loader = DataLoader(Made(sleeping, 2 * BATCHES), batch_size=2, num_workers=2, stats=True)
    list(loader)
    _, events = saved(loader.epoch_stats(), tmp_path)
    for worker in ("worker 0", "worker 1"):
        spans = sorted(
            (event["ts"], event["ts"] + event["dur"])
            for (track, _), some in events.items()
            if track == worker
            for event in some
        )
        assert len(spans) == 3 * BATCHES / 2
        for (_, ended), (begun, _) in itertools.pairwise(spans):
            assert begun >= ended - 0.5


def test_times_have_the_base_of_torchs_profiler(tmp_path):
    loader = DataLoader(Made(sleeping, 2 * BATCHES), batch_size=2, stats=True)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in loader:
            with record_function("the step"):
                time.sleep(0.005)
    profiled.export_chrome_trace(str(tmp_path / "torch.json"))
    theirs = json.loads((tmp_path / "torch.json").read_text())
    ours, events = saved(loader.epoch_stats(), tmp_path)
    assert ours["baseTimeNanoseconds"] == theirs["baseTimeNanoseconds"]
    steps = sorted(event["ts"] for event in theirs["traceEvents"] if event.get("name") == "the step")
    callers = sorted(event["ts"] for event in events["main process", "caller"])
    assert len(steps) == len(callers) == BATCHES
    # In microseconds: the step begins right after the batch was returned.
    assert sorted(step - caller for step, caller in zip(steps, callers, strict=True))[BATCHES // 2] < 2000
    for step, caller in zip(steps, callers, strict=True):
        assert step >= caller - 100


def test_nothing_but_a_start(tmp_path):
    loader = DataLoader(Made(sleeping, 2 * BATCHES), batch_size=2, stats=True)
    iter(loader)
    content, events = saved(loader.epoch_stats(), tmp_path)
    assert not events
    assert [event["ph"] for event in content["traceEvents"]] == ["M"]
    with pytest.raises(OSError, match="missing"):
        loader.epoch_stats().save_trace(tmp_path / "missing" / "trace.json")
