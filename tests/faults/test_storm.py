"""SIGKILL at random moments of random loaders: what comes is right, the error is torch's, nothing is left.

`STORM_SECONDS` in the environment makes the slow storm longer; `STORM_SEED` begins with a round that failed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from faults.proc import Snapshot
from parity.harness import assert_path
from small_datasets import SharedStream

KILLED = r"DataLoader worker \(pid (\d+)\) is killed by signal: Killed\. "


def sample(index: int, elements: int) -> dict[str, Any]:
    """All of it follows from the index. Some travels in place, some is copied, some is pickled."""
    # By numpy: torch's threads would take their time where all cores are busy.
    return {
        "index": index,
        "data": torch.from_numpy(np.arange(elements) * (index % 97 + 1) + index),
        "more": [torch.full((3,), float(index)), f"sample {index}", (index, b"")],
    }


class Checked(Dataset[Any]):
    def __init__(self, length: int, elements: int) -> None:
        self.length = length
        self.elements = elements

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return sample(index, self.elements)


def as_it_is(samples: list[Any]) -> list[Any]:
    return samples


class Round:
    """One loader, drawn from a seed, up to the death of one of its workers and a little further."""

    def __init__(self, seed: int, loader_class: Any) -> None:
        self.rng = rng = random.Random(seed)
        self.stream = rng.random() < 0.4
        self.workers = rng.randint(2, 4)
        self.prefetch = rng.randint(1, 4)
        self.in_order = rng.random() < 0.7
        self.batch_size = rng.choice([None, 1, 2, 5])
        self.elements = rng.choice([1, 300, 2000, 2000, 50_000])
        # Few batches in an epoch, or more than any round takes.
        self.length = rng.choice([0, 7, 200, 10**6, 10**6])
        self.keep = rng.choice([0.0, 0.2, 1.0])
        self.kept: list[tuple[list[int], Any]] = []
        samples = Checked(self.length, self.elements)
        dataset = SharedStream(samples) if self.stream else samples
        self.loader = loader_class(
            dataset,
            batch_size=self.batch_size,
            collate_fn=as_it_is if rng.random() < 0.2 else None,
            num_workers=self.workers,
            prefetch_factor=self.prefetch,
            in_order=self.in_order,
            persistent_workers=rng.random() < 0.6,
            max_shared_bytes=rng.choice([None, 2 << 20, 16 << 20]),
        )

    def run(self) -> bool:
        """Returns whether an error told of a death."""
        told = False
        for _ in range(self.rng.randint(1, 3)):
            iterator = iter(self.loader)
            assert_path(iterator, self.workers)
            told = self.epoch(iterator) or told
            del iterator
        self.loader = None
        for indices, batch in self.kept:
            self.check(batch, indices)
        return told

    def epoch(self, iterator: Any) -> bool:
        victims = self.rng.sample(iterator._workers, self.rng.choice([0, 1, 1, 1, 2]))
        pids = {process.pid for process in victims}
        handles = [os.pidfd_open(process.pid) for process in victims if process.is_alive()]
        dead = threading.Event()
        self.killed_at = 0.0
        killer = threading.Thread(target=self.kill, args=(handles, dead))
        killer.start()
        told = 0
        seen: set[int] = set()
        last: dict[int, int] = {}
        after = 0
        most = self.rng.randint(30, 120)
        try:
            # Out of order a loader that never waits looks after its workers now and then.
            while after < most or (handles and not told and time.monotonic() < self.killed_at + 1):
                # Before the batch is taken: what was committed later is not counted.
                after += dead.is_set() or not handles
                try:
                    batch = next(iterator)
                except StopIteration:
                    # The dead worker had given all that was asked of it, or had ended before it was killed.
                    assert told or len(seen) == self.length, "the epoch ended, and samples are missing"
                    return told > 0
                except RuntimeError as error:
                    error.__traceback__ = None
                    found = re.fullmatch(KILLED, str(error.__cause__))
                    assert found, error
                    # Of this epoch, or of one before whose loader persists.
                    assert int(found[1]) in pids or self.loader.persistent_workers, (error, pids)
                    told += 1
                    if self.in_order:
                        # All that was asked for may have been committed, and the gap is what is asked next.
                        assert after <= self.workers * (self.prefetch + 1) + 2, "the death was told too late"
                        after = 0
                    assert told <= self.workers
                else:
                    self.take(batch, seen, last, gaps=told > 0)
        finally:
            killer.join()
            for handle in handles:
                os.close(handle)
        assert told or not handles, f"no death was told of in {after} batches"
        return told > 0

    def kill(self, handles: list[int], dead: threading.Event) -> None:
        rng = random.Random(self.rng.random())
        time.sleep(rng.choice([0, 0.002, 0.02, 0.06]) * rng.random())
        for handle in handles:
            time.sleep(0.003 * rng.random())
            # The epoch may be over. An exception would keep this round's batches until it is reported.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        if handles:
            self.killed_at = time.monotonic()
            dead.set()

    def take(self, batch: Any, seen: set[int], last: dict[int, int], *, gaps: bool) -> None:
        indices = self.indices_of(batch)
        self.check(batch, indices)
        assert indices[0] >= 0 and indices[-1] < self.length
        assert seen.isdisjoint(indices), "a sample came twice"
        seen.update(indices)
        # Streams are of one worker each.
        line = indices[0] % self.workers if self.stream else 0
        if self.in_order:
            before = last.get(line, -1)
            assert indices[0] > before, "samples came out of order"
            assert gaps or self.stream or indices[0] == before + 1, "samples are missing"
        last[line] = indices[-1]
        if self.rng.random() < self.keep:
            self.kept.append((indices, batch))

    def indices_of(self, batch: Any) -> list[int]:
        if isinstance(batch, list):
            return [one["index"] for one in batch]
        return [batch["index"]] if self.batch_size is None else batch["index"].tolist()

    def check(self, batch: Any, indices: list[int]) -> None:
        step = self.batch_size or 1
        worker_step = self.workers if self.stream else 1
        assert 0 < len(indices) <= step
        assert indices == list(itertools.islice(itertools.count(indices[0], worker_step), len(indices)))
        for place, index in enumerate(indices):
            expected = sample(index, self.elements)
            if isinstance(batch, list) or self.batch_size is None:
                one = batch[place] if isinstance(batch, list) else batch
                name, number = one["more"][1], one["more"][2][0]
            else:
                one = {"data": batch["data"][place], "more": [batch["more"][0][place]]}
                name, number = batch["more"][1][place], int(batch["more"][2][0][place])
            assert np.array_equal(one["data"], expected["data"]), f"sample {index} is wrong"
            assert np.array_equal(one["more"][0], expected["more"][0]), f"sample {index} is wrong"
            assert (name, number) == (f"sample {index}", index)


def storm(loader_class: Any, seconds: float) -> None:
    seed = int(os.environ.get("STORM_SEED", "0")) or random.SystemRandom().getrandbits(40)
    Round(1, loader_class)
    snapshot = Snapshot.take()
    end = time.monotonic() + seconds
    rounds = told = 0
    while time.monotonic() < end or told < 2:
        try:
            told += Round(seed, loader_class).run()
            snapshot.assert_nothing_left(seconds=20)
        except BaseException as error:
            error.add_note(f"round {rounds}; again with STORM_SEED={seed}")
            raise
        rounds += 1
        seed += 1
    print(f"{rounds} rounds, {told} with a death")  # noqa: T201
    assert told > rounds // 4, "hardly any worker died"


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.limit(float(os.environ.get("STORM_SECONDS", "60")) + 120)
@pytest.mark.parametrize(
    "seconds", [8, pytest.param(float(os.environ.get("STORM_SECONDS", "60")), marks=pytest.mark.slow)]
)
def test_storm(loader_class, loader_name, seconds):
    if loader_name == "torch":
        pytest.skip("torch's SIGCHLD handler raises in whatever runs, the test's own code included")
    storm(loader_class, seconds)
