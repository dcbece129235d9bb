"""Options where torch's own loader runs whole: which work, which are an error, which are left out."""

import logging

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import ringloader
from ringloader import DataLoader, Dispatch, WorkerPool
from ringloader._torch import select_path
from small_datasets import SharedStream

pytestmark = pytest.mark.rings_only

REASON = "the test wants it"


@pytest.fixture(autouse=True)
def _torchs_path(monkeypatch):
    monkeypatch.setattr(select_path, "reason_for_torch", lambda *_: select_path.Reason(REASON))
    monkeypatch.setattr(select_path, "_logged", set())
    # The time that torch waits for a worker whose results nobody took.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.WARNING, "ringloader")
    return lambda: caplog.messages


class Numbers(Dataset):
    epoch = None

    def __init__(self, count=6):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return index if self.epoch is None else index + 100 * self.epoch

    def set_epoch(self, epoch):
        self.epoch = epoch


def made(dataset=None, **options):
    options = {"batch_size": None, "num_workers": 2, **options}
    return DataLoader(Numbers() if dataset is None else dataset, **options)


def begun(loader):
    iterator = iter(loader)
    report = ringloader.report(iterator)
    assert (report.path, report.reason) == ("torch", REASON)
    return iterator


def taken(loader):
    return [int(batch) for batch in begun(loader)]


def reset(_dataset, _info, _seeds):
    pass


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"worker_reset_fn": reset}, "worker_reset_fn"),
        ({"seeding": "epoch"}, "seeding"),
        ({"seeding": "sample"}, "seeding"),
        ({"on_error": "skip"}, "on_error"),
        ({"on_error": ringloader.Retry()}, "on_error"),
        ({"dataset": Dispatch(range(4))}, "a Dispatch as dataset"),
        ({"on_error": "skip", "worker_reset_fn": reset}, "worker_reset_fn and on_error"),
    ],
)
def test_without_which_other_batches_would_come_is_an_error(options, names):
    torch.manual_seed(3)
    loader = made(**options)
    before = torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            iter(loader)
        assert str(caught.value) == f"{names} cannot take effect where torch's own loader runs: {REASON}"
    assert torch.equal(torch.get_rng_state(), before), "nothing was drawn"
    with pytest.raises(ValueError, match="no path is known"):
        ringloader.report(loader)


def test_threads_are_an_error(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(select_path, "reason_against_threads", lambda *_: select_path.Reason(REASON))
    with pytest.raises(RuntimeError) as caught:
        iter(made(worker_method="thread"))
    assert str(caught.value) == (f"worker_method='thread' cannot be used: {REASON}; leave worker_method out")


@pytest.mark.parametrize("options", [{"worker_reset_fn": reset}, {"on_error": "skip"}, {"seeding": "epoch"}])
def test_installed_options_are_an_error_too(options):
    loader = torch.utils.data.DataLoader(Numbers(), num_workers=1)
    with (
        ringloader.installed(**options),
        pytest.raises(RuntimeError, match="cannot take effect where torch's own loader runs"),
    ):
        iter(loader)
    assert len(list(loader)) == 6


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"restart_workers": 1}, "restart_workers"),
        ({"watchdog": 5.0}, "watchdog"),
        ({"max_shared_bytes": 1 << 24}, "max_shared_bytes"),
        ({"main_prefetch": 2}, "main_prefetch"),
        ({"prefetch_epochs": True, "persistent_workers": True}, "prefetch_epochs"),
        ({"device": "cpu", "device_prefetch": 3}, "device_prefetch"),
    ],
)
def test_what_changes_no_batch_is_left_out_and_that_is_said_once(options, name, said):
    for _ in range(2):
        loader = made(**options)
        assert taken(loader) == taken(loader) == list(range(6))
    assert said() == [f"ringloader: {name} has no effect where torch's own loader runs"]


@pytest.mark.parametrize(
    "options",
    [
        {"device": "cpu"},
        {"prefetch_factor": 3},
        {"last_batch": "keep", "batch_size": 1},
        {"persistent_workers": True},
        {"seed": None},
    ],
)
def test_of_what_works_nothing_is_said(options, said):
    loader = made(**options)
    assert taken(loader) == taken(loader) == list(range(6))
    assert said() == []


@pytest.mark.parametrize("persistent", [False, True])
def test_device_transform(persistent):
    loader = made(device="cpu", device_transform=lambda batch: batch + 1, persistent_workers=persistent)
    for _ in range(2):
        assert taken(loader) == list(range(1, 7))


@pytest.mark.parametrize("persistent", [False, True])
def test_rollover(persistent):
    loader = made(batch_size=4, last_batch="rollover", persistent_workers=persistent)
    assert [batch.tolist() for batch in begun(loader)] == [[0, 1, 2, 3]]
    assert [batch.tolist() for batch in begun(loader)] == [[4, 5, 0, 1], [2, 3, 4, 5]]


def test_the_number_of_workers_of_a_pool():
    with WorkerPool(2) as pool:
        loader = made(num_workers=0, worker_pool=pool)
        iterator = begun(loader)
        assert len(iterator._workers) == loader.num_workers == 2
        assert [int(batch) for batch in iterator] == list(range(6))


def test_set_epoch():
    loader = made()
    for epoch in (3, 1):
        loader.set_epoch(epoch)
        assert taken(loader) == [number + 100 * epoch for number in range(6)]


@pytest.mark.parametrize("persistent", [False, True])
def test_limit_and_pause(persistent):
    loader = made(persistent_workers=persistent)
    for _ in range(2):
        iterator = begun(loader)
        iterator.limit(4)
        assert [int(batch) for batch in iterator] == [0, 1, 2, 3]
        assert iterator.is_paused()
        iterator.resume()
        assert [int(batch) for batch in iterator] == [4, 5]


@pytest.mark.parametrize("persistent", [False, True])
def test_shutdown(persistent):
    with made(persistent_workers=persistent) as loader:
        iterator = begun(loader)
        next(iterator)
        workers = list(iterator._workers)
    assert not any(worker.is_alive() for worker in workers)
    with pytest.raises(RuntimeError, match=r"ended by DataLoader\.shutdown"):
        next(iterator)
    assert taken(loader) == list(range(6))
    loader.shutdown()


def test_call_workers_is_an_error():
    loader = made(persistent_workers=True)
    list(loader)
    with pytest.raises(RuntimeError, match="cannot reach workers on torch's own path"):
        loader.call_workers(len)


def test_arrays_are_collated_by_torch():
    loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=3, num_workers=1)
    assert [batch[0].tolist() for batch in begun(loader)] == [[0, 1, 2], [3, 4, 5]]


def test_an_iterable_dataset():
    loader = made(SharedStream(range(6)), device="cpu", device_transform=lambda batch: batch * 2)
    assert taken(loader) == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize(
    "options",
    [
        {"worker_reset_fn": reset, "seeding": "epoch"},
        {"on_error": "skip"},
        {"dataset": Dispatch(range(6))},
        {"worker_method": "thread"},
        {"restart_workers": 1},
    ],
)
def test_without_workers_all_options_are_taken(options, said):
    loader = made(**options, num_workers=0)
    assert [int(batch) for batch in loader] == list(range(6))
    report = ringloader.report(loader)
    assert (report.path, report.reason) == ("single-process", "num_workers is 0")
    assert said() == []
