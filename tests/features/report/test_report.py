"""The path that was taken can be read, and is said truthfully."""

import contextlib
import copy
import errno
import functools
import logging
import pickle
import queue
import threading
from multiprocessing import context

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import dataloader as torch_dataloader

import ringloader
from parity import harness
from ringloader import DataLoader
from ringloader._torch import select_path
from ringloader._transport import budget
from small_datasets import Stream


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.full((64, 64), float(index * index))


def test_workers_mean_native_scheduling():
    loader = DataLoader(Squares(), batch_size=3, num_workers=2)
    batches = list(loader)
    report = ringloader.report(loader)
    assert report.path == "native"
    assert report.counters["batches"] == len(batches) == 4
    assert report.counters["in_place"] == 4
    assert report.counters["pickled"] == report.counters["oversize"] == 0


class Failing(Squares):
    def __getitem__(self, index):
        if index == 5:
            raise ValueError(index)
        return super().__getitem__(index)


HOW = [
    {"num_workers": 2},
    {"num_workers": 2, "persistent_workers": True},
    {"num_workers": 2, "worker_method": "thread"},
    {"num_workers": 2, "worker_method": "thread", "persistent_workers": True},
]


@pytest.mark.parametrize("how", HOW)
def test_counters_are_of_the_epoch_and_count_no_ends(how):
    loader = DataLoader(Stream([torch.full((64, 64), 1.0), torch.full((64, 64), 4.0)]), batch_size=1, **how)
    for _ in range(3):
        assert len(list(loader)) == 4
        counters = ringloader.report(loader).counters
        assert counters["batches"] == 4
        assert counters.get("in_place", 4) == 4
        assert counters.get("pickled", 0) == counters.get("copied", 0) == 0


@pytest.mark.parametrize("how", HOW)
def test_errors_are_no_batches(how):
    loader = DataLoader(Failing(), batch_size=None, **how)
    iterator = iter(loader)
    came = 0
    for _ in range(12):
        try:
            next(iterator)
            came += 1
        except ValueError:
            pass
    assert came == 11
    counters = ringloader.report(loader).counters
    assert (counters["batches"], counters.get("pickled", 0)) == (11, 0)


@pytest.mark.parametrize("how", [HOW[1], HOW[3]])
def test_an_abandoned_epoch_is_not_counted_to_the_next(how):
    loader = DataLoader(Squares(), batch_size=1, **how)
    next(iter(loader))
    assert len(list(loader)) == 12
    assert ringloader.report(loader).counters["batches"] == 12


def test_classes_of_the_users_are_pickled():
    loader = DataLoader([1, 2], batch_size=None, num_workers=1, collate_fn=lambda _: Squares())
    assert len(list(loader)) == 2
    assert ringloader.report(loader).counters["pickled"] == 2


