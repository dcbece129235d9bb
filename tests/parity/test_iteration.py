"""Epochs: abandoned, persistent, side by side; streams; orders; start methods; time limits."""

from __future__ import annotations

import inspect
import multiprocessing
import time

import pytest
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from parity import harness
from parity.datasets import Samples, SizedStream, Slow, Stream, init_draws
from parity.describe import describe
from parity.harness import Case, assert_path, compare
from ringloader._features.table import TABLE


@pytest.mark.parametrize("take", [None, 0, 1, 3])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_epochs(loader_class, take, persistent, workers):
    """Three epochs; with `take`, the first two are given up in the middle."""

    def build():
        return {
            "dataset": Samples(13),
            "batch_size": 2,
            "shuffle": True,
            "num_workers": workers,
            "persistent_workers": persistent,
            "generator": torch.Generator().manual_seed(1),
        }

    compare(loader_class, Case(build, epochs=3, take=take))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("batch_size", [None, pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("lengths", [(7,), (0,), (5, 2), (0, 4), (3, 0, 6)], ids=str)
def test_streams(loader_class, lengths, batch_size, persistent):
    def build():
        return {
            "dataset": Stream(lengths),
            "batch_size": batch_size,
            "num_workers": len(lengths),
            "persistent_workers": persistent,
        }

    compare(loader_class, Case(build, epochs=2))


@pytest.mark.parametrize("take", [1, 4])
@pytest.mark.parametrize("persistent", [False, True])
def test_abandoned_streams(loader_class, take, persistent):
    def build():
        return {
            "dataset": Stream((7, 3)),
            "num_workers": 2,
            "persistent_workers": persistent,
            "batch_size": 2,
        }

    compare(loader_class, Case(build, epochs=3, take=take))


@pytest.mark.parametrize("drop_last", [False, True])
def test_streams_drop_their_own_tails(loader_class, drop_last):
    def build():
        return {"dataset": Stream((5, 4)), "num_workers": 2, "batch_size": 3, "drop_last": drop_last}

    compare(loader_class, Case(build))


@pytest.mark.parametrize("declared", [3, 20])
def test_streams_longer_than_declared_warn(loader_class, declared):
    def build():
        return {"dataset": SizedStream((4, 4), declared=declared), "num_workers": 2, "batch_size": None}

    expected, _ = compare(loader_class, Case(build, ask_length=True))
    warned = any("was reported to be" in text for step in expected.steps for _, text in step.warnings)
    assert warned == (declared == 3)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_two_iterators_at_once(loader_class, workers, persistent):
    """`zip(loader, loader)`: two iterators without persistence, one and the same with it."""

    def pairs(cls):
        torch.manual_seed(3)
        loader = cls(
            Samples(9), batch_size=2, shuffle=True, num_workers=workers, persistent_workers=persistent
        )
        first, second = iter(loader), iter(loader)
        if cls is not torch.utils.data.DataLoader:
            assert_path(first, workers)
            assert_path(second, workers)
        found = [describe(pair) for pair in zip(first, second, strict=False)]
        return found, first is second, torch.get_rng_state().tolist()

    expected = pairs(torch.utils.data.DataLoader)
    for path in harness.paths:
        with harness.taking(path):
            assert pairs(loader_class) == expected, path


def test_loaders_nested_in_the_parent(loader_class):
    """A loader is iterated from its start for all batches of another."""

    def walk(cls):
        torch.manual_seed(3)
        outer = cls(Samples(4), num_workers=1, batch_size=2)
        inner = cls(Samples(3), num_workers=1, shuffle=True)
        return [describe([batch, list(inner)]) for batch in outer]

    expected = walk(torch.utils.data.DataLoader)
    for path in harness.paths:
        with harness.taking(path):
            assert walk(loader_class) == expected, path


def test_unordered_with_one_worker_is_ordered(loader_class):
    compare(
        loader_class, Case(lambda: {"dataset": Samples(9), "num_workers": 1, "in_order": False}, epochs=2)
    )


@pytest.mark.parametrize("persistent", [False, True])
def test_unordered_delivers_everything(loader_class, persistent):
    """Time decides which worker gets which task, in torch too: compared are the indices."""

    def indices(cls):
        loader = cls(
            Slow(12, {0: 0.4}), batch_size=1, num_workers=2, in_order=False, persistent_workers=persistent
        )
        iterator = iter(loader)
        if cls is not torch.utils.data.DataLoader:
            assert_path(iterator, 2)
        return [[int(batch["index"]) for batch in iterator], [int(batch["index"]) for batch in loader]]

    assert all(sorted(epoch) == list(range(12)) for epoch in indices(torch.utils.data.DataLoader))
    for path in harness.paths:
        with harness.taking(path):
            epochs = indices(loader_class)
        for epoch in epochs:
            assert sorted(epoch) == list(range(12)), path
            assert epoch[0] != 0, f"the slow first sample was waited for: {path}"


def test_unordered_streams(loader_class):
    def build():
        return {"dataset": Stream((5, 3)), "num_workers": 2, "in_order": False, "batch_size": None}

    compare(loader_class, Case(build, unordered=True))


@pytest.mark.parametrize("slow", [0, 1, 5])
def test_a_slow_sample_keeps_its_place(loader_class, slow):
    compare(
        loader_class,
        Case(lambda: {"dataset": Slow(9, {slow: 0.3}), "num_workers": 3, "prefetch_factor": 3}),
    )


@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_timeout(loader_class, persistent):
    def build():
        return {
            "dataset": Slow(6, {1: 2.2}),
            "num_workers": 1,
            "timeout": 1.5,
            "persistent_workers": persistent,
        }

    expected, _ = compare(loader_class, Case(build, max_steps=5))
    assert any("timed out after 1.5 seconds" in str(outcome) for outcome in expected.outcomes)


def test_timeout_that_is_kept(loader_class):
    compare(loader_class, Case(lambda: {"dataset": Samples(6), "num_workers": 2, "timeout": 30}))


@pytest.mark.limit(300)
@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_start_methods(loader_class, method):
    def build():
        return {
            "dataset": Samples(7),
            "batch_size": 2,
            "shuffle": True,
            "num_workers": 2 if method == "fork" else 1,
            "multiprocessing_context": method,
            "worker_init_fn": init_draws,
        }

    compare(loader_class, Case(build))


@pytest.mark.slow
@pytest.mark.limit(300)
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_start_methods_persistent(loader_class, method):
    def build():
        return {
            "dataset": Samples(7),
            "batch_size": 2,
            "num_workers": 3,
            "persistent_workers": True,
            "multiprocessing_context": multiprocessing.get_context(method),
        }

    compare(loader_class, Case(build, epochs=3, take=2))


@pytest.mark.parametrize("persistent", [False, True])
def test_pin_memory_without_accelerator_warns(loader_class, persistent):
    if torch.accelerator.is_available():
        pytest.skip("an accelerator is here")

    def build():
        return {"dataset": Samples(4), "num_workers": 2, "pin_memory": True, "persistent_workers": persistent}

    expected, _ = compare(loader_class, Case(build, epochs=2))
    warned = any("no accelerator is found" in text for step in expected.steps for _, text in step.warnings)
    # 2.6 says nothing.
    assert warned or torch.__version__.startswith("2.6.")


def test_more_workers_than_cores_warn_alike(loader_class):
    compare(loader_class, Case(lambda: {"dataset": Samples(12), "num_workers": harness.TOO_MANY}, epochs=2))


TORCH_DATASETS = {
    "TensorDataset": lambda: TensorDataset(torch.arange(9), torch.randn(9, 2, generator=torch.Generator())),
    "Subset": lambda: Subset(Samples(9), [3, 1, 2]),
    "ConcatDataset": lambda: ConcatDataset([Samples(2), Samples(3)]),
    "StackDataset": lambda: StackDataset(a=Samples(4), b=Samples(4)),
    "list": lambda: [1, 2.5, 3, 4],
    "str": lambda: "abcd",
    "tensor": lambda: torch.arange(12).reshape(4, 3),
}


@pytest.mark.parametrize("name", TORCH_DATASETS)
def test_torch_datasets(loader_class, name):
    compare(
        loader_class,
        Case(lambda: {"dataset": TORCH_DATASETS[name](), "batch_size": 2, "num_workers": 2}, epochs=2),
    )


@pytest.mark.parametrize("of", [lambda kind: kind, lambda kind: kind.__init__], ids=["class", "constructor"])
def test_the_signature_that_others_read(loader_class, of):
    """Configurations are filtered by it."""
    theirs = dict(inspect.signature(of(torch.utils.data.DataLoader)).parameters)
    ours = dict(inspect.signature(of(loader_class)).parameters)
    for name in (name for name, about in TABLE.items() if not (about.is_of_states or about.is_torchs)):
        assert ours.pop(name).kind is inspect.Parameter.KEYWORD_ONLY
    assert _without_types(ours) == _without_types(theirs)


def _without_types(parameters):
    """torch's parameters say less of what they take than ours."""
    return [(one.name, one.kind, one.default) for one in parameters.values()]


def test_attributes_that_others_read(loader_class):
    """Frameworks read these off the loader and its iterator."""
    loader = loader_class(Samples(4), num_workers=2, persistent_workers=True)
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert loader._iterator is None
    iterator = iter(loader)
    assert isinstance(iterator, torch.utils.data.dataloader._MultiProcessingDataLoaderIter)
    assert loader._iterator is iterator
    assert len(iterator._workers) == 2
    assert all(worker.is_alive() and worker.daemon and worker.pid for worker in iterator._workers)
    iterator.anything = 1
    next(iterator)
    iterator._shutdown_workers()
    iterator._shutdown_workers()
    deadline = time.monotonic() + 10
    while any(worker.is_alive() for worker in iterator._workers):
        assert time.monotonic() < deadline
    loader._iterator = None
    assert len(list(loader)) == 4
