"""``default_collate`` of a fetcher, in a thread and without workers: its native parts, and torch's parts."""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import dataloader as torch_dataloader
from torch.utils.data import default_collate

import ringloader._native as _native
from parity.describe import describe, difference
from ringloader import DataLoader
from ringloader._features import worker_info
from ringloader._features.threads import thread
from ringloader._torch import collating, internals
from ringloader._worker import collate
from small_datasets import Made

IMAGE = torch.arange(3 * 8 * 8, dtype=torch.uint8).reshape(3, 8, 8)
Point = collections.namedtuple("Point", "x y")


def in_worker(function: Callable[[], Any]) -> Any:
    """Returns what a function returns in a thread that is a worker."""

    def work() -> Any:
        worker_info.put_in_place()
        thread.become_worker(0, 0, 1, None)
        return function()

    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(work).result(60)


class RefusedError(Exception):
    pass


def refuse(_: Any) -> Any:
    raise RefusedError


NUMPYS = [np.int8, np.int16, np.int32, np.int64, np.longlong, np.uint8, np.float32, np.float64]
NATIVE = [
    [(IMAGE, 1), (IMAGE, 2)],
    [torch.tensor([[1, 2], [3, 4]]).t()] * 3,
    [torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)] * 2,
    [torch.tensor(1.5), torch.tensor(2.5)],
    [torch.ones(2), torch.ones(2, dtype=torch.int64)],
    [torch.zeros(2, dtype=torch.bfloat16)] * 2,
    [torch.empty(0, 3), torch.empty(0, 3)],
    [torch.nn.Parameter(torch.ones(2)).detach()] * 2,
    [{"a": 1.5, "b": [True, "text"]}, {"a": 2.5, "b": [False, "texts"]}],
    [{}, {}],
    [((), b"a")],
    [np.arange(3), np.arange(3)],
    [np.zeros((1, 2), np.float32), np.ones((1, 2), np.float32)],
    [(np.float32(1), torch.eye(3).t()), (np.float32(1), torch.eye(3).t())],
    [1, 2.5],
    [True, False],
    ["a", "b"],
    *([(kind(3), {"one": kind(120)}), (kind(0), {"one": kind(5)})] for kind in NUMPYS),
    [np.float64("nan"), np.float64("-inf")],
    [np.float32(1 / 3), np.float32("-0.0")],
    [np.int64(-(2**63)), np.int64(2**63 - 1)],
]


@pytest.mark.parametrize("batch", NATIVE, ids=itertools.count())
def test_common_samples_are_native_and_equal_without_workers(batch):
    made = collate.Collation(refuse)(batch)
    assert difference(describe(default_collate(batch)), describe(made)) == ""


# Without workers torch keeps no stack contiguous, and none of the first one's type.
@pytest.mark.parametrize(
    "batch",
    [
        [torch.ones(2), torch.ones(2, dtype=torch.int64)],
        [torch.ones(2, dtype=torch.int32), torch.ones(2, dtype=torch.float64)],
        [torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)] * 2,
        [np.uint64(1), np.uint64(2)],
        [np.bool_(True), np.bool_(False)],
        [np.float16(0.5), np.float16(2)],
        [np.float32(0.5), np.int64(2)],
        [np.datetime64("2020-01-01")],
        [np.str_("text")],
        [torch.ones(2, requires_grad=True), torch.ones(2)],
        [torch.ones(2), torch.ones(3)],
        [torch.eye(2).to_sparse()] * 2,
        [torch.complex(torch.ones(2), torch.ones(2)).conj()] * 2,
        [np.zeros(2), np.zeros(2, np.float32)],
        [np.zeros(2)[::-1]] * 2,
        [(1, None), (2, None)],
        [Point(1, torch.ones(2)), Point(2, torch.ones(2))],
        [{"a": 1}, {"b": 1}],
    ],
    ids=itertools.count(),
)
def test_loaders_without_workers_give_what_torchs_give(batch):
    found = []
    for loader_class in (torch_dataloader.DataLoader, DataLoader):
        try:
            (made,) = loader_class(batch, batch_size=len(batch))
            found.append(describe(made))
        except Exception as error:
            found.append((type(error), str(error)))
    assert found[0] == found[1]