def test_numbers_of_numpys_are_written_in_place():
    rows = [(np.ones(600, np.float32), np.int64(row)) for row in range(8)]
    loader = DataLoader(rows, batch_size=4, num_workers=1)
    assert [batch[1].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    counters = ringloader.report(loader).counters
    assert (counters["in_place"], counters["copied"]) == (4, 0)


def test_a_report_is_read_by_people():
    loader = DataLoader(Squares(), batch_size=3, num_workers=2)
    assert len(list(loader)) == 4
    assert str(ringloader.report(loader)).split("\n") == [
        "native: native scheduling over shared-memory rings",
        "  4 batches made by workers",
        "  4 tensors written in shared memory by collation",
    ]


def test_without_workers_the_caller_makes_the_batches():
    loader = DataLoader(Squares(), num_workers=0)
    iterator = iter(loader)
    assert isinstance(iterator, torch_dataloader._SingleProcessDataLoaderIter)
    assert ringloader.report(iterator) == ringloader.report(loader)
    assert ringloader.report(loader) == ringloader.PathReport("single-process", "num_workers is 0", {})


class ThreadWorker(threading.Thread):
    """A thread that passes for a process, as MONAI's ThreadDataLoader has them."""

    @property
    def pid(self):
        return id(self)

    def run(self):
        try:
            super().run()
        finally:
            torch.utils.data._utils.worker._worker_info = None


class ThreadQueue(queue.Queue):
    def close(self):
        pass

    def cancel_join_thread(self):
        pass


class ThreadContext(context.SpawnContext):
    _name = "thread"
    Process = ThreadWorker
    Queue = ThreadQueue


def make_thread(*args, **kwargs):
    return ThreadWorker(*args, **kwargs)


@pytest.mark.parametrize("kind", [ThreadWorker, staticmethod(make_thread)])
def test_workers_that_are_no_processes_mean_torch(monkeypatch, kind):
    monkeypatch.setattr(ThreadContext, "Process", kind)

    def epochs(loader_class):
        # Of its own: the global one is the worker's too, which seeds it.
        generator = torch.Generator().manual_seed(3)
        loader = loader_class(
            Squares(),
            num_workers=1,
            shuffle=True,
            generator=generator,
            multiprocessing_context=ThreadContext(),
        )
        return loader, [[batch[0, 0, 0].item() for batch in loader] for _ in range(2)]

    loader, ours = epochs(DataLoader)
    assert ours == epochs(torch.utils.data.DataLoader)[1]
    assert ringloader.report(loader).path == "torch"
    assert kind.__qualname__ in ringloader.report(loader).reason


def test_a_loader_that_was_not_iterated_has_no_path():
    with pytest.raises(ValueError, match="no path is known"):
        ringloader.report(DataLoader(Squares()))
    with pytest.raises(ValueError, match=r"no path is known for \[\]: builtins.list is no torch"):
        ringloader.report([])


def test_objects_that_raise_have_no_path():
    class Raising:
        def __getattr__(self, name):
            raise RuntimeError(name)

        def __repr__(self):
            raise RuntimeError("repr")

    with pytest.raises(ValueError, match=r"no path is known for <.*Raising object at "):
        ringloader.report(Raising())


def test_counters_are_kept_when_the_iterator_is_gone():
    loader = DataLoader(Squares(), batch_size=3, num_workers=1)
    first = next(iter(loader))
    del first
    assert ringloader.report(loader).counters["batches"] >= 1


def test_a_replaced_iterator_class_takes_effect(monkeypatch, caplog):
    class Theirs(torch_dataloader._MultiProcessingDataLoaderIter):
        pass

    monkeypatch.setattr(torch_dataloader, "_MultiProcessingDataLoaderIter", Theirs)
    monkeypatch.setattr(select_path, "_logged", set())
    loader = DataLoader(Squares(), num_workers=1)
    with caplog.at_level(logging.WARNING, "ringloader"):
        assert isinstance(iter(loader), Theirs)
        assert isinstance(iter(loader), Theirs)
    assert ringloader.report(loader).path == "torch"
    said = f"torch.utils.data.dataloader._MultiProcessingDataLoaderIter was replaced by {__name__}"
    assert ringloader.report(loader).reason == said
    (message,) = caplog.messages
    assert message.startswith(f"ringloader: {said}, so torch's own loader runs; for ringloader's, leave out")


def test_a_replaced_get_iterator_takes_effect(monkeypatch):
    asked = []
    original = torch.utils.data.DataLoader._get_iterator

    def theirs(self):
        asked.append(self)
        return original(self)

    monkeypatch.setattr(torch.utils.data.DataLoader, "_get_iterator", theirs)
    loader = DataLoader(Squares(), num_workers=1)
    assert len(list(loader)) == 12
    assert asked == [loader]
    assert ringloader.report(loader).path == "torch"


def test_without_shared_memory_the_loader_is_torchs(monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "memfd_create: not implemented")

    monkeypatch.setattr("ringloader._native.Engine", refuse)
    monkeypatch.setattr(select_path, "_logged", set())
    torch.manual_seed(3)
    loader = DataLoader(Squares(), num_workers=1, shuffle=True)
    with caplog.at_level(logging.WARNING, "ringloader"):
        ours = [batch[0, 0, 0].item() for batch in loader]
    torch.manual_seed(3)
    torchs = torch.utils.data.DataLoader(Squares(), num_workers=1, shuffle=True)
    theirs = [batch[0, 0, 0].item() for batch in torchs]
    assert ours == theirs, "nothing was drawn before falling back"
    assert ringloader.report(loader).path == "torch"
    assert "memfd_create" in ringloader.report(loader).reason
    assert len(caplog.records) == 1


@pytest.mark.parametrize("part", ["_MapDatasetFetcher.fetch", "_MapDatasetFetcher", "create_fetcher"])
@pytest.mark.parametrize("workers", [0, 1, "thread"])
def test_a_replaced_fetcher_is_asked_on_our_path(monkeypatch, caplog, part, workers):
    fetch = torch.utils.data._utils.fetch
    original = fetch._MapDatasetFetcher.fetch

    @functools.wraps(original)
    def theirs(self, index):
        return "theirs", original(self, index)

    class Theirs(fetch._MapDatasetFetcher):
        fetch = theirs

    if part == "create_fetcher":
        made = staticmethod(lambda _kind, *arguments: Theirs(*arguments))
        monkeypatch.setattr(torch_dataloader._DatasetKind, part, made)
    elif part == "_MapDatasetFetcher":
        monkeypatch.setattr(fetch, part, Theirs)
    else:
        monkeypatch.setattr(fetch._MapDatasetFetcher, "fetch", theirs)
    monkeypatch.setattr(select_path, "_logged", set())
    how = {"num_workers": 1, "worker_method": "thread"} if workers == "thread" else {"num_workers": workers}
    loader = DataLoader(list(range(8)), batch_size=4, **how)
    with caplog.at_level(logging.WARNING, "ringloader"):
        found = [(word, batch.tolist()) for word, batch in loader]
    assert found == [("theirs", [0, 1, 2, 3]), ("theirs", [4, 5, 6, 7])]
    assert ringloader.report(loader).path == {0: "single-process", 1: "native", "thread": "threads"}[workers]
    assert not caplog.records


def replaced(monkeypatch, cls, name):
    """Puts a wrapper around a method of torch's iterators. Returns the list of its calls."""
    owner = next(one for one in cls.__mro__ if name in one.__dict__)
    original = getattr(owner, name)
    called = []

    @functools.wraps(original)
    def theirs(self, *args, **kwargs):
        called.append(name)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, theirs)
    return called


