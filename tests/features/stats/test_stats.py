"""``stats=True``: the times of an epoch, on all paths, against what the dataset has measured itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import ringloader
from faults.failing_datasets import Numbers
from ringloader import DataLoader, WorkerPool

pytestmark = pytest.mark.rings_only

BATCHES = 16
SLEEP = 0.004


class Measured:
    """Seconds that were slept, by what for and by the worker, in memory that all processes share."""

    def __init__(self):
        self.seconds = torch.zeros(2, 4, dtype=torch.float64).share_memory_()

    def sleep(self, what, seconds=SLEEP):
        info = get_worker_info()
        begun = time.monotonic()
        time.sleep(seconds)
        self.seconds[what, 0 if info is None else info.id] += time.monotonic() - begun


class Sleeping(Dataset):
    def __init__(self, measured):
        self.measured = measured

    def __len__(self):
        return 2 * BATCHES

    def __getitem__(self, index):
        self.measured.sleep(0)
        return torch.full((4,), float(index))


class Streaming(IterableDataset):
    def __init__(self, measured):
        self.measured = measured

    def __iter__(self):
        info = get_worker_info()
        for index in range(2 * BATCHES // (1 if info is None else info.num_workers)):
            self.measured.sleep(0)
            yield torch.full((4,), float(index))


class Collating:
    def __init__(self, measured):
        self.measured = measured

    def __call__(self, batch):
        self.measured.sleep(1)
        return torch.stack(batch)


HOW = {
    "processes": {"num_workers": 2},
    "spawned": {"num_workers": 2, "multiprocessing_context": "spawn"},
    "threads": {"num_workers": 2, "worker_method": "thread"},
    "none": {},
    "unordered": {"num_workers": 2, "in_order": False},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "main_prefetch": {"num_workers": 2, "main_prefetch": 2},
    "seeded": {"num_workers": 2, "seeding": "sample"},
    "skipping": {"num_workers": 2, "on_error": "skip"},
    "none skipping": {"on_error": "skip"},
}
PATHS = {"threads": "threads", "none": "single-process", "none skipping": "single-process"}


def slept(loader, batches=None):
    """Iterates, sleeps in the loop, and returns the seconds that were slept between the batches."""
    caller = 0.0
    iterator = iter(loader)
    for number, _ in enumerate(iterator):
        if number + 1 == batches:
            break
        begun = time.monotonic()
        time.sleep(SLEEP)
        caller += time.monotonic() - begun
    return caller


def assert_close(seconds, measured):
    assert measured <= seconds * 1.001 + 1e-4
    # 15 %, and what a busy machine takes between two looks at a clock.
    assert seconds <= measured * 1.15 + 0.05


@pytest.mark.parametrize("make", [Sleeping, Streaming])
@pytest.mark.parametrize("how", HOW)
def test_times_are_those_that_the_dataset_has_measured(make, how):
    measured = Measured()
    loader = DataLoader(make(measured), batch_size=2, collate_fn=Collating(measured), stats=True, **HOW[how])
    caller = slept(loader)
    if how == "persistent":
        measured.seconds.zero_()
        caller = slept(loader)
    stats = loader.epoch_stats()
    loader.shutdown()
    assert (stats.path, stats.batches) == (PATHS.get(how, "native"), BATCHES)
    assert stats.startup + stats.waiting + stats.caller == pytest.approx(stats.seconds)
    assert_close(stats.caller, caller)
    assert sum(worker.batches for worker in stats.workers) == BATCHES
    assert [worker.id for worker in stats.workers] == list(range(max(loader.num_workers, 1)))
    for worker in stats.workers:
        dataset, collate = measured.seconds[:, worker.id].tolist()
        # The batch that finds the end of a stream is none.
        assert_close(worker.dataset, dataset)
        assert_close(worker.collate, collate)
        assert 0 < worker.cpu < dataset + collate
        parts = worker.idle + worker.dataset + worker.collate + worker.send + worker.room
        assert parts <= stats.seconds + 0.01
    longest = stats.slowest[0]
    assert len(stats.slowest) == 10
    assert longest.seconds == max(one.seconds for one in stats.slowest) >= 2 * SLEEP
    assert longest.worker in range(max(loader.num_workers, 1))
    if make is Sleeping:
        assert all(one.indices == [2 * one.batch, 2 * one.batch + 1] for one in stats.slowest)
    else:
        assert {one.indices for one in stats.slowest} == {None}


def test_workers_of_a_pool():
    measured = Measured()
    with WorkerPool(2) as pool:
        loader = DataLoader(Sleeping(measured), batch_size=2, worker_pool=pool, stats=True)
        for _ in range(2):
            measured.seconds.zero_()
            slept(loader)
            stats = loader.epoch_stats()
            for worker in stats.workers:
                assert_close(worker.dataset, measured.seconds[0, worker.id].item())
            assert sum(worker.batches for worker in stats.workers) == BATCHES


def test_torchs_own_loader_shows_what_the_main_process_sees(monkeypatch):
    monkeypatch.setenv("RINGLOADER", "off")
    for workers in (0, 2):
        measured = Measured()
        loader = DataLoader(Sleeping(measured), batch_size=2, num_workers=workers, stats=True)
        caller = slept(loader)
        stats = loader.epoch_stats()
        assert (stats.path, stats.batches, stats.workers) == ("torch", BATCHES, ())
        assert_close(stats.caller, caller)
        assert stats.verdict.kind == "unknown"
        assert stats.slowest == ()


def test_loaders_of_other_classes_have_it_by_install():
    measured = Measured()
    for workers in (0, 2):
        loader = torch.utils.data.DataLoader(Sleeping(measured), batch_size=2, num_workers=workers)
        with ringloader.installed(stats=True):
            slept(loader)
            assert ringloader.epoch_stats(loader).batches == BATCHES


@pytest.mark.parametrize("workers", [0, 2])
def test_figures_of_a_former_epoch_are_not_those_of_the_last(workers):
    loader = torch.utils.data.DataLoader(Numbers(8), batch_size=2, num_workers=workers)
    for options in ({}, {"main_prefetch": 1} if workers else {"watchdog": 5}):
        with ringloader.installed(stats=True):
            list(loader)
            assert ringloader.epoch_stats(loader).batches == 4
            ringloader.install(**options)
            list(loader)
            with pytest.raises(RuntimeError, match="no times are known"):
                ringloader.epoch_stats(loader)
            ringloader.install(stats=True)
            list(loader)
    # An epoch of torch's own may have run since, which nobody has seen.
    with pytest.raises(RuntimeError, match="no times are known"):
        ringloader.epoch_stats(loader)
    with ringloader.installed(stats=True), pytest.raises(RuntimeError, match="no times are known"):
        ringloader.epoch_stats(loader)


def test_workers_that_stay_are_seen_after_uninstall_too():
    loader = torch.utils.data.DataLoader(Numbers(8), 2, num_workers=1, persistent_workers=True)
    with ringloader.installed(stats=True):
        list(loader)
    list(loader)
    assert ringloader.epoch_stats(loader).batches == 4
    loader._iterator = None


@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_batches_draws_and_order(workers):
    def made(**options):
        torch.manual_seed(7)
        loader = DataLoader(Numbers(24), batch_size=5, shuffle=True, num_workers=workers, **options)
        return [batch.tolist() for batch in loader], torch.rand(1).item()

    assert made(stats=True) == made()


def test_without_the_option_it_says_so():
    loader = DataLoader(Numbers(4))
    list(loader)
    with pytest.raises(RuntimeError, match="pass stats=True"):
        loader.epoch_stats()
    with pytest.raises(RuntimeError, match="pass stats=True"):
        ringloader.epoch_stats(object())


def test_before_the_first_epoch_it_says_so():
    with pytest.raises(RuntimeError, match="iterate the loader before"):
        DataLoader(Numbers(4), stats=True).epoch_stats()


def test_an_epoch_that_was_left_counts_until_its_last_batch():
    loader = DataLoader(Numbers(40), batch_size=2, stats=True, num_workers=2)
    caller = slept(loader, batches=5)
    time.sleep(0.2)
    stats = loader.epoch_stats()
    assert stats.batches == 5
    assert_close(stats.caller, caller)
    assert stats == loader.epoch_stats()


def test_figures_of_a_running_epoch_do_not_change():
    loader = DataLoader(Numbers(40), batch_size=2, stats=True)
    iterator = iter(loader)
    next(iterator)
    stats = loader.epoch_stats()
    next(iterator)
    assert (stats.batches, loader.epoch_stats().batches) == (1, 2)
    with pytest.raises(AttributeError):
        stats.batches = 3


@pytest.mark.parametrize("options", [{}, {"worker_method": "thread"}])
def test_results_of_an_abandoned_epoch_are_not_counted(options):
    measured = Measured()
    loader = DataLoader(
        Sleeping(measured), batch_size=2, num_workers=2, persistent_workers=True, stats=True, **options
    )
    next(iter(loader))
    slept(loader)
    stats = loader.epoch_stats()
    loader.shutdown()
    assert sum(worker.batches for worker in stats.workers) == stats.batches == BATCHES


def test_a_sampler_with_indices_that_are_no_numbers():
    class Words(Dataset):
        def __getitem__(self, word):
            return len(word)

    loader = DataLoader(Words(), sampler=["a", "bb", "ccc", "dddd"], batch_size=2, num_workers=1, stats=True)
    assert [batch.tolist() for batch in loader] == [[1, 2], [3, 4]]
    stats = loader.epoch_stats()
    assert sorted(one.indices for one in stats.slowest) == [["a", "bb"], ["ccc", "dddd"]]
    assert stats.to_dict()["slowest"][0]["indices"] in [["a", "bb"], ["ccc", "dddd"]]


@pytest.mark.parametrize("index", [{(0, 1): 2}, float("nan"), threading.Lock()])
def test_an_index_that_json_does_not_know_is_text(index):
    class Ones(Dataset):
        def __getitem__(self, _index):
            return torch.ones(1)

    loader = DataLoader(Ones(), sampler=[index], batch_size=None, stats=True)
    list(loader)
    (slowest,) = json.loads(json.dumps(loader.epoch_stats().to_dict(), allow_nan=False))["slowest"]
    assert slowest["indices"] == repr(index)


def test_a_sampler_that_sleeps_is_the_main_processs_work():
    measured = Measured()

    class Sampler(torch.utils.data.Sampler):
        def __iter__(self):
            for index in range(20):
                measured.sleep(0)
                yield index

    for workers in (0, 1):
        measured.seconds.zero_()
        loader = DataLoader(Numbers(20), sampler=Sampler(), batch_size=2, num_workers=workers, stats=True)
        list(loader)
        assert_close(loader.epoch_stats().main["index"], measured.seconds[0, 0].item())


class SlowToBegin(torch.utils.data.Sampler):
    def __iter__(self):
        time.sleep(0.2)
        return iter(range(20))


KEPT = {"num_workers": 1, "persistent_workers": True}


@pytest.mark.parametrize("switch", ["", "off"])
@pytest.mark.parametrize("options", [{}, KEPT, {**KEPT, "worker_method": "thread"}])
def test_an_epoch_begins_before_its_sampler_does(monkeypatch, switch, options):
    monkeypatch.setenv("RINGLOADER", switch)
    loader = DataLoader(Numbers(20), None, sampler=SlowToBegin(), stats=True, **options)
    startups = []
    for _ in range(2):
        list(loader)
        startups.append(loader.epoch_stats().startup)
    loader.shutdown()
    assert min(startups) > 0.2


@pytest.mark.parametrize("switch", ["", "off"])
@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2}, {"num_workers": 2, "worker_method": "thread"}, {"on_error": "skip"}]
)
def test_a_transform_is_the_main_processs_work(monkeypatch, switch, options):
    if switch and "on_error" in options:
        pytest.skip("torch's own loader has no on_error")
    monkeypatch.setenv("RINGLOADER", switch)
    measured = Measured()

    def transform(batch):
        measured.sleep(0)
        return batch + 1

    loader = DataLoader(Numbers(20), 2, device="cpu", device_transform=transform, stats=True, **options)
    assert [int(batch.flatten()[0]) for batch in loader] == list(range(1, 21, 2))
    assert_close(loader.epoch_stats().main["place"], measured.seconds[0, 0].item())


def test_an_oversize_batch_has_its_moments_too():
    class Large(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.full((1 << 20,), float(index))

    loader = DataLoader(Large(), num_workers=1, stats=True, max_shared_bytes=3 << 20)
    for number, batch in enumerate(loader):
        assert batch.unique().tolist() == [number]
    assert ringloader.report(loader).counters["oversize"] > 0
    assert [worker.batches for worker in loader.epoch_stats().workers] == [4]


def test_errors_of_samples_are_raised_as_without(harness_error="7"):
    class Failing(Numbers):
        def __getitem__(self, index):
            if index == 7:
                raise ValueError(index)
            return super().__getitem__(index)

    for options in ({}, {"num_workers": 2}, {"num_workers": 2, "worker_method": "thread"}):
        loader = DataLoader(Failing(20), batch_size=2, stats=True, **options)
        with pytest.raises(ValueError, match=harness_error):
            list(loader)
        assert loader.epoch_stats().batches == 3


@pytest.mark.parametrize("make", [Sleeping, Streaming])
def test_a_failed_fetch_counts_on_all_paths(make):
    class Failing(make):
        def __getitem__(self, index):
            batch = super().__getitem__(index)
            return 1 / 0 if index == 7 else batch

        def __iter__(self):
            for index, batch in enumerate(super().__iter__()):
                yield 1 / 0 if index == 7 else batch

    for options in ({}, {"num_workers": 1}, {"num_workers": 1, "worker_method": "thread"}):
        measured = Measured()
        sampler = range(8) if make is Sleeping else None
        loader = DataLoader(Failing(measured), sampler=sampler, batch_size=2, stats=True, **options)
        with pytest.raises(ZeroDivisionError):
            list(loader)
        stats = loader.epoch_stats()
        (worker,) = stats.workers
        assert (stats.batches, worker.batches) == (3, 4)
        assert_close(worker.dataset, measured.seconds[0, 0].item())
        assert {one.batch for one in stats.slowest} == {0, 1, 2, 3}


def test_text_html_and_json():
    loader = DataLoader(Sleeping(Measured()), batch_size=2, num_workers=2, stats=True)
    slept(loader)
    stats = loader.epoch_stats()
    text = str(stats)
    assert text.splitlines()[-1] == f"{stats.verdict.kind}: {stats.verdict.text}"
    assert f"{stats.batches} batches in {stats.seconds:.3f} s" in text
    for worker in stats.workers:
        assert any(
            line.split()[:2] == [str(worker.id), str(worker.batches)] and f"{worker.dataset:.3f}" in line
            for line in text.splitlines()
        )
    html = stats._repr_html_()
    assert html.count("worker ") == 2
    assert f"dataset {stats.workers[0].dataset:.3f} s" in html
    found = json.loads(json.dumps(stats.to_dict()))
    assert found["workers"][1]["dataset"] == stats.workers[1].dataset
    assert found["verdict"]["text"] == stats.verdict.text
    assert set(found) == {
        "path", "num_workers", "batches", "seconds", "startup", "waiting", "caller", "main", "workers",
        "slowest", "verdict", "changes",
    }  # fmt: skip


class DiesOnce(Numbers):
    def __init__(self, count, marker):
        super().__init__(count)
        self.marker = marker

    def __getitem__(self, index):
        if index == 9 and not self.marker.exists():
            self.marker.touch()
            os._exit(1)
        return torch.tensor([index])


def test_a_lost_worker_loses_only_its_own(tmp_path):
    dataset = DiesOnce(40, tmp_path / "died")
    loader = DataLoader(dataset, batch_size=2, num_workers=2, restart_workers=1, stats=True)
    assert torch.cat(list(loader)).flatten().tolist() == list(range(40))
    assert dataset.marker.exists()
    stats = loader.epoch_stats()
    assert [worker.batches for worker in stats.workers] == [10, 10]
    assert all(0 < worker.dataset < stats.seconds for worker in stats.workers)


FIRST_EPOCH = """
import sys
import time
import torch
from ringloader import DataLoader

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "ringloader._common.pickling":
            time.sleep(0.5)

