"""``worker_reset_fn``, ``seeding="epoch"`` and ``call_workers`` with threads, beside processes."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ringloader import DataLoader
from small_datasets import Made

pytestmark = pytest.mark.rings_only

METHODS = ["multiprocessing", "thread"]


class Noted(Dataset[Any]):
    """A dataset that gives, with each sample, what it was told."""

    def __init__(self, told: Any = None) -> None:
        self.told = told

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return index, self.told


class Stream(IterableDataset[Any]):
    def __init__(self, told: Any = None) -> None:
        self.told = told

    def __iter__(self) -> Any:
        info = get_worker_info()
        assert info is not None
        return iter([(info.id, number, self.told) for number in range(3)])


def another(dataset: Any, info: Any, seeds: Any) -> Any:
    """A dataset for the epoch, which knows the seeds."""
    return type(dataset)((seeds.epoch, seeds.shared(), seeds.unique(), info.id))


def epochs(loader: Any, count: int, told: dict[int, int] | None = None) -> list[Any]:
    found = []
    for number in range(count):
        if number in (told or {}):
            loader.set_epoch((told or {})[number])
        found.append(list(loader))
    return found


def made(method: str, dataset: Any, **options: Any) -> Any:
    options = {"num_workers": 2, "batch_size": None, "seed": 7, "worker_reset_fn": another, **options}
    return DataLoader(dataset, worker_method=method, **options)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("dataset", [Noted, Stream])
def test_worker_reset_fn_gets_the_seeds_and_gives_the_dataset_of_processes(dataset, persistent):
    by_method = [
        epochs(made(method, dataset(), persistent_workers=persistent), 4, {2: 9}) for method in METHODS
    ]
    assert by_method[0] == by_method[1]
    told = [batch[-1][0] for epoch in by_method[1] for batch in epoch]
    assert sorted(set(told)) == [0, 1, 9, 10]


@pytest.mark.parametrize("method", METHODS)
def test_an_abandoned_epoch_counts(method):
    loader = made(method, Noted(), persistent_workers=True)
    for _ in range(3):
        next(iter(loader))
    assert {batch[1][0] for batch in loader} == {3}


def test_a_dataset_that_one_worker_got_is_not_the_others():
    loader = made("thread", Noted())
    workers = {batch[1][3] for batch in loader}
    assert workers == {0, 1}
    assert loader.dataset.told is None


def drawing(_index: int) -> Any:
    import random

    info: Any = get_worker_info()
    if getattr(info, "worker_method", "") == "thread":
        rng = info.rng
        return (
            rng.random_generator.random(),
            float(torch.rand(1, generator=rng.torch_generator)),
            float(rng.numpy_generator.random()),
        )
    return random.random(), float(torch.rand(1)), None


def test_reseeding_sets_a_threads_own_generators_as_a_processs():
    found = [
        epochs(
            made(method, Made(drawing, 6), worker_reset_fn=None, seeding="epoch", persistent_workers=True),
            2,
        )
        for method in METHODS
    ]
    processes, threads = ([[draws[:2] for draws in epoch] for epoch in one] for one in found)
    assert processes == threads
    # Each epoch anew, numpy's too.
    assert epochs(made("thread", Made(drawing, 6), worker_reset_fn=None, seeding="epoch"), 2) == found[1]
    assert found[1][0] != found[1][1]
    assert len({draws[2] for epoch in found[1] for draws in epoch}) == 12


def test_reseeding_leaves_the_process_alone():
    import random

    import numpy as np

    def states() -> Any:
        return random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()

    generator = torch.Generator().manual_seed(0)
    loader = made(
        "thread", Made(drawing, 6), worker_reset_fn=None, seeding="epoch", generator=generator, seed=None
    )
    before = states()
    list(loader)
    assert states() == before


def fails(_dataset: Any, info: Any, _seeds: Any) -> Any:
    raise LookupError(f"worker {info.id}")


def test_an_error_of_worker_reset_fn_is_the_epochs():
    loader = made("thread", Noted(), worker_reset_fn=fails)
    with pytest.raises(LookupError, match=r"(?s)in DataLoader worker thread 0.*worker 0"):
        list(loader)


def test_call_workers_runs_in_each_thread_with_the_dataset_itself():
    loader = made("thread", Noted(), worker_reset_fn=None, seed=None, persistent_workers=True)
    list(loader)
    lock = threading.Lock()
    answers = loader.call_workers(
        lambda dataset, one: (
            get_worker_info().id,
            dataset is loader.dataset,
            one is lock,
            threading.get_ident(),
        ),
        lock,
    )
    assert [answer[:3] for answer in answers] == [(0, True, True), (1, True, True)]
    assert len({answer[3] for answer in answers} | {threading.get_ident()}) == 3


def test_in_mid_epoch_it_comes_behind_what_was_asked_for_before():
    loader = made("thread", Noted("old"), worker_reset_fn=None, seed=None)
    iterator = iter(loader)
    assert next(iterator) == [0, "old"]
    assert loader.call_workers(lambda dataset: setattr(dataset, "told", "new")) == [None, None]
    assert [batch[1] for batch in iterator][-2:] == ["new", "new"]


def raises(_dataset: Any) -> Any:
    raise LookupError("of the call")


def ends(_dataset: Any) -> Any:
    raise SystemExit(1)


def test_what_goes_wrong_in_a_call():
    loader = made("thread", Noted(), worker_reset_fn=None, seed=None, persistent_workers=True)
    list(loader)
    with pytest.raises(LookupError, match=r"(?s)in DataLoader worker thread 0.*of the call"):
        loader.call_workers(raises)
    with pytest.raises(RuntimeError, match=r"timed out after 0.2 seconds.*worker\(s\) 0, 1"):
        loader.call_workers(lambda _: time.sleep(1), timeout=0.2)
    with pytest.raises(RuntimeError, match="ended, and call_workers"):
        loader.call_workers(ends)
