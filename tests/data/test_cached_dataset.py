"""``CachedDataset``: samples that are made once, with the types that they had, for whoever asks."""

import collections
import copy
import gc
import logging
import multiprocessing
import pickle
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from cached_parts import Pair, Rows, Samples, Tagged, Thing, same
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, get_worker_info

import ringloader
from ringloader import CachedDataset
from small_datasets import Stream

pytestmark = pytest.mark.rings_only


def read_only(array):
    array.flags.writeable = False
    return array


BASE = torch.arange(240.0).reshape(2, 3, 40)
KINDS = [
    torch.tensor(3), torch.zeros(0, 4), BASE.clone(), BASE.to(torch.bfloat16), BASE.to(torch.complex64),
    BASE.transpose(0, 2).clone(memory_format=torch.preserve_format), torch.ones(3, 1).expand(3, 5),
    torch.zeros(2, 3, 8, 8).to(memory_format=torch.channels_last), torch.ones(3, requires_grad=True),
    torch.eye(3).to_sparse(), torch.ones(20_000, dtype=torch.uint8), torch.tensor([True, False]),
    Tagged([1.0, 2.0]), torch.nn.Parameter(torch.ones(2)),
    np.arange(12).reshape(3, 4), np.asfortranarray(np.ones((3, 4))), np.arange(4, dtype=">i4"),
    np.ones((4, 5, 3), np.uint8).transpose(2, 0, 1), np.array(5.0), np.array(["a", "bc"]),
    np.array([1, None, "x"], dtype=object), read_only(np.arange(5)), np.zeros((0, 3)),
    np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]), np.float32(3), np.datetime64("2024-01-01"),
    None, True, 3, -(10**30), 1.5, float("inf"), "text", "\ud800", b"bytes", b"x" * 10_000, [], (), {},
    (torch.ones(3), 1, "label"), Pair(np.ones(3, np.float32), 7),
    {"image": torch.ones(2, 2), "boxes": [np.ones(4)]},
    collections.OrderedDict(a=1, b=torch.ones(2)), {1, 2}, range(3), Thing(torch.ones(4)), Path("x"),
]  # fmt: skip


@pytest.mark.parametrize("has_path", [False, True])
def test_samples_come_back_with_their_types_the_first_time_too(tmp_path, has_path):
    dataset = Samples(KINDS)
    cached = CachedDataset(dataset, path=tmp_path / "cache" if has_path else None)
    for _ in range(2):
        for index, kind in enumerate(KINDS):
            assert same(cached[index], kind), (index, kind, cached[index])
    assert dataset.asked.eq(1).all()
    stats = cached.stats()
    assert (stats["items"], stats["misses"], stats["full"]) == (len(KINDS), len(KINDS), False)
    assert 0 < stats["bytes"] < stats["max_bytes"]


def test_what_a_tensor_shares_within_a_sample_is_shared_again():
    row = torch.zeros(10)
    one, other, name, again = CachedDataset(Samples([[row[:6], row[4:], name := "n" * 50, name]]))[0]
    one[4] = 7
    assert other[0] == 7 and name is again


def test_an_array_with_gaps_keeps_its_values_and_its_dtype():
    for array in (np.arange(16, dtype=">i4").reshape(4, 4)[:, ::2], np.ones((3, 4, 5), ">f8")[:, 1:3].T):
        found = CachedDataset([array])[0]
        assert found.dtype == array.dtype and found.flags.writeable and np.array_equal(found, array)


def scribble(sample):
    if isinstance(sample, torch.Tensor):
        sample.fill_(77)
    elif isinstance(sample, np.ndarray):
        sample[...] = 77
    elif isinstance(sample, dict):
        for value in sample.values():
            scribble(value)
        sample["more"] = 1
    elif isinstance(sample, list):
        for value in sample:
            scribble(value)
        sample.clear()


