"""Datasets that are arrays: what a program has replaced of torch is called, and modes have their say."""

from __future__ import annotations

import pytest
import torch
import torch.utils.data
from torch.utils.data import TensorDataset
from torch.utils.data._utils import collate as torch_collate

from parity.arrays import case, count_gathered, floats, noise
from parity.harness import compare
from ringloader import DataLoader


@pytest.fixture
def made(monkeypatch):
    return count_gathered(monkeypatch)


def summed(batch, **_):
    return sum(float(row.sum()) for row in batch)


def put_items(monkeypatch):
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda _, index: index)


def put_several_items(monkeypatch):
    monkeypatch.setattr(TensorDataset, "__getitems__", lambda _, indices: indices, raising=False)


def put_tensors_items(monkeypatch):
    own = torch.Tensor.__getitem__
    monkeypatch.setattr(torch.Tensor, "__getitem__", lambda self, index: own(self, index) + 1)


def put_collation_of_tensors(monkeypatch):
    monkeypatch.setitem(torch_collate.default_collate_fn_map, torch.Tensor, summed)


def put_collation_of_tuples(monkeypatch):
    monkeypatch.setitem(torch_collate.default_collate_fn_map, tuple, lambda batch, **_: len(batch))


def put_collate(monkeypatch):
    monkeypatch.setattr(torch_collate, "collate", lambda batch, **_: len(batch))


def put_stack(monkeypatch):
    own = torch.stack
    monkeypatch.setattr(torch, "stack", lambda *args, **named: own(*args, **named) + 1)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "put",
    [
        put_items,
        put_several_items,
        put_tensors_items,
        put_collation_of_tensors,
        put_collation_of_tuples,
        put_collate,
        put_stack,
    ],
)
def test_what_was_replaced_is_called(loader_class, made, monkeypatch, put, workers):
    put(monkeypatch)
    compare(loader_class, case(TensorDataset(floats(3)), workers))
    assert made[0] == 0


@pytest.mark.parametrize("put", [put_items, put_collation_of_tensors, put_stack])
def test_what_is_replaced_in_the_middle_is_called(monkeypatch, put):
    def second(cls):
        iterator = iter(cls(TensorDataset(floats(3)), batch_size=3))
        next(iterator)
        with monkeypatch.context() as patch:
            put(patch)
            return next(iterator)

    assert str(second(DataLoader)) == str(second(torch.utils.data.DataLoader))
    first, third = (list(DataLoader(TensorDataset(floats(3)), batch_size=3))[number] for number in (0, 2))
    assert first[0].shape == (3, 3) and third[0].shape == (1, 3)


def test_a_mode_has_its_say(made):
    loaders = [cls(noise("B", 3), batch_size=3) for cls in (DataLoader, torch.utils.data.DataLoader)]
    iterators = [iter(loader) for loader in loaders]
    with torch.device("meta"):
        ours, theirs = (next(iterator) for iterator in iterators)
    assert ours.device == theirs.device
    assert list(made) == [0, 1]
    with torch.inference_mode():
        ours = next(iter(DataLoader(floats(3), batch_size=3)))
        assert (
            ours.is_inference()
            == next(iter(torch.utils.data.DataLoader(floats(3), batch_size=3))).is_inference()
        )