def test_a_loader_within_a_worker_of_torchs_makes_shared_memory_as_there():
    inner = DataLoader([torch.ones(2), torch.ones(2)], batch_size=2)

    class Outer(torch.utils.data.Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, _):
            return next(iter(inner)).is_shared()

    assert list(torch_dataloader.DataLoader(Outer(), batch_size=None, num_workers=1)) == [True]


@pytest.mark.parametrize("batch", NATIVE, ids=itertools.count())
def test_common_samples_are_native_and_equal(batch):
    made = in_worker(lambda: collate.Collation(refuse)(batch))
    expected = in_worker(lambda: default_collate(batch))
    assert difference(describe(expected), describe(made)) == ""


@pytest.mark.parametrize(
    "batch",
    [
        [None],
        [Point(1, 2)],
        [[1], [1, 2]],
        [{1: 2}],
        {0: 1},
        [],
        [torch.ones(1), torch.ones(2)],
        # torch cannot collate this in a worker.
        [torch.eye(2).to_sparse()],
    ],
    ids=itertools.count(),
)
def test_others_are_torchs_matter(batch):
    with pytest.raises(RefusedError):
        in_worker(lambda: collate.Collation(refuse)(batch))


def test_gradients_are_torchs_matter():
    batch = [torch.ones(2), torch.ones(2, requires_grad=True)]
    with pytest.raises(RefusedError):
        in_worker(lambda: collate.Collation(refuse)(batch))


def test_batches_have_memory_of_their_own():
    samples = [(torch.zeros(4), np.zeros(4), 0) for _ in range(3)]
    collation = collate.Collation(refuse)
    first = in_worker(lambda: collation(samples))
    for tensor, array, _ in samples:
        tensor.fill_(1)
        array.fill(1)
    second = in_worker(lambda: collation(samples))
    assert [float(column.sum()) for column in first] == [0, 0, 0]
    assert [float(column.sum()) for column in second] == [12, 12, 0]
    for column in first:
        column.fill_(7)
    assert [float(column.sum()) for column in second] == [12, 12, 0]
    assert all(int(tensor.sum()) == 4 and array.sum() == 4 for tensor, array, _ in samples)


def test_a_function_that_was_replaced_is_called(monkeypatch):
    collation = collate.Collation(default_collate)
    real, calls = torch.stack, []
    monkeypatch.setattr(torch, "stack", lambda *args, **options: (calls.append(1), real(*args, **options))[1])
    assert in_worker(lambda: collation([torch.ones(2)] * 2)).shape == (2, 2)
    assert calls == [1]


def test_a_type_that_others_taught_is_theirs(monkeypatch):
    monkeypatch.setitem(collating.collate_fn_map, dict, lambda _, **__: "theirs")
    collation = collate.Collation(default_collate)
    assert in_worker(lambda: collation([{"a": 1}])) == "theirs"


def rows(index: int) -> Any:
    if index == 5:
        return torch.ones(3), index
    return torch.full((4,), float(index)), index


def test_a_loader_uses_it_and_torchs_errors_come(monkeypatch):
    made = []
    real = collate.Collation.__call__

    def call(self: Any, batch: Any) -> Any:
        made.append(self._native(batch) is not None)
        return real(self, batch)

    monkeypatch.setattr(collate.Collation, "__call__", call)
    iterator = iter(DataLoader(Made(rows, 8), batch_size=2, num_workers=1, worker_method="thread"))
    assert [next(iterator)[1].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        next(iterator)
    assert next(iterator)[1].tolist() == [6, 7]
    assert made == [True, True, False, True]
    assert torch.utils.data.default_collate is default_collate


def test_a_collate_fn_of_the_users_stays():
    fetcher = internals.create_fetcher(torch_dataloader._DatasetKind.Map, Made(rows, 8), True, refuse, False)
    collate.put_native(fetcher)
    assert fetcher.collate_fn is refuse
    assert not isinstance(collating.collate_of_columns(), _native.Collate)