@pytest.mark.parametrize(
    "name",
    [
        "_next_index",
        "__init__",
        "_reset",
        "_try_put_index",
        "_process_data",
        "_next_data",
        "_shutdown_workers",
    ],
)
def test_a_replaced_method_of_the_iterator_means_torch(monkeypatch, caplog, name):
    called = replaced(monkeypatch, torch_dataloader._MultiProcessingDataLoaderIter, name)
    monkeypatch.setattr(select_path, "_logged", set())
    loader = DataLoader(Squares(), batch_size=4, num_workers=1)
    with caplog.at_level(logging.WARNING, "ringloader"):
        assert len(list(loader)) == len(list(loader)) == 3
    assert called
    report = ringloader.report(loader)
    assert report.path == "torch"
    assert report.reason.endswith(f".{name} was replaced by {__name__}")
    (message,) = caplog.messages
    assert message.startswith(f"ringloader: {report.reason}, so torch's own loader runs; ")
    monkeypatch.undo()
    assert len(list(loader)) == 3
    assert ringloader.report(loader).path == "native", "looked at anew for each iterator"


@pytest.mark.parametrize("name", ["_next_index", "__init__", "_next_data"])
def test_without_workers_a_replaced_method_means_torchs_iterator(monkeypatch, name):
    called = replaced(monkeypatch, torch_dataloader._SingleProcessDataLoaderIter, name)
    loader = DataLoader(Squares(), batch_size=4)
    assert len(list(loader)) == 3
    assert called
    report = ringloader.report(loader)
    assert report.path == "torch"
    assert report.reason.startswith("num_workers is 0, and ") and f".{name} was replaced" in report.reason


