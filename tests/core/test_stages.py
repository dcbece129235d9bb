"""Steps of a batch between the scheduler, or the dataset, and the caller."""

import functools
import importlib
import pkgutil
import re
import warnings

import pytest
import torch
from torch.utils.data import IterableDataset

import ringloader
from parity import harness
from ringloader import DataLoader
from ringloader._core import torchs
from ringloader._core.feature import Feature, StagePosition, chain
from ringloader._features import all as feature_list
from ringloader._features.report import at_exit
from ringloader._features.table import TABLE
from ringloader._torch import select_path
from ringloader._transport import processes
from ringloader._worker.options import Position, WorkerOption

pytestmark = pytest.mark.rings_only


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(6))

    def __len__(self):
        return 4


DATASETS = {"map": list(range(6)), "iterable": Stream()}


@pytest.fixture(params=["native", "threads", "torch", "without workers"])
def path(request, monkeypatch):
    if request.param == "torch":
        reason = select_path.Reason("the test wants it")
        monkeypatch.setattr(select_path, "reason_for_torch", lambda *_: reason)
    return request.param


def made(path, dataset, persistent=False, **options):
    workers = 0 if path == "without workers" else 1
    if path == "threads":
        options["worker_method"] = "thread"
    return DataLoader(
        dataset,
        batch_size=None,
        num_workers=workers,
        persistent_workers=persistent and workers > 0,
        **options,
    )


def begun(path, loader):
    iterator = iter(loader)
    expected = "single-process" if path == "without workers" else path
    assert ringloader.report(iterator).path == expected
    return iterator


@pytest.mark.parametrize("kind", DATASETS)
@pytest.mark.parametrize("persistent", [False, True])
def test_each_batch_is_transformed_once(path, kind, persistent):
    # A device that is the CPU moves nothing.
    loader = made(path, DATASETS[kind], persistent, device="cpu", device_transform=lambda batch: batch + 10)
    for _ in range(2):
        assert [int(batch) for batch in begun(path, loader)] == [10, 11, 12, 13, 14, 15]


def test_what_a_transform_raises_is_the_callers(path):
    def fails_at_two(batch):
        if batch == 2:
            raise KeyError("two")
        return batch

    iterator = begun(path, made(path, DATASETS["map"], device="cpu", device_transform=fails_at_two))
    assert [next(iterator), next(iterator)] == [0, 1]
    with pytest.raises(KeyError, match="two") as caught:
        next(iterator)
    # In a cycle with it, torch's iterator would wait for its workers.
    caught.value.__traceback__ = None
    assert list(iterator) == [3, 4, 5]


def test_a_transform_that_stops_does_not_end_the_epoch(path):
    def stops(_):
        raise StopIteration

    iterator = begun(path, made(path, DATASETS["map"], device="cpu", device_transform=stops))
    with pytest.raises(RuntimeError, match="device_transform raised StopIteration") as caught:
        next(iterator)
    caught.value.__traceback__ = None


@harness.needs_new_words
def test_a_warning_names_the_file_that_torchs_names(path):
    def files_named(loader):
        len(loader)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert len(list(iter(loader))) == 6
        # From 3.12 on, Python may have something to say of forks.
        return [one.filename for one in told if one.category is UserWarning]

    workers = 0 if path == "without workers" else 1
    named = files_named(made(path, DATASETS["iterable"]))
    assert len(named) == 2
    theirs = files_named(
        torch.utils.data.DataLoader(DATASETS["iterable"], batch_size=None, num_workers=workers)
    )
    # Between torch's own iterator and its caller stands an object of ours, which can pause.
    assert named == ([torchs.__file__] * 2 if path == "torch" else theirs)


