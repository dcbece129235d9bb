"""The order of samples, their workers, and their random numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from parity import harness
from parity.datasets import Batched, Keyed, LazyOrder, Order, Samples, identity, init_draws
from parity.harness import Case, compare

WORKERS = (1, 2, 3)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def map_style() -> Iterator[Any]:
    """The whole product; what differs in one thing from a fast case is slow."""
    sizes = [(4, False), (4, True), (13, False), (None, False)]
    for workers, shuffle, (batch_size, drop_last) in itertools.product(
        WORKERS, ("no", "global", "generator"), sizes
    ):
        fast = workers == 2 or (shuffle == "generator" and batch_size in (4, None))
        yield pytest.param(workers, shuffle, batch_size, drop_last, marks=() if fast else pytest.mark.slow)


@pytest.mark.parametrize(("workers", "shuffle", "batch_size", "drop_last"), list(map_style()))
def test_map_style(loader_class, workers, shuffle, batch_size, drop_last):
    def build():
        return {
            "dataset": Samples(13),
            "batch_size": batch_size,
            "drop_last": drop_last,
            "shuffle": shuffle != "no",
            "generator": seeded() if shuffle == "generator" else None,
            "num_workers": workers,
        }

    expected, _ = compare(loader_class, Case(build, epochs=2))
    assert len(expected.delivered()) == 2 * (13 if batch_size is None else -(-13 // batch_size) - drop_last)


@pytest.mark.parametrize("length", [0, 1, 2])
@pytest.mark.parametrize("batch_size", [1, 2, None])
def test_fewer_samples_than_workers(loader_class, length, batch_size):
    compare(
        loader_class,
        Case(lambda: {"dataset": Samples(length), "batch_size": batch_size, "num_workers": 2}, epochs=2),
    )


def test_shuffling_nothing(loader_class):
    compare(loader_class, Case(lambda: {"dataset": Samples(0), "shuffle": True, "num_workers": 1}, epochs=2))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_prefetch_decides_when_the_sampler_is_asked(loader_class, workers, prefetch):
    def build():
        return {
            "dataset": Samples(9),
            "sampler": Order(list(range(8, -1, -1))),
            "batch_size": 2,
            "num_workers": workers,
            "prefetch_factor": prefetch,
        }

    expected, _ = compare(loader_class, Case(build, epochs=2))
    # Torch asks the batch sampler for two iterators and drops the first, whose body has not started.
    assert expected.steps[-1].observed[0][0] == 2


@pytest.mark.parametrize("batch_size", [None, 2])
def test_lazy_sampler_that_draws(loader_class, batch_size):
    def build():
        sampler = LazyOrder(list(range(9)))
        return {"dataset": Samples(9), "sampler": sampler, "batch_size": batch_size, "num_workers": 2}

    compare(loader_class, Case(build, epochs=3))


def test_sampler_that_goes_on_after_its_end(loader_class):
    def build():
        sampler = Order([0, 1, 2, 3], after=[4, 5, 6])
        return {"dataset": Samples(9), "sampler": sampler, "batch_size": None, "num_workers": 2}

    expected, _ = compare(loader_class, Case(build))
    assert len(expected.delivered()) > 4


@pytest.mark.parametrize("fail_at", [0, 2, 5])
@pytest.mark.parametrize("persistent", [False, True])
def test_sampler_that_fails(loader_class, fail_at, persistent):
    def build():
        sampler = Order(list(range(9)), fail_at=fail_at)
        return {
            "dataset": Samples(9),
            "sampler": sampler,
            "batch_size": None,
            "num_workers": 2,
            "persistent_workers": persistent,
        }

    expected, _ = compare(loader_class, Case(build, max_steps=40))
    assert any(outcome[0] == "error" for outcome in expected.outcomes)


SAMPLERS = {
    "sequential": lambda: SequentialSampler(range(9)),
    "subset": lambda: SubsetRandomSampler([3, 1, 4, 5]),
    "subset of numpy": lambda: SubsetRandomSampler(np.array([3, 1, 4, 5])),
    "subset of a tensor": lambda: SubsetRandomSampler(torch.tensor([3, 1, 4, 5])),
    "weighted": lambda: WeightedRandomSampler([1.0, 2.0, 3.0, 4.0], 11),
    "weighted, generator": lambda: WeightedRandomSampler([1.0, 2.0], 5, generator=seeded()),
    "weighted, no replacement": lambda: WeightedRandomSampler([1.0, 2.0, 3.0], 3, replacement=False),
    "distributed": lambda: DistributedSampler(range(9), num_replicas=2, rank=1, seed=3),
    "random, replacement": lambda: torch.utils.data.RandomSampler(range(9), replacement=True, num_samples=70),
    "random, more than there are": lambda: torch.utils.data.RandomSampler(range(4), num_samples=10),
    "random, generator": lambda: torch.utils.data.RandomSampler(range(4), num_samples=8, generator=seeded()),
    "list": lambda: [2, 0, 1],
    "numpy array": lambda: np.array([2, 0, 1]),
    "range": lambda: range(7, 0, -2),
    "numpy ints in a list": lambda: [np.int64(2), np.int32(1), True, 3],
}


@pytest.mark.parametrize("batch_size", [pytest.param(None, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers(loader_class, name, batch_size):
    def build():
        sampler = SAMPLERS[name]()
        return {"dataset": Samples(9), "sampler": sampler, "batch_size": batch_size, "num_workers": 2}

    compare(loader_class, Case(build, epochs=2))


BATCH_SAMPLERS = {
    "torch's": lambda: BatchSampler(SequentialSampler(range(9)), 2, True),
    "of a list": lambda: BatchSampler([4, 2, 0], 2, False),
    "uneven lists": lambda: [[0], [1, 2], [3, 4, 5], []][:3],
    "tuples": lambda: [(0, 1), (2, 3)],
    "arrays": lambda: [np.array([0, 1]), np.array([2, 3])],
    "tensors": lambda: [torch.tensor([0, 1]), torch.tensor([2, 3])],
    "counted": lambda: Order([[0, 1], [2, 3], [4, 5]]),
}


@pytest.mark.parametrize("dataset", [Samples, Batched])
@pytest.mark.parametrize("name", BATCH_SAMPLERS)
def test_batch_samplers(loader_class, name, dataset):
    compare(
        loader_class,
        Case(lambda: {"dataset": dataset(9), "batch_sampler": BATCH_SAMPLERS[name](), "num_workers": 2}),
    )


class OwnInt(int):
    """A subclass must not come out as a plain int."""


INDICES = {
    "np.int64": [np.int64(3), np.int64(-1)],
    "np.int32": [np.int32(3)],
    "str": ["a", "\u00e9\u4e2d", "\ud800"],
    "bytes": [b"a\0b"],
    "tuple": [(1, "x"), ()],
    "0-d tensor": [torch.tensor(4), torch.tensor(2.5)],
    "tensor": [torch.arange(3)],
    "array": [np.arange(3)],
    "bool": [True, False],
    "None": [None],
    "float": [1.5, float("inf")],
    "negative": [-1, -(2**63)],
    "big": [2**63 - 1, 2**63, 2**200],
    "mixed": [1, 2**70, "a", None],
    "list": [[1, 2], [], [[3]]],
    "list of big": [[1, 2**64]],
    "list of bools": [[True, 1]],
    "list of own ints": [[OwnInt(3), 4]],
    "own int": [OwnInt(3)],
    "slice": [slice(1, None, 2)],
    "dict": [{"a": 1}],
    "set": [{1}],
    "long list": [list(range(100_000))],
}


@pytest.mark.parametrize("name", INDICES)
def test_index_types(loader_class, name):
    """`batch_size=None`: the index goes to the dataset as it is, and comes back."""

    def build():
        return {
            "dataset": Keyed(),
            "sampler": list(INDICES[name]),
            "batch_size": None,
            "num_workers": 2,
            "collate_fn": identity,
        }

    expected, _ = compare(loader_class, Case(build))
    assert len(expected.delivered()) == len(INDICES[name])


@pytest.mark.parametrize("name", INDICES)
def test_index_types_in_batches(loader_class, name):
    def build():
        sampler = list(INDICES[name]) * 2
        return {
            "dataset": Keyed(),
            "sampler": sampler,
            "batch_size": 2,
            "num_workers": 2,
            "collate_fn": identity,
        }

    compare(loader_class, Case(build))


@pytest.mark.parametrize("batch_size", [4, None])
def test_getitems(loader_class, batch_size):
    compare(
        loader_class,
        Case(lambda: {"dataset": Batched(10), "batch_size": batch_size, "num_workers": 2, "shuffle": True}),
    )


@pytest.mark.parametrize("workers", WORKERS)
def test_worker_init_fn(loader_class, workers):
    compare(
        loader_class,
        Case(lambda: {"dataset": Samples(9), "num_workers": workers, "worker_init_fn": init_draws}, epochs=2),
    )


def test_without_workers_it_is_torch(loader_class):
    compare(
        loader_class,
        Case(
            lambda: {"dataset": Samples(9), "batch_size": 2, "shuffle": True, "generator": seeded()}, epochs=2
        ),
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_workers": -1},
        {"timeout": -1},
        {"prefetch_factor": 2},
        {"persistent_workers": True},
        {"num_workers": 1, "prefetch_factor": -1},
        pytest.param({"num_workers": 1, "prefetch_factor": 0}, marks=harness.needs_new_words),
        {"num_workers": 1, "multiprocessing_context": "none such"},
        {"num_workers": 1, "multiprocessing_context": 7},
        {"multiprocessing_context": "fork"},
        {"shuffle": True, "sampler": [1]},
        {"batch_sampler": [[1]], "batch_size": 2},
        {"batch_size": None, "drop_last": True},
        {"batch_size": 0, "num_workers": 1},
    ],
    ids=repr,
)
def test_arguments_are_checked_by_torch(loader_class, arguments):
    expected, _ = compare(loader_class, Case(lambda: {"dataset": Samples(3), **arguments}))
    assert any(outcome[0] == "error" for outcome in expected.outcomes)
