"""``worker_task="sample"`` where samples hang, workers are killed, and batches do not come."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from faults.proc import Snapshot
from faults.test_sample_timeout import LIMIT, Hangs, late, results
from faults.test_watchdog import SECONDS, collected
from features.next_epoch.prefetch_epochs_parts import next_epoch_of
from parity.describe import describe
from ringloader import DataLoader, Retry, WorkerPool, _native
from ringloader._features.losses import restarting
from small_datasets import Made

pytestmark = [
    pytest.mark.rings_only,
    pytest.mark.limit(300),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

SAMPLES: dict[str, Any] = {"worker_task": "sample", "num_workers": 2, "seed": 7}


def timed(dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, 4, sample_timeout=LIMIT, **SAMPLES, **options)


def test_a_sample_that_hangs_is_an_error_in_its_turn():
    snapshot = Snapshot.take()
    loader = timed(Hangs())
    for _ in range(2):
        assert results(loader) == [[0, 1, 2, 3], late(5), [8, 9, 10, 11]]
    del loader
    snapshot.assert_nothing_left()


def test_nothing_is_left_where_the_limit_of_a_sample_cannot_be_kept(monkeypatch):
    made, engine = [], _native.JointEngine

    def noted(*args):
        made.append(engine(*args))
        return made[-1]

    def refused(*_):
        raise OSError("no descriptor is left")

    monkeypatch.setattr(_native, "JointEngine", noted)
    monkeypatch.setattr(restarting, "SampleNotes", refused)
    with pytest.raises(OSError, match="no descriptor is left"):
        iter(timed(Hangs()))
    with pytest.raises(RuntimeError, match="shut down"):
        made[0].fds()


@pytest.mark.parametrize("how", ["skip", "retry", "hangs once", "persistent"])
def test_a_sample_that_hangs_is_handled_as_in_a_whole_batch(how, tmp_path):
    options: dict[str, Any] = {
        "skip": {"on_error": "skip"},
        "retry": {"on_error": Retry(1, backoff=0, then="skip")},
        "hangs once": {"on_error": Retry(1, backoff=0)},
        "persistent": {"on_error": "skip", "persistent_workers": True},
    }[how]
    loader = timed(Hangs([5], unless=tmp_path / "mark" if how == "hangs once" else None), **options)
    second = [4, 5, 6, 7] if how == "hangs once" else [4, 6, 7]
    for _ in range(2 if how == "persistent" else 1):
        assert results(loader) == [[0, 1, 2, 3], second, [8, 9, 10, 11]]
        assert [bad.index for bad in loader.errors] == [5]


class HangsInCollate:
    def __call__(self, samples: list[int]) -> torch.Tensor:
        if 5 in samples:
            time.sleep(1000)
        return torch.tensor(samples)


def test_a_collate_fn_that_hangs_is_an_error_of_its_batch():
    loader = timed(Hangs([]), collate_fn=HangsInCollate())
    found = results(loader)
    assert (found[0], found[2]) == ([0, 1, 2, 3], [8, 9, 10, 11])
    assert "collate_fn took longer" in found[1]


class Waiting(Dataset[int]):
    """Waits at one sample for a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        while index == 6 and not self.file.exists():
            time.sleep(0.01)
        return index


@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
def test_a_wait_is_said_with_the_worker_that_is_in_it(method, tmp_path):
    released = tmp_path / "released"
    loader = DataLoader(Waiting(released), 8, watchdog=SECONDS, worker_method=method, **SAMPLES)
    with collected(released.touch, 1, "__getitem__") as texts:
        assert len(list(loader)) == 2
    assert re.search(r"owes (samples of )?batch 0 of the epoch: dataset indices \[0, 1, 2, 3", texts[0])
    assert re.search(r"has been making a batch for [\d.]+ s", texts[0])
    # The one that waits, and nobody else.
    assert texts[0].count("owes") == 1


def test_a_timeout_names_the_worker_that_is_in_the_batch(tmp_path):
    released = tmp_path / "released"
    iterator = iter(DataLoader(Waiting(released), 8, timeout=1, **SAMPLES))
    with pytest.raises(RuntimeError, match="timed out") as caught:
        next(iterator)
    notes = "\n".join(caught.value.__notes__)
    assert "is late with batch 0 of the epoch" in notes
    assert "__getitem__" in notes
    released.touch()
    del iterator, caught


# Kills in an epoch, at most.
KILLS = 5


class Killed(Dataset[Any]):
    """Samples with random numbers, whose workers are killed at random moments; some are bad.

    No sample kills twice: with ``on_error`` it would be left out.
    """

    main = os.getpid()

    def __init__(self, left: Path, bad: bool) -> None:
        self.left, self.bad = left, bad

    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> Any:
        chance = os.urandom(1)[0]
        time.sleep(chance / 256 * 0.002)
        # At the latest at this sample: an epoch without a kill says nothing.
        is_late = index == 100 and len(list(self.left.iterdir())) == KILLS
        if os.getpid() != self.main and (chance < 12 or is_late):
            kill_once(self.left, index)
        if self.bad and index % 17 == 3:
            raise LookupError(f"sample {index}")
        return {
            "index": index,
            "draw": random.random(),
            "array": np.random.rand(50),
            "tensor": torch.rand(20),
        }


