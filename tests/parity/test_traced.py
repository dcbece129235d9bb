"""Batches that are made while torch traces or transforms the caller's code: the results are torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from ringloader import ArrayDataset
from small_datasets import Made


def make_mixed(index):
    """Leaves that are collated in several ways."""
    return (
        torch.full((2,), float(index)),
        index,
        index / 2,
        np.float32(index),
        {"array": np.arange(3) + index},
    )


DATASETS = {
    "mixed": Made(make_mixed, 4),
    "tensors": TensorDataset(torch.arange(4.0), torch.arange(8).view(4, 2)),
    "arrays": ArrayDataset(torch.arange(4.0), np.arange(4)),
    "numpy": np.arange(4.0),
}


def add_next(iterator):
    """Returns a function that adds the next batch to its argument."""

    def add(value):
        for leaf in tree_leaves(next(iterator)):
            value = value + leaf.to(torch.float64).sum()
        return value

    return add


def by_jit(iterator):
    traced = torch.jit.trace(add_next(iterator), torch.tensor(1.0), check_trace=False)
    return traced(torch.tensor(10.0)).item(), "aten::empty" in str(traced.graph)


def by_fx(iterator):
    return make_fx(add_next(iterator))(torch.tensor(1.0))(torch.tensor(10.0)).item()


def by_vmap(iterator):
    return torch.func.vmap(add_next(iterator))(torch.arange(3.0)).tolist()


def by_grad(iterator):
    add = add_next(iterator)
    return torch.func.grad(lambda value: value * add(torch.tensor(0.0)))(torch.tensor(2.0)).item()


def by_jvp(iterator):
    return str(torch.func.jvp(add_next(iterator), (torch.tensor(1.0),), (torch.tensor(1.0),)))


def by_fake(iterator):
    with FakeTensorMode(allow_non_fake_inputs=True):
        return [(type(leaf).__name__, leaf.dtype, leaf.shape) for leaf in tree_leaves(next(iterator))]


def by_compile(iterator):
    return torch.compile(add_next(iterator), backend="eager")(torch.tensor(1.0)).item()


def by_export(iterator):
    class Module(torch.nn.Module):
        def forward(self, value):
            return add_next(iterator)(value)

    return (
        torch.export.export(Module(), (torch.tensor(1.0),), strict=False).module()(torch.tensor(10.0)).item()
    )


def told(by, kind, dataset):
    try:
        return by(iter(kind(DATASETS[dataset], batch_size=2)))
    except Exception as error:
        return type(error).__name__


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_batch_is_a_constant_of_a_trace(loader_class):
    for dataset in DATASETS:
        assert told(by_jit, loader_class, dataset) == told(by_jit, DataLoader, dataset)


def test_next_is_transformed_as_torchs(loader_class):
    for dataset in DATASETS:
        for by in (by_vmap, by_grad, by_jvp):
            assert told(by, loader_class, dataset) == told(by, DataLoader, dataset), (by, dataset)


@pytest.mark.parametrize("by", [by_fx, by_fake, by_compile, by_export])
def test_next_is_recorded_as_torchs(loader_class, by):
    for dataset in DATASETS:
        assert told(by, loader_class, dataset) == told(by, DataLoader, dataset)


def test_a_batch_of_a_worker_is_a_constant_of_a_trace(loader_class):
    """torch's is memory that the traced function does not fill."""
    sums, is_empty = by_jit(iter(loader_class(DATASETS["tensors"], batch_size=2, num_workers=1)))
    assert is_empty == (loader_class is DataLoader)
    assert is_empty or sums == 10.0 + 1 + 6
