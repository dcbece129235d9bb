"""The verdict on an epoch: programs whose limit is known, as a sleep makes it, and what the change brings."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import pickle
import re
import time
import weakref
from multiprocessing import util
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ringloader import DataLoader, Dispatch, EpochStats, WorkerPool, WorkerStats
from ringloader._features.stats import recording
from ringloader._features.stats.epoch import Model
from ringloader._features.stats.verdict import Judge, Setting
from ringloader._torch import internals
from small_datasets import Made

pytestmark = pytest.mark.rings_only


class Sleeping(Dataset):
    """A batch for each index, with its own sleep.

    Args:
        seconds: The sleep of each batch.
        size: The numbers in a batch.
    """

    def __init__(self, seconds, size=1):
        self.seconds = seconds
        self.size = size

    def __len__(self):
        return len(self.seconds)

    def __getitem__(self, index):
        time.sleep(self.seconds[index])
        return torch.full((self.size,), float(index))


class Streaming(IterableDataset):
    def __init__(self, seconds):
        self.seconds = seconds

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for seconds in self.seconds[first::step]:
            time.sleep(seconds)
            yield torch.zeros(1)


def slow_in_one_worker(index):
    """Batches that take one worker of several much longer than the others."""
    time.sleep(0.04 if get_worker_info().id == 1 else 0.006)
    return torch.full((1,), float(index))


class SlowToSend:
    """Sleeps when it is pickled, and when it is unpickled."""

    def __init__(self, pickling, unpickling):
        self.pickling = pickling
        self.unpickling = unpickling

    def __reduce__(self):
        time.sleep(self.pickling)
        return slowly, (self.pickling, self.unpickling)


def slowly(pickling, unpickling):
    time.sleep(unpickling)
    return SlowToSend(pickling, unpickling)


def slow_to_send(_batch):
    return SlowToSend(0.015, 0.0)


def slow_to_decode(_batch):
    return SlowToSend(0.0, 0.015)


def slow_to_collate(batch):
    time.sleep(0.02)
    return torch.stack(batch)


class SlowSampler(torch.utils.data.Sampler):
    def __iter__(self):
        for index in range(40):
            time.sleep(0.01)
            yield index


def epoch(dataset, step, **options):
    """Returns the figures of the shortest of some epochs. A busy machine adds to the others.

    Workers that stay are there before the epochs that count.
    """
    loader = DataLoader(dataset, stats=True, **options)
    if loader.persistent_workers:
        next(iter(loader))
    found = []
    for _ in range(2 if loader.persistent_workers or not loader.num_workers else 1):
        for _ in loader:
            time.sleep(step)
        found.append(loader.epoch_stats())
    loader.shutdown()
    return min(found, key=lambda stats: stats.seconds)


EVEN = [0.02] * 40
# Each worker of four in turn has one that is long.
UNEVEN = [0.15 if index % 9 == 4 else 0.003 for index in range(72)]
# While one of two workers is slow, the other one is fast, and would have to keep what it makes.
BURSTS = [0.03 if (index // 8) % 2 == index % 2 else 0.0 for index in range(48)]
ONE = {"batch_size": None}
KEPT = {"persistent_workers": True, "batch_size": None}

CASES = {
    "dataset": ("dataset", Sleeping(EVEN), 0.004, {"num_workers": 2, **KEPT}, "num_workers"),
    "dataset, no workers": ("dataset", Sleeping(EVEN), 0.01, ONE, "num_workers"),
    "dataset, threads": (
        "dataset", Sleeping(EVEN), 0.004, {"num_workers": 2, "worker_method": "thread", **KEPT},
        "num_workers",
    ),
    "dataset, a stream": ("dataset", Streaming(EVEN), 0.01, {"num_workers": 1, **KEPT}, "num_workers"),
    "dataset, unordered": (
        "dataset", Sleeping(EVEN), 0.004, {"num_workers": 2, "in_order": False, **KEPT}, "num_workers",
    ),
    "collate": (
        "collate", Sleeping([0.0] * 80), 0.005,
        {"num_workers": 1, "collate_fn": slow_to_collate, **KEPT, "batch_size": 2}, "num_workers",
    ),
    "collate, no workers": (
        "collate", Sleeping([0.0] * 80), 0.01, {"collate_fn": slow_to_collate, "batch_size": 2},
        "num_workers",
    ),
    "send": (
        "send", Sleeping([0.002] * 40), 0.003, {"num_workers": 1, "collate_fn": slow_to_send, **KEPT},
        "worker_method",
    ),
    "main, decoding": (
        "main", Sleeping([0.001] * 40), 0.015, {"num_workers": 1, "collate_fn": slow_to_decode, **KEPT},
        "main_prefetch",
    ),
    "order": ("order", Sleeping(UNEVEN), 0.002, {"num_workers": 4, **KEPT}, "in_order"),
    "order, a slow worker": (
        "order", Made(slow_in_one_worker, 160), 0.001, {"num_workers": 3, **KEPT}, "in_order",
    ),
    "memory": (
        "memory", Sleeping(BURSTS, size=1 << 18), 0.001,
        {"num_workers": 2, "max_shared_bytes": 9 << 18, "prefetch_factor": 8, **KEPT}, "max_shared_bytes",
    ),
}  # fmt: skip


# A real epoch: what limits it depends on how fast the machine is, and on other programs.
real_time = pytest.mark.slow


if not internals.counts_tasks_per_worker():
    # torch 2.6 goes round the workers in any order, so no change is suggested.
    del CASES["order"], CASES["order, a slow worker"]


@real_time
def test_no_order_is_suggested_where_workers_have_turns_in_any(monkeypatch):
    monkeypatch.setattr(internals, "counts_tasks_per_worker", lambda: False)
    verdict = epoch(Sleeping(UNEVEN), 0.002, num_workers=4, **KEPT).verdict
    assert (verdict.kind, verdict.change) == ("order", {})


@real_time
@pytest.mark.parametrize("case", CASES)
def test_the_change_helps(case):
    for _ in range(2):
        # On a busy machine an epoch may take any time.
        with contextlib.suppress(AssertionError):
            return _check_change(*CASES[case])
    return _check_change(*CASES[case])


def _check_change(kind, dataset, step, options, changes):
    before = epoch(dataset, step, **options)
    assert before.verdict.kind == kind, before
    assert list(before.verdict.change) == [changes]
    for name, value in before.verdict.change.items():
        assert f"{name}={value!r}" in before.verdict.text
    # Of workers that are there: how long a start takes that was not measured is not known.
    after = epoch(dataset, step, **{**options, **before.verdict.change, "persistent_workers": True})
    brought = before.seconds / after.seconds
    assert brought > 1.2
    if changes == "num_workers":
        assert before.verdict.gain == pytest.approx(brought, rel=0.3), (before, after)
    else:
        assert before.verdict.gain is None


@real_time
def test_one_worker_holds_no_other_up():
    stats = epoch(Sleeping([0.0] * 8 + [0.1] * 4 + [0.0] * 12), 0.01, num_workers=1, **KEPT)
    assert stats.verdict.kind != "order", stats
    assert "in_order" not in stats.verdict.change


@real_time
def test_a_part_of_the_time_in_next_is_no_more_than_all_of_it():
    stats = epoch(Sleeping([0.3] + [0.01] * 20), 0.0, **ONE)
    assert stats.verdict.kind == "dataset"
    (part,) = re.findall(r"(\d+)% of the time in next", stats.verdict.text)
    assert 90 <= int(part) <= 100, stats.verdict.text


@real_time
def test_a_step_that_is_the_limit_has_no_change():
    for options in ({"num_workers": 2, **KEPT}, ONE):
        stats = epoch(Sleeping([0.0005] * 40), 0.02, **options)
        assert stats.verdict.kind == "caller", stats
        assert (stats.verdict.gain, dict(stats.verdict.change)) == (None, {})
        assert "The training step is the limit" in stats.verdict.text


class Starting(Sleeping):
    """Keeps a worker from its start for long."""

    def __call__(self, _worker):
        time.sleep(0.5)


@real_time
def test_a_start_that_is_the_limit():
    dataset = Starting([0.005] * 8)
    stats = epoch(dataset, 0.005, num_workers=2, batch_size=None, worker_init_fn=dataset)
    # Before "unknown": there are too few batches to tell more.
    assert (stats.verdict.kind, stats.verdict.change) == ("startup", {"persistent_workers": True}), stats
    loader = DataLoader(
        dataset, num_workers=2, batch_size=None, worker_init_fn=dataset, stats=True, persistent_workers=True
    )
    list(loader)
    first = loader.epoch_stats()
    assert (first.verdict.kind, first.verdict.change) == ("startup", {})
    for _ in loader:
        time.sleep(0.005)
    after = loader.epoch_stats()
    loader.shutdown()
    assert after.verdict.kind == "unknown"
    assert stats.seconds / after.seconds > 2


class StartingOneByOne(Sleeping):
    """Keeps the second worker from its start for longer."""

    def __call__(self, worker):
        time.sleep(0.6 + 0.3 * worker)


@real_time
def test_the_start_of_each_worker_counts():
    dataset = StartingOneByOne([0.005] * 10)
    options = {"num_workers": 2, "batch_size": None, "worker_init_fn": dataset}
    before = epoch(dataset, 0.02, **options)
    after = epoch(dataset, 0.02, **options, **before.verdict.change)
    assert before.seconds / after.seconds > 1.5, (before, after)
    # Where the start is a small part, it is no wait for a slow loader.
    dataset = StartingOneByOne([0.005] * 90)
    long = epoch(dataset, 0.02, **{**options, "worker_init_fn": dataset})
    assert long.waiting > 0.1 * long.caller
    assert long.verdict.kind == "caller", long


class EndsLate:
    """Keeps a worker from its end."""

    def __call__(self, _worker):
        util.Finalize(None, time.sleep, args=(0.5,), exitpriority=0)


@real_time
def test_the_end_of_workers_is_no_wait_for_the_loader():
    stats = epoch(Sleeping([0.0] * 80), 0.02, num_workers=1, batch_size=None, worker_init_fn=EndsLate())
    assert stats.waiting > 0.2 * stats.caller
    assert stats.verdict.kind == "caller", stats


@pytest.mark.parametrize(
    "options",
    [
        {"max_shared_bytes": 1 << 28},
        {"restart_workers": 1},
        {"multiprocessing_context": "fork"},
        {"pin_memory": True},
        {"device": "cpu"},
    ],
)
@pytest.mark.parametrize("collate_fn", [slow_to_send, slow_to_decode])
def test_a_loader_takes_the_change(options, collate_fn):
    given = {"num_workers": 1, "batch_size": None, "collate_fn": collate_fn, **options}
    change = epoch(Sleeping([0.001] * 12), 0.0, **given).verdict.change
    DataLoader(Sleeping([]), **{**given, **change})


@real_time
def test_a_sampler_that_is_the_limit():
    for options in ({"num_workers": 1, **KEPT}, ONE):
        stats = epoch(Sleeping([0.0] * 40), 0.002, sampler=SlowSampler(), **options)
        assert (stats.verdict.kind, stats.verdict.change) == ("main", {}), stats
        assert "reads the sampler" in stats.verdict.text


def test_too_few_batches_tell_nothing():
    stats = epoch(Sleeping([0.01] * 9), 0.0, batch_size=None)
    assert (stats.verdict.kind, stats.verdict.gain) == ("unknown", None)
    assert "9 batches are too few to tell" in stats.verdict.text
    assert "dataset (" in stats.verdict.text


def model(**given):
    plain = {
        "batches": 100,
        "caller": 0.01,
        "main": 0.0,
        "work": 0.1,
        "cpu": 0.0,
        "start": 0.0,
        "cores": 4,
        "handing": 0.0,
    }
    return Model(**{**plain, **given})


def test_the_model_of_workers_that_wait():
    assert model().seconds(0) == pytest.approx(0.1 + 100 * 0.11)
    assert model().seconds(2) == pytest.approx(0.1 + 100 * 0.05)
    assert model().seconds(20) == pytest.approx(0.1 + 100 * 0.01)
    # As good as the ten that hide behind the step.
    assert model().fewest_workers() == 10


def test_the_model_of_workers_that_compute():
    # More than the cores bring nothing.
    assert model(cpu=0.1).seconds(4) == model(cpu=0.1).seconds(8) == pytest.approx(0.1 + 100 * 0.025)
    assert model(cpu=0.1).fewest_workers() == 4


def test_the_model_of_starts():
    assert model(start=1.0).seconds(10) == pytest.approx(10 + 0.1 + 100 * 0.01)
    # Each more costs more than it brings.
    assert model(start=1.0).fewest_workers() == 3


def test_a_device_works_on_behind_the_hosts_time(monkeypatch):
    monkeypatch.setattr(recording, "_pins", lambda loader: loader.pin_memory)
    loader = DataLoader(Sleeping([0.0] * 20), stats=True, pin_memory=True)
    list(loader)
    assert "a device works on behind it" in loader.epoch_stats().verdict.text
    loader = DataLoader(Sleeping([0.0] * 20), stats=True)
    list(loader)
    assert "device" not in loader.epoch_stats().verdict.text


@pytest.mark.skipif(torch.accelerator.is_available(), reason="batches are pinned here")
def test_nothing_is_said_of_a_device_that_is_not_there():
    for options in ({"pin_memory": True}, {"device": "cpu"}):
        loader = DataLoader(Sleeping([0.0] * 20), stats=True, **options)
        list(loader)
        assert "device" not in loader.epoch_stats().verdict.text


def judged(seconds, dataset, setting=None, **of_worker):
    """Returns the verdict on 100,000 batches of one worker, or of none, without a step."""
    figures = {"idle": 0.0, "collate": 0.0, "send": 0.0, "room": 0.0, "cpu": dataset}
    plain = {
        "num_workers": 1,
        "may_be_unordered": True,
        "persistent_workers": True,
        "is_iterable": False,
        "moves": False,
        "is_dispatch": False,
        "worker_method": "multiprocessing",
        "may_use_threads": True,
        "may_prefetch": True,
        "most_workers": None,
        "cores": 4,
    }
    made_for = Setting(**plain | (setting or {}))
    stats = EpochStats(
        path="native",
        num_workers=made_for.num_workers,
        batches=100_000,
        seconds=seconds,
        startup=0.0,
        waiting=seconds,
        caller=0.0,
        main={"decode": 0.0, "place": 0.0, "index": 0.0},
        workers=(WorkerStats(id=0, batches=100_000, dataset=dataset, **figures | of_worker),),
        slowest=(),
        verdict=None,
        _trace=SimpleNamespace(fetches=list),
    )
    return Judge(stats, made_for, 0.0, 0).verdict()


def test_more_threads_are_not_said_to_help_a_dataset_that_computes():
    assert judged(30.0, 29.0).change == {"num_workers": 4}
    found = judged(30.0, 29.0, {"worker_method": "thread"})
    assert (found.kind, dict(found.change)) == ("dataset", {})
    assert "interpreter lock (processes would)" in found.text


@pytest.mark.parametrize("cpu", [29.0, 20.0, 12.0])
def test_no_more_workers_than_cores_are_advised_for_work_that_computes(cpu):
    """Another program may have a processor for which a worker is ready: that looks like waiting."""
    advised = judged(30.0, 29.0, cpu=cpu).change.get("num_workers", 1)
    assert advised <= 4
    assert judged(30.0, 29.0, {"cores": 1}, cpu=cpu).change == {}
    assert judged(30.0, 29.0, cpu=2.0).change["num_workers"] > 4, "it waits for a store"


def test_many_samples_at_once_are_advised_where_workers_wait():
    loader = DataLoader(range(4), num_workers=1, stats=True)
    list(loader)
    assert [worker.under_way for worker in loader.epoch_stats().workers] == [1]
    advice = "worker_concurrency=16"
    assert advice in judged(30.0, 29.0, {"may_be_at_once": True}, cpu=2.0).text
    assert advice not in judged(30.0, 29.0, {"may_be_at_once": True}, cpu=20.0).text, "it computes"
    assert advice not in judged(30.0, 29.0, cpu=2.0).text, "it is used, or the dataset is iterable"


def test_workers_are_not_said_to_help_batches_that_take_less_than_their_way():
    none = {"num_workers": 0}
    assert judged(1.5, 1.4, none).change == {}
    assert judged(15, 14, none).change == {"num_workers": 4}


def quick(workers):
    """Returns the figures of the shortest of some epochs of batches that cost next to nothing."""
    found = []
    dataset = list(torch.zeros(10_000, 1))
    for _ in range(3):
        with DataLoader(dataset, None, num_workers=workers, stats=True) as loader:
            for _ in loader:
                pass
            found.append(loader.epoch_stats())
    return min(found, key=lambda stats: stats.seconds)


def test_the_way_of_the_batches_is_the_limit():
    found = judged(6.0, 1.4, idle=4.0, send=0.2)
    assert (found.kind, found.change) == ("send", {"num_workers": 0})
    assert found.gain == pytest.approx(60 / 15, rel=0.01)
    assert "A batch takes 16 µs to make, and 60 µs to come" in found.text
    with_pool = judged(6.0, 1.4, {"most_workers": 2}, idle=4.0, send=0.2)
    # With a pool, 0 means as many workers as that has.
    assert with_pool.change == {"num_workers": 0, "worker_pool": None}
    # Without workers it would take longer; memory, and not its way, makes a large batch slow.
    for seconds, dataset in ((6.0, 7.0), (60.0, 30.0)):
        found = judged(seconds, dataset, idle=40.0)
        assert (found.kind, found.change) == ("unknown", {})


@real_time
def test_the_way_of_real_batches_is_the_limit():
    before, after = quick(2), quick(0)
    assert (before.verdict.kind, before.verdict.change) == ("send", {"num_workers": 0}), before
    brought = before.seconds / after.seconds
    assert brought > 1.2
    # Nobody sleeps here: a busy machine adds to both, and most to what passes between processes.
    assert 1.2 < before.verdict.gain < 3 * brought, (before, after)


def test_more_workers_do_not_help_a_dispatch():
    stats = epoch(Dispatch(Streaming([0.01] * 30)), 0.0, num_workers=1, batch_size=2)
    assert "num_workers" not in stats.verdict.change, stats


def test_no_more_workers_than_the_pool_has():
    with WorkerPool(2) as pool:
        loader = DataLoader(Sleeping([0.01] * 60), None, num_workers=1, worker_pool=pool, stats=True)
        for _ in range(2):
            list(loader)
        assert loader.epoch_stats().verdict.change == {"num_workers": 2}
        loader.shutdown()


def test_figures_are_copied_and_pickled():
    stats = epoch(Sleeping([0.01] * 12), 0.0, batch_size=None)
    assert copy.deepcopy(stats) == stats
    assert dataclasses.asdict(stats)["batches"] == 12
    sent = pickle.loads(pickle.dumps(stats))
    assert sent == stats and str(sent) == str(stats)
    with pytest.raises(RuntimeError, match="a pickle has no trace"):
        sent.save_trace("trace.json")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_cycle_through_the_collate_fn_goes(workers):
    class Trains:
        def __init__(self):
            self.loader = DataLoader(
                Sleeping([0.0] * 4), None, num_workers=workers, collate_fn=self.collate, stats=True
            )
            self.iterator = iter(self.loader)
            next(self.iterator)

        def collate(self, sample):
            return sample

    gone = weakref.ref(Trains())
    gc.collect()
    assert gone() is None