def kill_once(left: Path, where: object) -> None:
    """Kills this process, if there is a file left to remove, and none was killed there."""
    mark = left.with_name(f"{left.name}-{where}")
    if mark.exists():
        return
    mark.touch()
    for file in left.iterdir():
        try:
            file.unlink()
        except FileNotFoundError:
            continue
        os.kill(os.getpid(), signal.SIGKILL)


class Collates:
    """Kills its worker now and then."""

    def __init__(self, left: Path) -> None:
        self.left = left

    def __call__(self, samples: list[Any]) -> Any:
        if os.getpid() != Killed.main and os.urandom(1)[0] < 30:
            kill_once(self.left, f"collation-{len(samples)}-{samples[0]['index']}")
        return samples, torch.rand(2)


OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "persistent_workers": {"persistent_workers": True},
    "on_error": {"on_error": "skip"},
    "stats": {"stats": True},
    "watchdog": {"watchdog": 30.0},
    "sample_timeout": {"sample_timeout": 60.0},
    "main_prefetch": {"main_prefetch": 2},
    "device": {"device": "cpu"},
    "prefetch_factor": {"prefetch_factor": 1},
    "timeout": {"timeout": 100},
    "prefetch_epochs": {"prefetch_epochs": True, "persistent_workers": True},
    "worker_pool": {"stats": True, "sample_timeout": 60.0, "watchdog": 30.0},
}


@pytest.mark.parametrize("collation", ["default", "function"])
@pytest.mark.parametrize("option", OPTIONS)
def test_each_batch_comes_once_whenever_workers_are_killed(option, collation, tmp_path):
    epochs = 2
    dataset = Killed(tmp_path, bad=option == "on_error")
    collate_fn = Collates(tmp_path) if collation == "function" else None
    options: dict[str, Any] = {"batch_size": 8, "collate_fn": collate_fn, "seed": 7}
    handled = OPTIONS[option] if option == "on_error" else {}
    plain = DataLoader(dataset, seeding="sample", **options, **handled)
    expected = [[describe(batch) for batch in plain] for _ in range(epochs)]
    pool = WorkerPool(3) if option == "worker_pool" else None
    workers = {"num_workers": 3} if pool is None else {"worker_pool": pool}
    options |= {"worker_task": "sample", "restart_workers": 20, **workers, **OPTIONS[option]}
    loader = DataLoader(dataset, **options)
    for epoch in range(epochs):
        for mark in tmp_path.parent.glob(f"{tmp_path.name}-*"):
            mark.unlink()
        for number in range(KILLS):
            (tmp_path / str(number)).touch()
        assert [describe(batch) for batch in loader] == expected[epoch]
    assert len(list(tmp_path.iterdir())) < KILLS, "no worker was killed"
    loader.shutdown()
    if pool is not None:
        pool.shutdown()