loader = DataLoader(torch.arange(8.0), num_workers={workers}, stats=True)
sys.meta_path.insert(0, Slow())
next(iter(loader))
stats = loader.epoch_stats()
assert stats.startup > 0.5, stats
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_the_first_epoch_of_a_process_begins_with_iter(workers):
    """What is imported for the first batch counts as the epoch's start."""
    subprocess.run([sys.executable, "-c", FIRST_EPOCH.format(workers=workers)], check=True)


class Unshown:
    """An index whose text cannot be had."""

    def __init__(self, number):
        self.number = number

    def __repr__(self):
        raise KeyError(self.number)

    def tolist(self):
        raise OSError


class Keyed(Dataset):
    def __getitem__(self, index):
        if index.number == 2:
            raise LookupError("not there")
        return index.number


@pytest.mark.parametrize("workers", [0, 1])
def test_an_index_that_cannot_be_shown_stops_nothing(workers):
    sampler = [[Unshown(number)] for number in range(4)]
    loader = DataLoader(
        Keyed(), batch_sampler=sampler, num_workers=workers, stats=True, on_error="skip", watchdog=100
    )
    assert [batch.tolist() for batch in loader] == [[0], [1], [3]]
    stats = loader.epoch_stats()
    assert str(stats) and "cannot be shown (KeyError)" in json.dumps(stats.to_dict())
    assert len(loader.errors) == 1
