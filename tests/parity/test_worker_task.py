"""Generated programs with ``worker_task="sample"``: their batches are those without workers, bit by bit."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, RandomSampler

from parity.describe import describe
from ringloader import DataLoader, Retry, WorkerPool
from ringloader.batchify import Pad

pytestmark = [pytest.mark.rings_only, pytest.mark.filterwarnings("ignore:This DataLoader will create")]


def row(index: int) -> Any:
    return torch.rand(8), index


def tree(index: int) -> Any:
    array = np.random.rand(3).astype(np.float32)
    return {"index": index, "text": str(index), "array": array, "pair": (random.random(), torch.randn(2))}


def ragged(index: int) -> Any:
    return torch.rand(1 + index % 5)


def large(index: int) -> Any:
    return torch.rand(30_000), torch.tensor(index)


def rarely_other(index: int) -> Any:
    """One in eleven does not fit its batch: ``default_collate`` raises."""
    return torch.rand(3 if index % 11 == 10 else 4)


class Samples(Dataset[Any]):
    """Samples of one kind, each of which takes another time; some raise, and one may kill its worker."""

    def __init__(self, kind: Any, length: int, bad: frozenset[int], died: Path | None) -> None:
        self.kind, self.length, self.bad, self.died = kind, length, bad, died

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        index = int(index)
        if self.died is not None and index == self.length // 2 and os.getpid() != MAIN:
            try:
                self.died.touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        # No draw: the number may depend on nothing else.
        time.sleep(os.urandom(1)[0] / 256 * 0.003)
        if index in self.bad:
            raise LookupError(f"sample {index}")
        return self.kind(index)


MAIN = os.getpid()


def other(index: Any, error: Exception) -> Any:
    """Stands in for a bad sample, and does not fit all batches."""
    assert isinstance(error, LookupError)
    return torch.rand(3), index


def as_they_are(samples: list[Any]) -> Any:
    return samples


def drawing(samples: list[Any]) -> Any:
    return len(samples), torch.rand(2), random.random(), samples


def writing(samples: list[Any]) -> Any:
    """Writes to every tensor: the samples are this batch's alone."""
    for sample in samples:
        for part in sample.values() if isinstance(sample, dict) else sample:
            if isinstance(part, torch.Tensor):
                part.add_(1)
    return samples


KINDS = {
    row: (None, as_they_are, drawing, writing),
    tree: (None, as_they_are, drawing, writing),
    ragged: (as_they_are, drawing, Pad()),
    large: (None, drawing, writing),
    rarely_other: (None, drawing),
}


def program(number: int, died: Path) -> tuple[dict[str, Any], dict[str, Any], int | None]:
    """Returns the arguments of any loader, those of workers, and the batches of the first epoch to take."""
    draw = random.Random(number)
    kind = draw.choice(list(KINDS))
    length = draw.choice([0, 1, 5, 23, 40])
    is_killed = draw.random() < 0.25 and length > 1
    bad = frozenset(index for index in range(length) if draw.random() < draw.choice([0, 0, 0.05]))
    dataset = Samples(kind, length, bad, died if is_killed else None)
    sampler: Any = range(length)
    take = draw.choice([None, None, 1, 2])
    # A sampler that draws does so for an epoch that is given up as far as it was read ahead.
    if take is None and draw.random() < 0.7 and length:
        sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(number))
    size, drop_last = draw.choice([1, 3, 8, 16]), draw.random() < 0.3
    arguments: dict[str, Any] = {"collate_fn": draw.choice(KINDS[kind]), "seed": number}
    if draw.random() < 0.3:
        arguments["batch_sampler"] = BatchSampler(sampler, size, drop_last)
    else:
        arguments |= {"sampler": sampler, "batch_size": size, "drop_last": drop_last}
    workers = {
        "worker_task": "sample",
        "num_workers": draw.choice([1, 2, 2, 3, 5]),
        "prefetch_factor": draw.choice([None, None, 1, 2, 7]),
        "persistent_workers": draw.random() < 0.4,
        "restart_workers": 5 if is_killed else 0,
    }
    if draw.random() < 0.2 and not is_killed:
        # Datasets and functions here draw from the generators of the process.
        workers["main_prefetch"] = 2
    if draw.random() < 0.5:
        arguments["on_error"] = draw.choice(
            ["skip", Retry(1, backoff=0), Retry(1, backoff=0, then="skip"), other]
        )
    for name, value in (("stats", True), ("watchdog", 60.0), ("sample_timeout", 60.0), ("worker_pool", True)):
        if draw.random() < 0.25:
            workers[name] = value
    return {"dataset": dataset, **arguments}, workers, take


def outcomes(take: int | None, **arguments: Any) -> list[Any]:
    """Returns the batches, errors and bad samples of two epochs, of which the first may be given up."""
    if not arguments.pop("worker_pool", False):
        return outcomes_of(DataLoader(**arguments), take)
    del arguments["persistent_workers"]
    with WorkerPool(arguments["num_workers"]) as pool:
        return outcomes_of(DataLoader(worker_pool=pool, **arguments), take)


def outcomes_of(loader: DataLoader[Any], take: int | None) -> list[Any]:
    found: list[Any] = []
    for limit in (take, None):
        iterator = iter(loader)
        while limit is None or limit > 0:
            try:
                found.append(describe(next(iterator)))
            except StopIteration:
                found.append("end")
                break
            except Exception as error:
                # A worker's error has its traceback in front.
                text = str(error).splitlines()[-1].removeprefix(f"{type(error).__name__}: ")
                # torch's default_collate has another text in a worker.
                found.append((type(error).__name__, text if type(error) is LookupError else ""))
            limit = None if limit is None else limit - 1
        # The same bad samples, in the same order, of the batches that were taken.
        found.append([(bad.index, type(bad.error).__name__, bad.handling) for bad in loader.errors])
        del iterator
    return found


@pytest.mark.parametrize("number", range(50))
def test_program(number, tmp_path):
    arguments, workers, take = program(number, tmp_path / "died")
    expected = outcomes(take, seeding="sample", **arguments)
    arguments, workers, take = program(number, tmp_path / "died")
    assert outcomes(take, **arguments, **workers) == expected
