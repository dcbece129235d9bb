"""Steps of a batch between the scheduler, or the dataset, and the caller."""

import warnings

import pytest
import torch
from torch.utils.data import IterableDataset

import ringloader
from parity import harness
from ringloader import DataLoader
from ringloader._iterator import torchs
from ringloader._torch import select_path

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