@pytest.mark.parametrize("max_bytes", [None, 0])
def test_what_a_caller_writes_changes_nothing_for_anybody(max_bytes):
    def make():
        return [
            torch.zeros(3),
            torch.zeros(3, 5000),
            np.zeros(9000),
            [torch.zeros(3), [np.zeros(2)]],
            {"x": torch.zeros(9000)},
        ]

    dataset = Samples(make())
    cached = CachedDataset(dataset, max_bytes)
    for _ in range(3):
        for index, sample in enumerate(make()):
            assert same(cached[index], sample)
            scribble(cached[index])
    assert all(map(same, dataset.samples, make()))
    # A sample outlives the cache.
    sample = cached[1]
    del cached
    gc.collect()
    assert same(sample, torch.zeros(3, 5000))


def test_indices_are_those_of_a_sequence():
    dataset = Rows(5)
    cached = CachedDataset(dataset)
    assert len(cached) == 5 and cached[-1][1] == 4 and cached[np.int64(3)][1] == 3
    assert cached[torch.tensor(2)][1] == 2
    assert [label for _, label in cached.__getitems__([0, -5, 4])] == [0, 0, 4]
    for index in (5, -6, 10**30):
        with pytest.raises(IndexError, match=f"index {index} is out of range for a dataset of length 5"):
            cached[index]
    for index in ("a", 1.5, slice(2), None):
        with pytest.raises(TypeError):
            cached[index]
    empty = CachedDataset(Rows(0))
    assert len(empty) == 0 and list(ringloader.DataLoader(empty)) == []
    with pytest.raises(IndexError):
        empty[0]


class Failing(Rows):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        if self.asked[index] < 3:
            raise OSError(f"sample {index}, attempt {self.asked[index].item()}")
        return sample


def test_errors_are_raised_and_not_kept():
    cached = CachedDataset(Failing(2))
    for attempt in (1, 2):
        with pytest.raises(OSError, match=f"sample 1, attempt {attempt}"):
            cached[1]
    assert cached[1][1] == 1 and cached[1][1] == 1
    assert cached.dataset.asked.tolist() == [0, 3]


class Unloadable:
    def __reduce__(self):
        return _refuse, ()


def _refuse():
    raise RuntimeError("cannot be made again")


@pytest.mark.parametrize("sample", [lambda: 1, threading.Lock(), Unloadable(), multiprocessing.Lock()])
def test_what_cannot_be_pickled_is_passed_on_and_said_once(sample, caplog):
    ringloader._torch.select_path._logged.clear()
    dataset = Samples([sample, (1, sample), 5])
    cached = CachedDataset(dataset)
    with caplog.at_level(logging.WARNING, "ringloader"):
        for _ in range(3):
            assert cached[0] is sample and cached[1][1] is sample and cached[2] == 5
    assert dataset.asked.tolist() == [3, 3, 1]
    assert [record for record in caplog.records if "cannot be pickled" in record.message]
    # What pickles, but cannot be unpickled, is kept in vain, and said when it is read too.
    in_vain = 2 * isinstance(sample, Unloadable)
    assert len(caplog.records) <= 2 + in_vain and cached.stats()["items"] == 1 + in_vain


def test_a_bound_keeps_what_is_in_and_makes_the_rest(caplog):
    dataset = Rows(20, (1000,))
    each = 4000 + 1000
    cached = CachedDataset(dataset, 10 * each)
    for _ in range(3):
        for index in range(20):
            assert same(cached[index], (torch.full((1000,), index, dtype=torch.int32), index))
    stats = cached.stats()
    assert stats["full"] and 5 * each < stats["bytes"] <= stats["max_bytes"] == 10 * each
    assert 8 <= stats["items"] <= 12
    assert sorted(set(dataset.asked.tolist())) == [1, 3]
    assert dataset.asked.eq(1).sum() == stats["items"]
    assert not caplog.records
    cached.clear()
    assert not cached.stats()["full"] and cached.stats()["bytes"] == 0
    assert cached[19][1] == 19 and cached.stats()["items"] == 1