def test_a_kept_method_goes_on_in_the_next_epoch(path):
    if path == "without workers":
        pytest.skip("each epoch has an iterator of its own")
    loader = made(path, DATASETS["map"], True)
    iterator = begun(path, loader)
    take = iterator.__next__
    for _ in range(2):
        assert [int(take()) for _ in range(6)] == list(range(6))
        with pytest.raises(StopIteration):
            take()
        assert iter(loader) is iterator


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("native", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"),
        ("threads", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"),
        ("without workers", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"),
    ],
)
def test_a_profiled_epoch_has_torchs_record(path, name):
    iterator = iter(made(path, DATASETS["map"]))
    next(iterator)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        next(iterator)
    assert name in {event.key for event in profile.key_averages()}
    assert list(iterator) == [2, 3, 4, 5]


class Named(Feature):
    """A stage that notes when a batch passes it."""

    def __init__(self, position, passed):
        self.position, self.passed = position, passed

    def around(self, take):
        return functools.partial(self._next, take)

    def _next(self, take, iterator):
        batch = take(iterator)
        self.passed.append(self.position)
        return batch


def test_a_batch_passes_the_stages_in_their_order():
    passed = []
    features = [Named(position, passed) for position in reversed(StagePosition)]
    more, gate = features.pop(2), Named("gate", passed)
    take = chain(lambda iterator: iterator, features, gate, more)
    assert take("batch") == "batch"
    assert passed == [*StagePosition, "gate"]


def test_features_that_are_on_have_the_stages_of_their_options():
    options = {"on_error": "skip", "stats": True, "prefetch_epochs": True, "main_prefetch": 1}
    loader = DataLoader(DATASETS["map"], num_workers=1, persistent_workers=True, **options)
    stages = [stage.position for feature in iter(loader)._features for stage in feature.stages()]
    assert sorted(stages) == [StagePosition.NEXT_EPOCH, StagePosition.ERRORS, StagePosition.TIMES]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_option_that_is_off_has_no_feature(workers):
    assert iter(DataLoader(DATASETS["map"], num_workers=workers))._features == ()


def test_each_module_of_a_feature_has_its_maker():
    for module, names in feature_list.FEATURES + feature_list.OF_WORKERS:
        assert callable(importlib.import_module(module).feature_for)
        assert names <= {*TABLE, "Dispatch", "timeout", "rows"}


def test_each_option_of_a_worker_has_a_place_of_its_own():
    positions = {}
    for option in subclasses(WorkerOption):
        positions.setdefault(option.position, set()).add(option.__name__)
    # One of each pair is for processes or workers, the other for threads or none.
    pairs = {Position.CLOCK: {"Timing", "TimingHere"}, Position.WATCH: {"ThreadNotes", "Watched"}}
    assert {position for position, names in positions.items() if len(names) > 1} == set(pairs)
    assert all(positions[position] == names for position, names in pairs.items())
    assert set(positions) == set(Position)


def subclasses(option):
    """The classes of the package that derive from it directly, those of modules not yet imported too."""
    for module in pkgutil.walk_packages(ringloader.__path__, "ringloader."):
        # Ray need not be installed; no option is there.
        if not module.name.endswith("__main__") and not re.match(r"ringloader\._?ray\b", module.name):
            importlib.import_module(module.name)
    return [found for found in option.__subclasses__() if found.__module__.startswith("ringloader.")]


@pytest.mark.parametrize("option", ["on_error", "snapshots"])
def test_a_batch_with_nothing_to_say_travels_as_it_is(option):
    if option == "on_error":
        loader = DataLoader([torch.tensor(number) for number in range(4)], 2, on_error="skip")
    else:
        loader = ringloader.StatefulDataLoader(DATASETS["iterable"], 2)
    fetched = iter(loader)._dataset_fetcher.fetch([0, 1])
    assert type(fetched) is torch.Tensor


def test_a_batch_that_looks_as_if_options_had_sent_something_along_is_the_callers():
    batches = [[1], [torch.ones(2), b"\x80\x04]\x94."], [None, b"", None]]
    loader = DataLoader(batches, None, num_workers=1, on_error="skip", collate_fn=lambda batch: batch)
    for found, expected in zip(loader, batches, strict=True):
        assert str(found) == str(expected)
    assert loader.errors == []


def test_an_error_of_a_feature_leaves_no_memory(monkeypatch):
    closed = []
    close = processes.ProcessTransport.close
    monkeypatch.setattr(
        processes.ProcessTransport, "close", lambda transport: (closed.append(transport), close(transport))
    )

    class Fails(Feature):
        def attach(self, _transport):
            raise KeyboardInterrupt

    monkeypatch.setattr(feature_list, "features_of", lambda *_: (Fails(),))
    monkeypatch.setattr(at_exit, "mode", at_exit.ONE)
    with pytest.raises(KeyboardInterrupt):
        iter(DataLoader(DATASETS["map"], num_workers=1))
    assert len(closed) == 1 and not closed[0]._processes