class ForksAndComesBack(Dataset[Any]):
    """At one sample of each batch the worker forks, and the child comes back to the worker loop before it."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.001)
        if index % 8 == 5:
            if os.fork() == 0:
                return self.make(-index)
            time.sleep(0.05)
        return self.make(index)


@pytest.mark.parametrize(
    "make", [lambda index: torch.full((300,), index), str, float], ids=["tensors", "texts", "numbers"]
)
def test_a_workers_child_that_comes_back_leaves_the_batch_to_the_worker(make):
    expected = [describe(batch) for batch in DataLoader([make(index) for index in range(48)], 8)]
    loader = DataLoader(ForksAndComesBack(make), 8, timeout=60, **SAMPLES)
    assert [describe(batch) for batch in loader] == expected


def test_children_that_are_forked_while_batches_are_copied_keep_no_memory():
    """The next batches need it; a child has no object there."""
    children: list[tuple[int, int]] = []
    is_over = threading.Event()

    def fork() -> None:
        while not is_over.is_set() and len(children) < 50:
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(writing)
                os.read(reading, 1)
                os._exit(0)
            os.close(reading)
            children.append((child, writing))

    dataset = Made(lambda index: torch.full((1_500_000,), index), 160)
    iterator = iter(DataLoader(dataset, 4, prefetch_factor=1, timeout=60, **SAMPLES))
    # With this one, the caller keeps as many batches as may stay where they are. Others are copied.
    kept = next(iterator)
    forking = threading.Thread(target=fork)
    forking.start()
    try:
        for number, batch in enumerate(iterator, 1):
            assert batch[:, -1].tolist() == list(range(4 * number, 4 * number + 4))
        assert (number, kept[:, -1].tolist()) == (39, [0, 1, 2, 3])
    finally:
        is_over.set()
        forking.join()
        # All first: each child has the pipes of those before it.
        for _, writing in children:
            os.close(writing)
        for child, _ in children:
            os.waitpid(child, 0)


class Named(Killed):
    """Says with each sample which epoch it was told."""

    epoch = -1

    def __len__(self) -> int:
        return 24

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        time.sleep(os.urandom(1)[0] / 256 * 0.002)
        return index, self.epoch, torch.rand(3)


def crossing(tmp_path: Path, kind: type[Named] = Named, **options: Any) -> DataLoader[Any]:
    """Returns a loader whose next epoch begins before this one is over."""
    options = {"restart_workers": 1000, "batch_size": 4, "shuffle": True} | options
    made = SAMPLES | {"persistent_workers": True, "prefetch_epochs": True, "num_workers": 3}
    return DataLoader(kind(tmp_path, bad=False), **made, **options)


@pytest.mark.parametrize("options", [{}, {"in_order": False}, {"stats": True, "main_prefetch": 2}])
def test_workers_that_are_killed_between_two_epochs_lose_nothing(options, tmp_path):
    loader = crossing(tmp_path, **options)
    ended = threading.Event()

    def kill() -> None:
        while not ended.wait(0.02 * random.random()):
            workers = getattr(loader._iterator, "_workers", None)
            if workers:
                # It may have been killed before, and be waited for.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(random.choice(workers).pid, signal.SIGKILL)

    killing = threading.Thread(target=kill)
    killing.start()
    try:
        for epoch in range(25):
            loader.set_epoch(epoch)
            batches = list(loader)
            indices = torch.cat([batch[0] for batch in batches]).tolist()
            assert sorted(indices) == list(range(24))
            assert {named for batch in batches for named in batch[1].tolist()} == {epoch}
            if options.get("in_order", True):
                draws = torch.cat([batch[2] for batch in batches])
                plain = DataLoader(Named(tmp_path, bad=False), 4, seeding="sample", seed=7, sampler=indices)
                plain.set_epoch(epoch)
                assert torch.equal(draws, torch.cat([batch[2] for batch in plain]))
    finally:
        ended.set()
        killing.join()
        loader.shutdown()


class Gated(Named):
    """Waits at the last sample of the order for a file."""

    def __getitem__(self, index: int) -> Any:
        while index == 23 and not (self.left / "open").exists():
            time.sleep(0.001)
        return super().__getitem__(index)


def test_the_loss_of_a_worker_between_two_epochs_is_torchs_error_and_the_others_go_on(tmp_path):
    # So that the loss is met: where all batches are there, none is missed.
    gate = tmp_path / "open"
    loader = crossing(tmp_path, Gated, restart_workers=0, shuffle=False)
    batches = iter(loader)
    first = [next(batches) for _ in range(4)]
    assert next_epoch_of(loader._iterator).has_begun_next
    os.kill(loader._iterator._workers[0].pid, signal.SIGKILL)
    loader._iterator._workers[0].join(10)
    for rest in ([*first], []):
        error = None
        while len(rest) < 6:
            try:
                rest.append(next(batches))
            except RuntimeError as found:
                assert error is None
                error = found
                gate.touch()
        assert re.search(r"DataLoader worker .* exited unexpectedly|killed by signal", str(error))
        assert sorted(torch.cat([batch[0] for batch in rest]).tolist()) == list(range(24))
        assert next(batches, None) is None
        gate.unlink()
        batches = iter(loader)
    loader.shutdown()


@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
def test_no_worker_begins_an_epoch_while_a_sample_of_the_one_before_is_made(method, tmp_path):
    begun = tmp_path / "begun"
    loader = DataLoader(
        Gated(tmp_path, bad=False) if method != "thread" else GatedInThreads(tmp_path, bad=False),
        batch_size=4,
        worker_reset_fn=functools.partial(note, begun),
        worker_method=method,
        **SAMPLES | {"persistent_workers": True, "prefetch_epochs": True, "num_workers": 3},
    )
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    # All but the last batch are handed out, and the next epoch is begun in the next call.
    taking = threading.Thread(target=lambda: next(batches))
    taking.start()
    deadline = time.monotonic() + 30
    while not next_epoch_of(loader._iterator).has_begun_next or len(list(tmp_path.glob("begun0-*"))) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(0.1)
    assert not list(tmp_path.glob("begun1-*")), "a worker has begun the next epoch"
    (tmp_path / "open").touch()
    taking.join(30)
    while len(list(tmp_path.glob("begun1-*"))) < 3:
        assert time.monotonic() < deadline + 30
        time.sleep(0.001)
    assert next(batches, None) is None
    loader.shutdown()


class GatedInThreads(Gated):
    set_epoch: Any = None


def note(begun: Path, _dataset: Any, info: Any, seeds: Any) -> None:
    begun.with_name(f"begun{seeds.epoch}-{info.id}").touch()


def test_nothing_is_left_of_an_epoch_that_was_begun(tmp_path):
    snapshot = Snapshot.take()
    loader = DataLoader(
        Gated(tmp_path, bad=False),
        batch_size=4,
        **SAMPLES | {"persistent_workers": True, "prefetch_epochs": True, "num_workers": 3},
    )
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    taking = threading.Thread(target=functools.partial(next, batches, None))
    taking.start()
    while not next_epoch_of(loader._iterator).has_begun_next:
        time.sleep(0.001)
    (tmp_path / "open").touch()
    taking.join(30)
    del batches, taking
    loader.shutdown()
    del loader
    snapshot.assert_nothing_left()
