"""Generated programs of many epochs with ``worker_task="sample"`` and ``prefetch_epochs``.

Their batches are those without workers, bit by bit, whatever comes between two epochs.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, SubsetRandomSampler
from torch.utils.data.distributed import DistributedSampler

from parity.describe import describe
from ringloader import DataLoader, Retry, StatefulDataLoader, WorkerPool

pytestmark = [
    pytest.mark.rings_only,
    pytest.mark.limit(300),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:Length of IterableDataset"),
]

MAIN = os.getpid()


class Samples(Dataset[Any]):
    """Random samples that take different times; some raise, some kill their worker while there is a file."""

    def __init__(self, length: int, bad: frozenset[int], left: Path | None) -> None:
        self.length, self.bad, self.left = length, bad, left

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        # No draw: the number may depend on nothing else.
        chance = os.urandom(1)[0]
        time.sleep(chance / 256 * 0.002)
        if self.left is not None and chance < 25 and os.getpid() != MAIN:
            kill_once(self.left, index)
        if index in self.bad:
            raise LookupError(f"sample {index}")
        return self.sample(index)

    def sample(self, index: int) -> Any:
        return index, torch.rand(4), random.random(), np.random.rand(3)


class Told(Samples):
    """Says with each sample which epoch it was told."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def sample(self, index: int) -> Any:
        return *super().sample(index), self.epoch


class Reset(Samples):
    """Says with each sample which epoch ``worker_reset_fn`` was given."""

    number = -1

    def sample(self, index: int) -> Any:
        return *super().sample(index), self.number


def reset(dataset: Any, _info: object, seeds: Any) -> Any:
    made = Reset(dataset.length, dataset.bad, dataset.left)
    made.number = seeds.epoch
    return made


def kill_once(left: Path, index: int) -> None:
    """Kills this process, if there is a file left to remove, and no other was killed at this sample.

    With ``on_error`` a sample that kills twice would be left out.
    """
    mark = left.with_name(f"{left.name}-{index}")
    if mark.exists():
        return
    mark.touch()
    for file in left.iterdir():
        with contextlib.suppress(FileNotFoundError):
            file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


def as_they_are(samples: list[Any]) -> Any:
    return samples, torch.rand(2)


EPOCHS = 7


