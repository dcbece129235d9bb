"""``default_collate`` in a worker's thread: what is native, what is left to torch, whose memory it is."""

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
from ringloader._torch import collating, internals
from ringloader._worker import thread as worker

IMAGE = torch.arange(3 * 8 * 8, dtype=torch.uint8).reshape(3, 8, 8)
Point = collections.namedtuple("Point", "x y")


def in_worker(function: Callable[[], Any]) -> Any:
    """Returns what a function returns in a thread that is a worker."""

    def work() -> Any:
        worker.put_worker_info_in_place()
        worker.become_worker(0, 0, 1, None)
        return function()

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        return threads.submit(work).result(60)


class RefusedError(Exception):
    pass


def refuse(_: Any) -> Any:
    raise RefusedError


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
]


@pytest.mark.parametrize("batch", NATIVE, ids=itertools.count())
def test_common_samples_are_native_and_equal(batch):
    made = in_worker(lambda: worker.Collation(refuse)(batch))
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
        # torch cannot collate these in a worker.
        [torch.complex(torch.ones(2), torch.ones(2)).conj()],
        [torch.eye(2).to_sparse()],
    ],
    ids=itertools.count(),
)
def test_others_are_torchs_matter(batch):
    with pytest.raises(RefusedError):
        in_worker(lambda: worker.Collation(refuse)(batch))


def test_gradients_are_torchs_matter():
    batch = [torch.ones(2), torch.ones(2, requires_grad=True)]
    with pytest.raises(RefusedError):
        in_worker(lambda: worker.Collation(refuse)(batch))


def test_batches_have_memory_of_their_own():
    samples = [(torch.zeros(4), np.zeros(4), 0) for _ in range(3)]
    collation = worker.Collation(refuse)
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
    collation = worker.Collation(default_collate)
    real, calls = torch.stack, []
    monkeypatch.setattr(torch, "stack", lambda *args, **options: (calls.append(1), real(*args, **options))[1])
    assert in_worker(lambda: collation([torch.ones(2)] * 2)).shape == (2, 2)
    assert calls == [1]


def test_a_type_that_others_taught_is_theirs(monkeypatch):
    monkeypatch.setitem(collating.collate_fn_map, dict, lambda _, **__: "theirs")
    collation = worker.Collation(default_collate)
    assert in_worker(lambda: collation([{"a": 1}])) == "theirs"


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            return torch.ones(3), index
        return torch.full((4,), float(index)), index


def test_a_loader_uses_it_and_torchs_errors_come(monkeypatch):
    made = []
    real = worker.Collation.__call__

    def call(self: Any, batch: Any) -> Any:
        made.append(self._native(batch) is not None)
        return real(self, batch)

    monkeypatch.setattr(worker.Collation, "__call__", call)
    iterator = iter(DataLoader(Rows(), batch_size=2, num_workers=1, worker_method="thread"))
    assert [next(iterator)[1].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        next(iterator)
    assert next(iterator)[1].tolist() == [6, 7]
    assert made == [True, True, False, True]
    assert torch.utils.data.default_collate is default_collate


def test_a_collate_fn_of_the_users_stays():
    fetcher = internals.create_fetcher(torch_dataloader._DatasetKind.Map, Rows(), True, refuse, False)
    worker.collate_natively(fetcher)
    assert fetcher.collate_fn is refuse
    assert not isinstance(collating.collate_of_columns(), _native.Collate)
