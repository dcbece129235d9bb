"""Threads of one program that use loaders at once, as a free-threaded interpreter really runs them.

With the interpreter lock these hold too. ``PYTHON_GIL=0`` keeps a free-threaded interpreter so, although the
extension asks for the lock.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ringloader import CachedDataset, DataLoader, _native
from small_datasets import Made, Numbers

pytestmark = pytest.mark.rings_only

THREADS = 4
OPTIONS = ({"num_workers": 0}, {"num_workers": 2, "worker_method": "thread"})


def at_once(work: Callable[[int], Any], count: int = THREADS) -> list[Any]:
    """Returns what ``work`` returns in each of some threads, which begin together."""
    begin = threading.Barrier(count)
    found: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(number: int) -> None:
        begin.wait()
        try:
            found[number] = work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


def sample(index: int) -> dict[str, Any]:
    return {
        "tensor": torch.full((5,), index),
        "array": np.full(7, index, dtype=np.float32),
        "number": index,
        "parts": [index / 2, (str(index), index % 2 == 0)],
    }


def numbers_of(batch: dict[str, Any]) -> list[int]:
    """Returns the indices of a batch's samples. Each part of the batch has them."""
    found: list[int] = batch["number"].tolist()
    assert batch["tensor"].tolist() == [[index] * 5 for index in found]
    assert batch["array"].tolist() == [[index] * 7 for index in found]
    halves, (texts, evens) = batch["parts"]
    assert (halves * 2).tolist() == found
    assert list(texts) == [str(index) for index in found]
    assert evens.tolist() == [index % 2 == 0 for index in found]
    return found


@pytest.mark.parametrize("options", OPTIONS)
def test_each_thread_has_a_loader_of_its_own(options):
    def epochs(number: int) -> list[list[int]]:
        loader = DataLoader(Made(sample, 60 + number), batch_size=4, **options)
        return [[index for batch in loader for index in numbers_of(batch)] for _ in range(3)]

    for number, found in enumerate(at_once(epochs)):
        assert found == [list(range(60 + number))] * 3


@pytest.mark.parametrize("options", OPTIONS)
def test_two_iterators_of_one_loader_run_at_once(options):
    loader = DataLoader(Made(sample, 80), batch_size=4, **options)

    def epoch(_number: int) -> list[int]:
        return [index for batch in loader for index in numbers_of(batch)]

    assert at_once(epoch, 2) == [list(range(80))] * 2


@pytest.mark.parametrize("options", [*OPTIONS, {"num_workers": 2, "multiprocessing_context": "fork"}])
def test_batches_end_in_other_threads(options):
    """A slot goes back from whichever thread drops the batch, and no batch changes before."""
    batches: queue.Queue[torch.Tensor | None] = queue.Queue(6)
    iterator = iter(DataLoader(Numbers(400, 2000), batch_size=4, **options))

    def work(number: int) -> int:
        count = 0
        if number == 0:
            for batch in iterator:
                batches.put(batch)
                count += 1
            for _ in range(THREADS - 1):
                batches.put(None)
            return count
        while (batch := batches.get()) is not None:
            assert torch.equal(batch, batch[:, :1].expand_as(batch))
            count += 1
            del batch
        return count

    made, *ended = at_once(work)
    assert made == sum(ended) == 100


def test_threads_that_make_different_samples_keep_all_of_them():
    """No thread takes another's claim for one of its own sample."""
    each = 500
    cached = CachedDataset(Made(sample, THREADS * each))

    def make(number: int) -> list[int]:
        return [cached[index]["number"] for index in range(number, THREADS * each, THREADS)]

    for number, found in enumerate(at_once(make)):
        assert found == list(range(number, THREADS * each, THREADS))
    assert cached.stats()["items"] == THREADS * each


def test_a_dict_and_a_list_that_another_thread_changes_are_read_as_they_were_or_refused():
    """The copy is a state that there was. Nothing panics: ``PanicException`` is no ``Exception``."""
    cache = _native.SampleCache.in_memory(1, 1 << 20, 1)
    changing: dict[Any, Any] = {"dict": dict.fromkeys(range(20)), "list": [0.5] * 20}
    ended = threading.Event()

    def work(number: int) -> int:
        count = 0
        if number == 0:
            while not ended.is_set():
                changing["dict"][count] = None
                changing["dict"].pop(count)
                changing["list"].append(0.5)
                changing["list"].pop()
            return count
        try:
            for _ in range(2000):
                try:
                    copied, _ = cache.put(0, changing)
                except RuntimeError as error:
                    assert "changed size" in str(error) or "keys changed" in str(error)
                else:
                    assert len(copied["dict"]) in (19, 20, 21) and len(copied["list"]) in (20, 21)
                    count += 1
        finally:
            ended.set()
        return count

    assert at_once(work, 2)[1] > 0
