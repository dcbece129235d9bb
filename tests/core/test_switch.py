"""``RINGLOADER=off``: every loader of the process is torch's own."""

import logging

import pytest
import torch
from torch.utils.data import dataloader as torch_dataloader

import ringloader
from ringloader import DataLoader, Dispatch, WorkerPool
from ringloader._features import spawn_server
from ringloader._torch import select_path
from small_datasets import Made

pytestmark = pytest.mark.rings_only

REASON = "RINGLOADER=off is set"
ITERATORS = {
    0: torch_dataloader._SingleProcessDataLoaderIter,
    2: torch_dataloader._MultiProcessingDataLoaderIter,
}


@pytest.fixture(autouse=True)
def _off(monkeypatch):
    monkeypatch.setenv("RINGLOADER", "off")
    monkeypatch.setattr(select_path, "_logged", set())


def drawn(index):
    return index, torch.rand(2)


def reset(_dataset, _info, _seeds):
    pass


def epochs(loader):
    torch.manual_seed(3)
    return [[(index.tolist(), drawn.tolist()) for index, drawn in loader] for _ in range(2)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("way", ["class", "install", "convert"])
def test_torchs_loader_runs_whole(way, workers):
    options = {"batch_size": 2, "shuffle": True, "num_workers": workers}
    theirs = torch.utils.data.DataLoader(Made(drawn, 6), **options)
    ours = DataLoader(Made(drawn, 6), **options) if way == "class" else theirs
    if way == "convert":
        ours = ringloader.convert(theirs)
    if way == "install":
        with ringloader.installed():
            iterator, found = iter(ours), epochs(ours)
            report = ringloader.report(ours)
    else:
        iterator, found = iter(ours), epochs(ours)
        report = ringloader.report(ours)
    assert isinstance(iterator, ITERATORS[workers])
    del iterator
    assert found == epochs(theirs)
    assert (report.path, report.reason) == ("torch", REASON)


def test_no_server_starts_for_workers_that_torch_spawns(monkeypatch):
    made = []
    monkeypatch.setattr(spawn_server, "_Server", lambda: made.append(None))
    monkeypatch.setattr(spawn_server, "_running", lambda: None)
    DataLoader(Made(drawn, 6), num_workers=1, multiprocessing_context="spawn")
    assert made == []
    monkeypatch.delenv("RINGLOADER")
    DataLoader(Made(drawn, 6), num_workers=1, multiprocessing_context="spawn")
    assert len(made) == 1


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"on_error": "skip"}, "on_error"),
        ({"on_error": "skip", "num_workers": 0}, "on_error"),
        ({"worker_reset_fn": reset}, "worker_reset_fn"),
        ({"worker_reset_fn": reset, "num_workers": 0}, "worker_reset_fn"),
        ({"seeding": "epoch"}, "seeding"),
        ({"seeding": "sample"}, "seeding"),
        ({"seeding": "batch", "num_workers": 0}, "seeding"),
        ({"dataset": Dispatch(range(4))}, "a Dispatch as dataset"),
    ],
)
def test_options_that_decide_which_batches_come_are_an_error_that_names_the_variable(options, names):
    loader = DataLoader(**{"dataset": Made(drawn, 6), "num_workers": 1, **options})
    with pytest.raises(RuntimeError) as caught:
        iter(loader)
    assert str(caught.value) == f"{names} cannot take effect where torch's own loader runs: {REASON}"


def test_threads_become_processes_and_speed_is_left_out_each_said_once(caplog):
    caplog.set_level(logging.WARNING, "ringloader")
    for _ in range(2):
        loader = DataLoader(Made(drawn, 6), num_workers=1, worker_method="thread", watchdog=5.0)
        iterator = iter(loader)
        assert iterator._workers[0].pid > 0
        assert len(list(iterator)) == 6
    assert len(caplog.messages) == 2
    assert {
        message.split(" has no effect")[0].removeprefix("ringloader: ") for message in caplog.messages
    } == {
        "worker_method",
        "watchdog",
    }


def test_options_that_decide_where_batches_arrive_keep_their_meaning():
    with WorkerPool(2) as pool:
        loader = DataLoader(
            torch.arange(5),
            batch_size=2,
            worker_pool=pool,
            last_batch="rollover",
            prefetch_factor=3,
            device="cpu",
            device_transform=lambda batch: batch + 1,
        )
        assert [batch.tolist() for batch in loader] == [[1, 2], [3, 4]]
        assert [batch.tolist() for batch in loader] == [[5, 1], [2, 3], [4, 5]]
        assert loader.num_workers == 2


@pytest.mark.parametrize("value", ["0", "false", "False", "OFF", "no"])
def test_other_words_for_off(monkeypatch, value):
    monkeypatch.setenv("RINGLOADER", value)
    loader = DataLoader(Made(drawn, 6))
    iter(loader)
    report = ringloader.report(loader)
    assert (report.path, report.reason) == ("torch", f"RINGLOADER={value} is set")


@pytest.mark.parametrize("value", ["2", "torch"])
def test_a_value_without_a_meaning_is_an_error(monkeypatch, value):
    monkeypatch.setenv("RINGLOADER", value)
    with pytest.raises(ValueError, match=f"RINGLOADER='{value}': set it to off"):
        iter(DataLoader(Made(drawn, 6)))


@pytest.mark.parametrize("value", ["", "on", "1", "True", "yes"])
def test_on_is_the_default(monkeypatch, value):
    monkeypatch.setenv("RINGLOADER", value)
    loader = DataLoader(Made(drawn, 6))
    iter(loader)
    assert ringloader.report(loader).path == "single-process"


def test_doctor_says_so():
    (path,) = [finding for finding in ringloader.doctor(rate=False).findings if finding.subject == "path"]
    assert (path.value, path.verdict) == ("torch", "note")
    assert REASON in path.meaning


def test_doctor_names_a_value_without_a_meaning(monkeypatch):
    monkeypatch.setenv("RINGLOADER", "torch")
    found = ringloader.doctor()
    (path,) = [finding for finding in found.findings if finding.subject == "path"]
    assert path.verdict == "problem"
    assert "RINGLOADER='torch'" in path.value
    assert path in found.problems