class Program:
    """The arguments of a loader, and what is done in each epoch.

    Args:
        number: The program's number.
        left: A folder; as many workers may be killed as it has files.
    """

    def __init__(self, number: int, left: Path) -> None:
        draw = self.draw = random.Random(number)
        self.number = number
        self.kills = draw.random() < 0.3
        length = draw.choice([1, 4, 11, 24, 40])
        bad = frozenset(index for index in range(length) if draw.random() < draw.choice([0, 0, 0, 0.1]))
        self.kind = draw.choice([Samples, Told, Reset])
        self.dataset = self.kind(length, bad, left if self.kills else None)
        self.left = left
        self.sampled = draw.choice(["subset", "distributed", "in order"])
        self.size = draw.choice([1, 2, 3, 8])
        self.batches = draw.random() < 0.2
        self.cls = draw.choice([DataLoader, StatefulDataLoader])
        self.options: dict[str, Any] = {"seed": number, "collate_fn": draw.choice([None, as_they_are])}
        if self.kind is Reset:
            self.options["worker_reset_fn"] = reset
        if draw.random() < 0.4:
            self.options["on_error"] = draw.choice(["skip", Retry(1, backoff=0, then="skip")])
        elif draw.random() < 0.1:
            self.options |= {"on_error": "skip", "max_errors": 1}
        self.workers: dict[str, Any] = {
            "worker_task": "sample",
            "prefetch_epochs": True,
            "persistent_workers": True,
            "num_workers": draw.choice([1, 2, 3, 4]),
            "prefetch_factor": draw.choice([None, 1, 2, 3, 9]),
            "restart_workers": 50 if self.kills else 0,
        }
        self.pool = draw.random() < 0.2
        for name, value in (
            ("stats", True),
            ("watchdog", 60.0),
            ("sample_timeout", 60.0),
            ("main_prefetch", 2),
            ("timeout", 60),
            ("device", "cpu"),
        ):
            if draw.random() < 0.2 and not (name == "device" and "main_prefetch" in self.workers):
                self.workers[name] = value
        # A call is lost with its worker.
        calls = [] if self.kills else ["call"]
        others = ["take", "name", "name in between", "limit", "pause", "resume", *calls]
        self.steps = [draw.choice(["all", "all", *others]) for _ in range(EPOCHS)]
        # An iterator with workers draws at once, and one without them at the first batch.
        self.takes = [draw.randint(1, 6) for _ in range(EPOCHS)]

    def run(self, workers: bool) -> list[Any]:
        """Returns the batches and errors of all epochs."""
        torch.manual_seed(self.number)
        self.generator = torch.Generator().manual_seed(self.number)
        for file in range(2):
            (self.left / str(file)).touch()
        if not workers:
            return self.epochs({"seeding": "sample"})
        if not self.pool:
            return self.epochs(self.workers)
        with WorkerPool(self.workers["num_workers"]) as pool:
            return self.epochs(self.workers | {"worker_pool": pool})

    def loader(self, options: dict[str, Any]) -> Any:
        self.sampler: Any = range(len(self.dataset))
        if self.sampled == "subset":
            self.sampler = SubsetRandomSampler(range(len(self.dataset)), self.generator)
        elif self.sampled == "distributed":
            self.sampler = DistributedSampler(self.dataset, num_replicas=1, rank=0, seed=self.number)
        given: dict[str, Any] = {"sampler": self.sampler, "batch_size": self.size}
        if self.batches:
            given = {"batch_sampler": BatchSampler(self.sampler, self.size, True)}
        return self.cls(self.dataset, **given, **self.options, **options)

    def epochs(self, options: dict[str, Any]) -> list[Any]:
        found: list[Any] = []
        loader = self.loader(options)
        try:
            for epoch, (step, take) in enumerate(zip(self.steps, self.takes, strict=True)):
                if step == "name":
                    loader.set_epoch(10 * take + epoch)
                elif step == "call" and epoch and options.get("num_workers"):
                    assert len(loader.call_workers(nothing)) == options["num_workers"]
                iterator = iter(loader)
                if step in ("take", "name in between", "limit", "pause", "resume"):
                    found += taken(itertools.islice(iterator, take))
                if step == "name in between" and options.get("num_workers"):
                    # Without workers, the dataset would be told at once.
                    loader.set_epoch(take)
                elif step == "limit":
                    iterator.limit(2)
                    found += ["limited", *taken(iterator)]
                    iterator.limit(None)
                    iterator.resume()
                elif step == "pause":
                    iterator.pause()
                    found += ["paused", *taken(iterator)]
                    iterator.resume()
                elif step == "resume" and self.cls is StatefulDataLoader:
                    state = loader.state_dict()
                    del iterator
                    loader.shutdown()
                    loader = self.loader(options)
                    loader.load_state_dict(state)
                    iterator = iter(loader)
                if step != "take":
                    found += taken(iterator)
                if step == "name in between" and not options.get("num_workers"):
                    loader.set_epoch(take)
                found.append([(bad.index, type(bad.error).__name__) for bad in loader.errors])
                if self.cls is StatefulDataLoader and step != "take":
                    found.append(loader.state_dict()["number"])
        finally:
            loader.shutdown()
        return found


def nothing(dataset: object) -> None:
    assert dataset is not None


def taken(batches: Any) -> list[Any]:
    """Returns the batches, and errors, up to the end."""
    found: list[Any] = []
    while True:
        try:
            found.append(describe(next(batches)))
        except StopIteration:
            return found
        except LookupError as error:
            found.append(str(error).splitlines()[-1].removeprefix("LookupError: "))
        except RuntimeError as error:
            # Of max_errors.
            assert "max_errors" in str(error)
            return [*found, "too many errors"]


@pytest.mark.parametrize("number", range(60))
def test_program(number, tmp_path):
    expected = Program(number, tmp_path).run(workers=False)
    assert Program(number, tmp_path).run(workers=True) == expected