def test_a_replaced_worker_loop_means_torch(monkeypatch):
    original = torch.utils.data._utils.worker._worker_loop

    @functools.wraps(original)
    def theirs(*args, **kwargs):
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_loop", theirs)
    loader = DataLoader(Squares(), batch_size=4, num_workers=1)
    assert len(list(loader)) == 3
    assert ringloader.report(loader).path == "torch"
    assert ringloader.report(loader).reason.endswith(f"_worker_loop was replaced by {__name__}")


@pytest.mark.parametrize("name", ["pin_memory", "_pin_memory_loop"])
def test_what_pins_counts_for_loaders_that_pin(monkeypatch, name):
    module = torch.utils.data._utils.pin_memory
    original = getattr(module, name)

    @functools.wraps(original)
    def theirs(*args, **kwargs):
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, theirs)
    loader = DataLoader(Squares(), batch_size=4, num_workers=1)
    assert len(list(loader)) == 3
    assert ringloader.report(loader).path == "native"
    warns = harness.HAS_NEW_WORDS and not torch.accelerator.is_available()
    with pytest.warns(UserWarning) if warns else contextlib.nullcontext():
        loader = DataLoader(Squares(), batch_size=4, num_workers=1, pin_memory=True)
        assert len(list(loader)) == 3
    assert ringloader.report(loader).path == "torch"
    assert ringloader.report(loader).reason.endswith(f".{name} was replaced by {__name__}")


@pytest.mark.parametrize("workers", [0, 1, "thread"])
def test_a_replaced_next_is_called_on_our_path(monkeypatch, workers):
    """Tools that measure the time between batches replace it."""
    called = replaced(monkeypatch, torch_dataloader._BaseDataLoaderIter, "__next__")
    how = {"num_workers": 1, "worker_method": "thread"} if workers == "thread" else {"num_workers": workers}
    loader = DataLoader(Squares(), batch_size=4, **how)
    assert len(list(loader)) == 3
    assert called == ["__next__"] * 4
    assert ringloader.report(loader).path == {0: "single-process", 1: "native", "thread": "threads"}[workers]


@pytest.mark.parametrize("wrong", [0, -1])
def test_a_budget_must_be_positive(wrong):
    with pytest.raises(ValueError, match=f"max_shared_bytes must be positive, not {wrong}"):
        DataLoader(Squares(), max_shared_bytes=wrong)


@pytest.mark.parametrize("wrong", [1.5, "1G", True])
def test_a_budget_is_an_int(wrong):
    with pytest.raises(TypeError, match="max_shared_bytes must be an int or None"):
        DataLoader(Squares(), max_shared_bytes=wrong)


def test_loaders_are_copied_and_pickled_with_their_options():
    loader = DataLoader(Squares(), batch_size=5, num_workers=1, max_shared_bytes=1 << 24)
    list(loader)
    for other in (pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader), copy.copy(loader)):
        assert type(other) is DataLoader
        assert other.max_shared_bytes == 1 << 24
        assert [len(batch) for batch in other] == [5, 5, 2]


def test_the_default_budget_is_a_quarter_shared_by_all_processes(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert budget.share_per_worker(4, None, 16 << 30) == 1 << 30
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert budget.share_per_worker(4, None, 16 << 30) == 1 << 27
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    assert budget.share_per_worker(4, None, 16 << 30) == 1 << 30
    assert budget.share_per_worker(64, None, 0) == 1 << 20
    assert budget.share_per_worker(3, 100, 0) == 33


def test_a_prompt_shows_the_text():
    loader = DataLoader(range(8), stats=True)
    list(loader)
    found = ringloader.report(loader)
    assert repr(found) == str(found) == "single-process: num_workers is 0"
    stats = loader.epoch_stats()
    assert repr(stats) == str(stats)
    assert str(stats).startswith("8 batches in ")
    diagnosis = ringloader.doctor(rate=False)
    assert repr(diagnosis) == str(diagnosis)
    assert str(diagnosis).startswith("ringloader ")
