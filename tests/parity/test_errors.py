"""Exceptions: their type, text and moment, and the iteration that goes on behind them."""

from __future__ import annotations

import pytest
import torch.utils.data

import ringloader
from parity.datasets import (
    ERRORS,
    Failing,
    FailingStream,
    FailsToStart,
    Samples,
    collate_fails,
    identity,
    init_fails,
    init_fails_in_one,
)
from parity.harness import Case, compare
from parity.side_by_side import assert_same


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("error", ERRORS)
def test_dataset_raises_and_the_rest_still_comes(loader_class, error, workers):
    def build():
        return {"dataset": Failing(10, error, frozenset({1, 4, 9})), "batch_size": 2, "num_workers": workers}

    expected, _ = compare(loader_class, Case(build))
    assert len(expected.delivered()) == 2


@pytest.mark.parametrize("error", ["KeyError", "unpicklable", "StopIteration"])
def test_first_sample_raises(loader_class, error):
    def build():
        return {"dataset": Failing(6, error, frozenset({0})), "batch_size": None, "num_workers": 2}

    expected, _ = compare(loader_class, Case(build))
    assert len(expected.delivered()) == 5


class Noting(torch.utils.data.SequentialSampler):
    """Notes that it is iterated."""

    def __iter__(self):
        noted.append("iterated")
        return super().__iter__()


noted = []


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("generator", [42, "seed", object()], ids=["int", "str", "object"])
def test_a_generator_that_is_none(loader_class, generator, workers):
    if loader_class is torch.utils.data.DataLoader and workers:
        pytest.skip("torch's iterator, which is not whole when it dies, prints an error of its own")

    def scenario(kind, told):
        noted.clear()
        sampler = Noting(range(6))
        loader = told.step("loader", lambda: kind(range(6), None, sampler=sampler, generator=generator))
        loader.num_workers, loader.prefetch_factor = workers, 2 if workers else None
        told.step("iter", lambda: iter(loader))
        told.step("noted", lambda: list(noted))

    (_, made, *_), (_, refused, *_), (_, seen, *_) = assert_same(scenario, loader_class)
    assert (made[0], refused[0]) == ("value", "error")
    assert "random_() received an invalid combination of arguments" in str(refused)
    assert "iterated" in str(seen)


@pytest.mark.parametrize("error", ["KeyError", "StopIteration"])
def test_every_sample_raises(loader_class, error):
    def build():
        return {"dataset": Failing(5, error, frozenset(range(5))), "num_workers": 2}

    expected, _ = compare(loader_class, Case(build))
    assert not expected.delivered()


@pytest.mark.parametrize("error", ["KeyError", "several arguments"])
def test_an_epoch_after_an_error(loader_class, error):
    """The epoch with the error is given up at once; persistent workers go on."""

    def build():
        return {
            "dataset": Failing(8, error, frozenset({2})),
            "num_workers": 2,
            "persistent_workers": True,
            "batch_size": 2,
        }

    compare(loader_class, Case(build, epochs=3, take=1))


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("error", ["KeyError", "ValueError"])
def test_stream_raises(loader_class, error, batch_size):
    compare(
        loader_class,
        Case(lambda: {"dataset": FailingStream(error), "batch_size": batch_size, "num_workers": 2}),
    )


def test_stream_fails_to_start(loader_class):
    compare(loader_class, Case(lambda: {"dataset": FailsToStart(), "num_workers": 2}, max_steps=20))


@pytest.mark.parametrize("init", [init_fails, init_fails_in_one])
@pytest.mark.parametrize("persistent", [False, True])
def test_worker_init_fn_raises(loader_class, init, persistent):
    """Torch reports it with the first batch; every later one of that worker is an UnboundLocalError."""

    def build():
        return {
            "dataset": Samples(6),
            "num_workers": 2,
            "worker_init_fn": init,
            "persistent_workers": persistent,
        }

    expected, _ = compare(loader_class, Case(build, max_steps=30))
    assert any("UnboundLocalError" in str(outcome) for outcome in expected.outcomes)


@pytest.mark.parametrize("workers", [1, 2])
def test_collate_raises(loader_class, workers):
    def build():
        return {"dataset": Samples(9), "batch_size": 2, "num_workers": workers, "collate_fn": collate_fails}

    expected, _ = compare(loader_class, Case(build))
    assert len(expected.delivered()) == 4


class Uneven(Samples):
    def __getitem__(self, index):
        import torch

        return torch.zeros(index + 1)


def test_uneven_samples_do_not_collate(loader_class):
    expected, _ = compare(
        loader_class, Case(lambda: {"dataset": Uneven(6), "batch_size": 2, "num_workers": 2})
    )
    assert not expected.delivered()


class Uncollatable(Samples):
    def __getitem__(self, index):
        return object() if index == 1 else index


def test_uncollatable_type(loader_class):
    compare(loader_class, Case(lambda: {"dataset": Uncollatable(4), "num_workers": 2}))


class ErrorsAsData(Samples):
    """An exception that is returned, not raised, is data."""

    def __getitem__(self, index):
        make = list(ERRORS.values())[index]
        return ValueError("none") if make is None else make()


def test_exceptions_as_data(loader_class):
    names = [name for name in ERRORS if name != "unpicklable"]
    chosen = [number for number, name in enumerate(ERRORS) if name in names]

    def build():
        return {
            "dataset": ErrorsAsData(len(ERRORS)),
            "sampler": chosen,
            "batch_size": None,
            "num_workers": 2,
            "collate_fn": identity,
        }

    expected, _ = compare(loader_class, Case(build))
    assert len(expected.delivered()) == len(chosen)


@pytest.mark.parametrize("timeout", [float("inf"), 1e30])
def test_a_timeout_that_cannot_be_counted(timeout):
    for cls in (torch.utils.data.DataLoader, ringloader.DataLoader):
        with pytest.raises(OverflowError):
            next(iter(cls([1, 2], num_workers=1, timeout=timeout)))
    with pytest.raises(OverflowError, match="more seconds than can be counted"):
        next(iter(ringloader.DataLoader([1, 2], num_workers=1, timeout=timeout)))