def test_a_sample_larger_than_the_bound_is_said_and_the_others_are_kept(caplog):
    ringloader._torch.select_path._logged.clear()
    dataset = Samples([torch.zeros(100_000), 1, torch.zeros(100_000)])
    cached = CachedDataset(dataset, 10_000)
    for _ in range(2):
        assert cached[0].numel() == 100_000 and cached[1] == 1 and cached[2].numel() == 100_000
    assert dataset.asked.tolist() == [2, 1, 2] and not cached.stats()["full"]
    (record,) = {record.message for record in caplog.records if "sample 0" in record.message}
    assert "0.00954 MiB" in record and "max_bytes" in record


def test_datasets_that_have_no_indices_are_refused():
    with pytest.raises(TypeError, match="keeps samples by their index, and those of a stream have none"):
        CachedDataset(Stream([]))
    with pytest.raises(TypeError, match="lacks one"):
        CachedDataset(iter([]))
    for arguments, error, text in [
        ({"max_bytes": -1}, ValueError, "-1"),
        ({"max_bytes": 1.5}, TypeError, "1.5"),
        ({"max_bytes": True}, TypeError, "True"),
        ({"version": 3}, TypeError, "3"),
        ({"version": "é" * 1025}, ValueError, "2050 bytes"),
        ({"version": "\udc80"}, ValueError, r"version must be text .* not '\\udc80'"),
        ({"path": 3}, TypeError, "path must be .* not 3"),
        ({"path": "a\0b"}, ValueError, "path must not have a null character"),
        ({"then": 3}, TypeError, "3"),
    ]:
        with pytest.raises(error, match=text):
            CachedDataset(Rows(2), **arguments)
    assert CachedDataset([1, 2])[1] == 2


def test_attributes_are_the_datasets_but_for_those_of_an_epoch(caplog):
    class Named(Rows):
        classes = ("cat", "dog")

        def set_epoch(self, _):
            raise AssertionError

        def state_dict(self):
            raise AssertionError

    ringloader._torch.select_path._logged.clear()
    cached = CachedDataset(Named(3))
    assert cached.classes == ("cat", "dog") and cached.shape == (3, 40)
    said = [record.message for record in caplog.records]
    assert len(said) == 2 and "set_epoch" in said[0] and "state_dict" in said[1]
    CachedDataset(Named(3))
    assert len(caplog.records) == 2
    for name in ("set_epoch", "state_dict", "load_state_dict", "missing", "_private"):
        assert not hasattr(cached, name)
    with pytest.raises(AttributeError, match="'CachedDataset' object has no attribute 'set_epoch'"):
        cached.set_epoch(1)


def test_a_copy_shares_the_samples_and_a_pickle_has_none(tmp_path):
    dataset = Rows(4)
    cached = CachedDataset(dataset, then=lambda sample: sample)
    cached[0]
    shallow, deep = copy.copy(cached), copy.deepcopy(cached)
    assert shallow[0][1] == deep[0][1] == 0
    assert deep.dataset is not dataset and shallow.dataset is dataset
    shallow.then = None
    assert cached.then is not None
    assert dataset.asked.tolist() == [1, 0, 0, 0]
    cached.then = None
    assert pickle.loads(pickle.dumps(cached)).stats()["items"] == 0
    named = CachedDataset(dataset, path=tmp_path / "cache", version="1")
    named[2]
    again = pickle.loads(pickle.dumps(named))
    assert again.stats()["items"] == 1 and again[2][1] == 2 and dataset.asked[2] == 1


def random_then(sample):
    image, label = sample
    return image + torch.randint(100, ()) + int(np.random.randint(100)), label


class Then(Rows):
    def __getitem__(self, index):
        return random_then(super().__getitem__(index))


@pytest.mark.parametrize("loader", [ringloader.DataLoader, TorchLoader])
@pytest.mark.parametrize("workers", [0, 2])
def test_then_draws_what_it_draws_without_the_cache(loader, workers):
    def seed_numpy(_):
        np.random.seed(torch.initial_seed() % 2**32)

    def epochs(dataset):
        torch.manual_seed(5)
        np.random.seed(5)
        batches = loader(dataset, 4, shuffle=True, num_workers=workers, worker_init_fn=seed_numpy)
        return [batch for _ in range(3) for batch in batches]

    cached = CachedDataset(Rows(30), then=random_then)
    for (image, label), (their_image, their_label) in zip(epochs(cached), epochs(Then(30)), strict=True):
        assert torch.equal(image, their_image) and torch.equal(label, their_label)
    assert cached.dataset.asked.eq(1).all()


def test_each_sample_has_its_own_seed():
    def epochs(dataset):
        torch.manual_seed(5)
        batches = ringloader.DataLoader(dataset, 4, shuffle=True, num_workers=2, seeding="sample")
        return [batch for _ in range(2) for batch in batches]

    cached = CachedDataset(Rows(30), then=random_then)
    for batch, theirs in zip(epochs(cached), epochs(Then(30)), strict=True):
        assert all(map(torch.equal, batch, theirs))


class Opened(Dataset):
    """Reads from what a ``worker_init_fn`` opens."""

    file = None

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return -1 if self.file is None else self.file[index]


def open_in_worker(_worker):
    get_worker_info().dataset.file = [10, 11, 12, 13]


def test_attributes_that_are_set_reach_the_dataset():
    loader = ringloader.DataLoader(
        CachedDataset(Opened()), batch_size=None, num_workers=1, worker_init_fn=open_in_worker
    )
    assert list(loader) == [10, 11, 12, 13]
    cached = CachedDataset(Opened())
    assert cached[0] == -1
    cached.file = [5, 6, 7, 8]
    assert (cached.file, cached.dataset.file) == ([5, 6, 7, 8], [5, 6, 7, 8])
    assert (cached[0], cached[1]) == (-1, 6)
    cached.clear()
    assert cached[0] == 5
    cached.then = str
    assert cached[1] == "6" and not hasattr(cached.dataset, "then")


class WithName(CachedDataset):
    def __init__(self, dataset):
        super().__init__(dataset)
        self.name = "mine"


def test_attributes_of_a_subclass_are_its_own():
    cached = WithName(Rows(2))
    assert cached.name == "mine" and not hasattr(cached.dataset, "name")


def test_what_cannot_be_pickled_is_tried_again_by_the_next_run(tmp_path):
    def run(samples):
        return CachedDataset(Samples(samples), path=tmp_path / "cache")

    first = run([lambda: 1, 5])
    assert first[0]() == 1 and first[1] == 5 and first[0]() == 1
    assert first.stats()["items"] == 1
    second = run([4, 5])
    assert [second[0], second[0], second[1]] == [4, 4, 5]
    assert second.dataset.asked.tolist() == [1, 0] and second.stats()["items"] == 2


def test_what_cannot_be_unpickled_any_more_is_made_again_and_said(tmp_path, caplog, monkeypatch):
    ringloader._torch.select_path._logged.clear()
    monkeypatch.setattr(Thing, "__module__", "gone")
    module = sys.modules["gone"] = types.ModuleType("gone")
    module.Thing = Thing
    path = tmp_path / "cache"
    CachedDataset(Samples([Thing(1), Thing(2), 3]), path=path)[0]
    CachedDataset(Samples([Thing(1), Thing(2), 3]), path=path)[1]
    del sys.modules["gone"]
    dataset = Samples([7, 8, 3])
    cached = CachedDataset(dataset, path=path)
    with caplog.at_level(logging.WARNING, "ringloader"):
        assert [cached[index] for index in (0, 1, 2, 0, 1)] == [7, 8, 3, 7, 8]
    (record,) = caplog.records
    assert str(path) in record.message and "sample 0 (ModuleNotFoundError" in record.message
    assert "Remove the file" in record.message
    cached.clear()
    assert [cached[0], cached[0]] == [7, 7] and cached.stats()["items"] == 1


def test_many_samples_that_are_not_kept_are_said_in_one_line(caplog):
    ringloader._torch.select_path._logged.clear()
    with caplog.at_level(logging.WARNING, "ringloader"):
        cached = CachedDataset(Samples([lambda: 1 for _ in range(10)]))
        assert all(cached[index]() == 1 for index in range(10))
        cached = CachedDataset(Samples([torch.zeros(10_000) for _ in range(10)]), 5000)
        assert all(len(cached[index]) == 10_000 for index in range(10))
    assert len(caplog.records) == 2
