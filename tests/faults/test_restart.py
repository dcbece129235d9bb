"""``restart_workers``: lost workers get successors; each batch comes once, in order, with its bytes."""

from __future__ import annotations

import errno
import gc
import logging
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

import ringloader
from faults.failing_datasets import Dies, Numbers
from faults.proc import Snapshot, descriptors, wait_without_children
from ringloader import DataLoader, Dispatch
from ringloader._iterator.restarting import Restarting
from ringloader._transport.processes import ProcessTransport

pytestmark = pytest.mark.rings_only

METHODS = ["fork", "spawn", "forkserver"]


class DiesOnce(Numbers):
    """A worker ends at each of these indices, the first time that one comes to it."""

    def __init__(self, length: int, ends: dict[int, str], marks: Path, elements: int = 3000) -> None:
        super().__init__(length, elements)
        self.ends = ends
        self.marks = marks

    def __getitem__(self, index: int) -> torch.Tensor:
        mark = self.marks / str(index)
        if index in self.ends and get_worker_info() is not None and not mark.exists():
            mark.touch()
            Dies(self.length, index, self.ends[index])[index]
        return super().__getitem__(index)


def firsts(batches: Any) -> list[int]:
    """The number of each sample of each batch. All batches are held until the last one has come."""
    held = list(batches)
    for batch in held:
        assert bool((batch == batch[:, :1]).all()), "bytes of another batch"
    return [int(number) for batch in held for number in batch[:, 0]]


@pytest.fixture
def snapshot() -> Snapshot:
    firsts(DataLoader(Numbers(4), num_workers=1))
    return Snapshot.take()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("persistent", [False, True])
def test_each_batch_comes_once_in_order(method, persistent, tmp_path):
    # Started once, so that parts that a start method needs are there then.
    firsts(DataLoader(Numbers(4), num_workers=1, multiprocessing_context=method))
    snapshot = Snapshot.take()
    ends = {0: "kill", 9: "exit", 10: "segfault", 31: "exit 0", 59: "kill"}
    loader = DataLoader(
        DiesOnce(60, ends, tmp_path),
        batch_size=2,
        num_workers=2,
        restart_workers=5,
        persistent_workers=persistent,
        multiprocessing_context=method,
    )
    for _ in range(2):
        assert firsts(loader) == list(range(60))
    assert ringloader.report(loader).path == "native"
    assert len(list(tmp_path.iterdir())) == 5
    loader.shutdown()
    del loader
    snapshot.assert_nothing_left()


@pytest.mark.parametrize(
    "options",
    [
        {"in_order": False},
        {"main_prefetch": 2},
        {"timeout": 30},
        {"prefetch_factor": 5},
        {"max_shared_bytes": 1 << 20},
        {"batch_size": 1},
        {"sampler": [f"{number}" for number in range(40)]},
        {"collate_fn": torch.stack},
    ],
    ids=lambda options: next(iter(options)),
)
def test_with_other_options(options, tmp_path):
    class ByText(DiesOnce):
        def __getitem__(self, index: Any) -> torch.Tensor:
            return super().__getitem__(int(index))

    loader = DataLoader(
        ByText(40, {5: "kill", 6: "kill", 30: "exit"}, tmp_path, 20_000),
        num_workers=3,
        restart_workers=3,
        **{"batch_size": 4, **options},
    )
    found = firsts(loader)
    assert (sorted(found) if "in_order" in options else found) == list(range(40))


class ForksInCollation:
    """A collation whose first batch's memory is another process's too, which writes to it for some seconds.

    The worker dies at a later one.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        self.mark = folder / "forked"
        self.seconds = seconds

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        batch = default_collate(samples)
        if not self.mark.exists():
            if (pid := os.fork()) == 0:
                array, until = batch.numpy(), time.monotonic() + self.seconds
                while time.monotonic() < until:
                    array[:] = -1
                os._exit(0)
            self.mark.write_text(str(pid))
        elif samples[0][0] >= 8 and not (died := self.mark.with_name("died")).exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return batch


def test_memory_that_the_lost_worker_shares_with_a_process_is_not_filled_again(tmp_path):
    collate = ForksInCollation(tmp_path, 60)
    loader = DataLoader(
        Numbers(40, 50_000), batch_size=2, num_workers=1, collate_fn=collate, restart_workers=1
    )
    try:
        with pytest.raises(RuntimeError, match="exited unexpectedly") as raised:
            # The first is in the memory that the process writes to.
            for number, batch in enumerate(loader):
                assert number == 0 or batch[:, 0].tolist() == [2 * number, 2 * number + 1]
        assert "a process that the worker forked still has" in raised.value.__notes__[-1]
    finally:
        os.kill(int(collate.mark.read_text()), signal.SIGKILL)
    # The dead worker's memory is not that of the next epoch.
    assert firsts(loader) == list(range(40))


def test_a_process_that_ends_soon_after_the_worker_is_waited_for(tmp_path):
    collate = ForksInCollation(tmp_path, 0.5)
    loader = DataLoader(
        Numbers(40, 50_000), batch_size=2, num_workers=1, collate_fn=collate, restart_workers=1
    )
    found = [batch[:, 0].tolist() for batch in loader]
    assert found[1:] == [[number, number + 1] for number in range(2, 40, 2)]


def test_the_log_says_what_the_worker_was_in(tmp_path, caplog):
    loader = DataLoader(DiesOnce(8, {5: "kill"}, tmp_path), batch_size=2, num_workers=2, restart_workers=2)
    with caplog.at_level(logging.WARNING, "ringloader"):
        firsts(loader)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "worker 0" in message
    assert "was killed by signal 9 in batch 2 of the epoch: dataset indices [4, 5]" in message
    assert "1 more restarts" in message


class DiesBehind(Dies):
    """The worker ends once the batches before were taken. Else a slower worker's comes after the error."""

    def __init__(self, taken: Path) -> None:
        super().__init__(12, 6, "kill")
        self.taken = taken

    def __getitem__(self, index: int) -> torch.Tensor:
        while index == self.at and not self.taken.exists():
            time.sleep(0.01)
        return super().__getitem__(index)


@pytest.mark.parametrize("most", [0, 3])
def test_an_index_that_always_kills_is_named_in_the_end(most, tmp_path):
    dataset = DiesBehind(tmp_path / "taken")
    iterator = iter(DataLoader(dataset, batch_size=2, num_workers=2, restart_workers=most))
    assert firsts([next(iterator) for _ in range(3)]) == list(range(6))
    dataset.taken.touch()
    with pytest.raises(RuntimeError, match="exited unexpectedly") as raised:
        next(iterator)
    notes = [
        "it was in batch 3 of the epoch: dataset indices [6, 7]",
        *([f"restart_workers={most}: all restarts of this epoch are used"] if most else []),
    ]
    assert raised.value.__notes__ == notes


def test_each_epoch_has_all_restarts(tmp_path):
    dataset = DiesOnce(8, {1: "kill"}, tmp_path)
    loader = DataLoader(dataset, num_workers=2, restart_workers=1, persistent_workers=True)
    for _ in range(3):
        assert firsts(loader) == list(range(8))
        for mark in tmp_path.iterdir():
            mark.unlink()


@pytest.mark.parametrize("is_abandoned", [False, True])
def test_a_successor_counts_in_the_epoch_that_its_predecessor_never_saw(is_abandoned):
    loader = DataLoader(Numbers(8), num_workers=2, restart_workers=1, persistent_workers=True)
    if is_abandoned:
        next(iter(loader))
    else:
        firsts(loader)
    lost = loader._iterator._workers[0]
    os.kill(lost.pid, signal.SIGKILL)
    lost.join()
    for _ in range(2):
        assert firsts(loader) == list(range(8))
        assert ringloader.report(loader).counters["batches"] == 8


class ByKey(Dies):
    def __getitem__(self, index: Any) -> torch.Tensor:
        return super().__getitem__(int(index))


@pytest.mark.parametrize(
    ("index", "note"),
    [("3", "it was in batch 3 of the epoch: dataset index '3'"), (torch.tensor(3), None)],
    ids=["text", "tensor"],
)
def test_an_index_that_only_the_worker_can_take_is_left_alone(index, note, capfd):
    sampler = ["0", "1", "2", index, "4"]
    loader = DataLoader(ByKey(8, 3, "kill"), batch_size=None, sampler=sampler, num_workers=1)
    with pytest.raises(RuntimeError, match="exited unexpectedly") as raised:
        list(loader)
    assert getattr(raised.value, "__notes__", [None]) == [note]
    assert "Traceback" not in capfd.readouterr().err


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield 0
        os._exit(1)


def test_an_iterable_dataset_gets_torchs_error_which_says_why():
    loader = DataLoader(Streamed(), num_workers=1, restart_workers=3)
    with pytest.raises(RuntimeError, match="exited unexpectedly") as raised:
        list(loader)
    assert "IterableDataset is not restarted" in raised.value.__notes__[-1]


def fails_to_start_once(marks: Path) -> Any:
    def init(worker: int) -> None:
        if worker == 1 and not (marks / "init").exists():
            (marks / "init").touch()
            os._exit(1)

    return init


def test_a_worker_that_does_not_come_to_its_first_batch(tmp_path):
    init = fails_to_start_once(tmp_path)
    loader = DataLoader(Numbers(8), num_workers=2, worker_init_fn=init, restart_workers=1)
    assert firsts(loader) == list(range(8))


def seed_of(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.seed = (worker, info.id, info.seed, torch.initial_seed())


class Seeded(DiesOnce):
    seed: Any = None
    epoch: Any = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        super().__getitem__(index)
        return self.seed, self.epoch


def note_epoch(dataset: Any, info: Any, seeds: Any) -> Any:
    dataset.reset = (seeds.epoch, info.id)


class Reset(Seeded):
    reset: Any = None

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index), self.reset


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_successor_has_the_number_the_seed_and_the_epoch(method, tmp_path):
    loader = DataLoader(
        Reset(8, {5: "kill"}, tmp_path),
        batch_size=None,
        num_workers=2,
        worker_init_fn=seed_of,
        worker_reset_fn=note_epoch,
        persistent_workers=True,
        restart_workers=1,
        multiprocessing_context=method,
    )
    (tmp_path / "5").touch()
    first = list(loader)
    (tmp_path / "5").unlink()
    loader.set_epoch(7)
    second = list(loader)
    # The seeds, the epoch that the dataset was told, the epoch of the seeds.
    assert [batch[0][0] for batch in second] == [batch[0][0] for batch in first]
    assert {batch[0][1] for batch in second} == {7}
    assert [batch[1] for batch in second] == [[7, index % 2] for index in range(8)]
    third = list(loader)
    assert [batch[1] for batch in third] == [[8, index % 2] for index in range(8)]
    loader.shutdown()


def kill_now_and_then(iterator: Any, chance: random.Random, stop: threading.Event, kills: list[int]) -> None:
    while not stop.wait(chance.uniform(0.005, 0.08)):
        pid = chance.choice(list(iterator._workers)).pid
        if pid is not None:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            kills.append(pid)


@pytest.mark.limit(180)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("in_order", [True, False])
def test_a_storm_of_kills(seed, in_order, snapshot):
    storm(seed, workers=4, batches=1500, in_order=in_order, at_least=5)
    snapshot.assert_nothing_left()


def storm(seed: int, workers: int, batches: int, in_order: bool, at_least: int) -> int:
    """Kills workers at random while batches of all sizes are read and held. Returns how many were killed."""
    chance = random.Random(seed)
    loader = DataLoader(
        Numbers(4 * batches, chance.choice([16, 700, 20_000])),
        batch_size=4,
        num_workers=workers,
        prefetch_factor=chance.choice([1, 2, 6]),
        restart_workers=1 << 30,
        in_order=in_order,
    )
    iterator: Any = iter(loader)
    stop, kills = threading.Event(), []
    killer = threading.Thread(target=kill_now_and_then, args=(iterator, chance, stop, kills))
    killer.start()
    found, held = [], []
    try:
        for batch in iterator:
            assert bool((batch == batch[:, :1]).all())
            found += [int(number) for number in batch[:, 0]]
            held.append((found[-4:], batch))
            if len(held) > 20:
                numbers, old = held.pop(chance.randrange(len(held)))
                assert [int(number) for number in old[:, 0]] == numbers
                assert bool((old == old[:, :1]).all())
            if len(kills) < at_least:
                time.sleep(0.001)
    finally:
        stop.set()
        killer.join()
    assert (found if in_order else sorted(found)) == list(range(4 * batches))
    assert len(kills) >= at_least
    return len(kills)


@pytest.mark.slow
@pytest.mark.limit(float(os.environ.get("STORM_SECONDS", "10")) + 120)
def test_a_long_storm():
    seconds = float(os.environ.get("STORM_SECONDS", "10"))
    until, seed, batches, kills = time.monotonic() + seconds, 100, 0, 0
    while time.monotonic() < until:
        kills += storm(seed, workers=8, batches=1000, in_order=seed % 4 != 3, at_least=5)
        batches += 1000
        seed += 1
    sys.stdout.write(f"{batches} batches, {kills} kills, each batch once\n")


def test_restarts_leave_nothing_behind(snapshot):
    loader = DataLoader(Numbers(100_000, 16), num_workers=2, restart_workers=100)
    iterator: Any = iter(loader)
    series = []
    for count in range(60):
        os.kill(iterator._workers[count % 2].pid, signal.SIGKILL)
        pid = iterator._workers[count % 2].pid
        while iterator._workers[count % 2].pid == pid:
            next(iterator)
        series.append((len(descriptors()), len(os.listdir("/proc/self/task"))))  # noqa: PTH208
    sys.stdout.write(f"descriptors and threads: {series[::10]}\n")
    # The first restarts may load what is kept.
    assert max(series[20:]) == min(series[20:])
    del iterator
    loader.shutdown()
    assert wait_without_children(10) == {}
    snapshot.assert_nothing_left()


@pytest.mark.parametrize(
    ("dataset", "options", "error", "text"),
    [
        (
            range(2),
            {"restart_workers": -1},
            ValueError,
            "restart_workers must be 0 or more, not -1",
        ),
        (
            range(2),
            {"restart_workers": True},
            TypeError,
            "restart_workers must be an int, not True",
        ),
        (range(2), {"restart_workers": "2"}, TypeError, "restart_workers must be an int, not '2'"),
        (
            range(2),
            {"restart_workers": 2, "worker_method": "thread", "num_workers": 1},
            ValueError,
            "worker_method='thread' and restart_workers=2 do not go together",
        ),
        (
            Dispatch([1]),
            {"restart_workers": 2, "num_workers": 1},
            ValueError,
            "restart_workers=2 and a Dispatch as dataset do not go together",
        ),
    ],
)
def test_what_is_wrong_is_told(dataset, options, error, text):
    with pytest.raises(error, match=text):
        DataLoader(dataset, **options)


@pytest.mark.limit(180)
@pytest.mark.parametrize("method", METHODS)
def test_workers_of_a_pool(method, tmp_path):
    """Two loaders, both under way; a process that was lost is another's successor in neither."""
    marks = [tmp_path / "first", tmp_path / "second"]
    for folder in marks:
        folder.mkdir()
    # Started once, so that parts that a start method needs are there then.
    firsts(DataLoader(Numbers(4), num_workers=1, multiprocessing_context=method))
    snapshot = Snapshot.take()
    with ringloader.WorkerPool(2, method) as pool:
        loaders = [
            DataLoader(
                DiesOnce(40, ends, folder, 20_000),
                batch_size=2,
                num_workers=2,
                worker_pool=pool,
                restart_workers=4,
            )
            for ends, folder in zip(
                [{0: "kill", 9: "exit", 30: "segfault"}, {1: "kill", 22: "exit 0"}], marks, strict=True
            )
        ]
        for _ in range(3):
            both = [list(batches) for batches in zip(*zip(*loaders, strict=True), strict=True)]
            assert [firsts(batches) for batches in both] == [list(range(40))] * 2
        assert [len(list(folder.iterdir())) for folder in marks] == [3, 2]
        del both
    del loaders, pool
    assert not wait_without_children(10)
    # Memory that a child forked in mid-epoch might have had is looked for when memory is made.
    firsts(DataLoader(Numbers(4), num_workers=1))
    snapshot.assert_nothing_left()


def test_a_pool_keeps_a_successor(tmp_path):
    def processes() -> set[int]:
        return {process.process.pid for process in pool._crew._processes}

    with ringloader.WorkerPool(1, "fork") as pool:
        loader = DataLoader(
            DiesOnce(10, {5: "kill"}, tmp_path), num_workers=1, worker_pool=pool, restart_workers=1
        )
        batches = iter(loader)
        before = processes()
        assert firsts(batches) == list(range(10))
        del batches
        gc.collect()
        after = processes()
        assert len(after) == 1 and not before & after, "the one that was lost"
        assert firsts(loader) == list(range(10)) and processes() == after


class DiesWhenAsked(Dataset[Any]):
    """Has the epoch that it was told last, as its only sample values. Ends its worker where a file is."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark
        self.epoch = -1

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 5 and self.mark.exists():
            self.mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_a_successor_of_a_pool_has_the_epoch_that_the_workers_were_told_last(tmp_path):
    """Its dataset is as it was pickled, at the first iterator."""
    mark = tmp_path / "mark"
    with ringloader.WorkerPool(2) as pool:
        loader = DataLoader(
            DiesWhenAsked(mark), batch_size=2, restart_workers=1, worker_pool=pool, prefetch_epochs=True
        )
        for epoch in (3, 4):
            loader.set_epoch(epoch)
            assert torch.cat(list(loader)).tolist() == [epoch] * 8
        for _ in range(2):
            assert torch.cat(list(loader)).tolist() == [4] * 8
        mark.touch()
        # The epoch that comes may have been begun before.
        for _ in range(2):
            assert torch.cat(list(loader)).tolist() == [4] * 8
        assert not mark.exists()
        loader.shutdown()


def test_a_successor_does_not_have_the_next_epoch(tmp_path):
    """Its dataset is as it is in the main process, where the next epoch may be named already."""
    mark = tmp_path / "mark"
    loader = DataLoader(
        DiesWhenAsked(mark), batch_size=2, restart_workers=1, num_workers=2, persistent_workers=True
    )
    loader.set_epoch(4)
    list(loader)
    loader.set_epoch(5)
    list(loader)
    mark.touch()
    iterator = iter(loader)
    loader.set_epoch(9)
    assert torch.cat(list(iterator)).tolist() == [5] * 8
    assert not mark.exists()
    assert torch.cat(list(loader)).tolist() == [9] * 8


def test_the_loader_of_a_pools_iterator_has_gone(tmp_path):
    with ringloader.WorkerPool(1) as pool:
        options: Any = {"worker_pool": pool, "restart_workers": 1}
        batches = iter(DataLoader(DiesOnce(10, {5: "kill"}, tmp_path), **options))
        gc.collect()
        got = []
        with pytest.raises(RuntimeError, match="the loader of its iterator has gone"):
            while True:
                got.append(next(batches))
        assert firsts(got) == list(range(5))


def test_without_workers_it_means_nothing():
    assert len(list(DataLoader(range(2), restart_workers=3))) == 2


def interrupted_loader(tmp_path: Path) -> Any:
    return DataLoader(DiesOnce(12, {5: "kill"}, tmp_path), batch_size=2, num_workers=2, restart_workers=3)


def raising_at_restarts(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Has a method run and then raise, once, as a signal handler would, where a successor is started."""
    method = getattr(owner, name)
    raised: list[bool] = []

    def run(*args: Any) -> Any:
        found = method(*args)
        if not raised and (name != "_record_start" or not args[0].sound):
            raised.append(True)
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(owner, name, run)


def taken_until_an_error(iterator: Any) -> tuple[list[int], BaseException]:
    got: list[int] = []
    try:
        while True:
            got += firsts([next(iterator)])
    except BaseException as error:
        return got, error


@pytest.mark.parametrize("is_watched", [False, True])
def test_an_interrupt_within_a_start_leaves_one_process_at_the_rings(
    is_watched, tmp_path, monkeypatch, snapshot
):
    iterator: Any = iter(interrupted_loader(tmp_path))
    if is_watched:
        raising_at_restarts(monkeypatch, ProcessTransport, "_record_start")
    else:
        started = ProcessTransport._record_start

        def interrupted(self: Any, worker: int, process: Any) -> None:
            if not self.sound:
                raise KeyboardInterrupt
            started(self, worker, process)

        monkeypatch.setattr(ProcessTransport, "_record_start", interrupted)
    got, error = taken_until_an_error(iterator)
    assert isinstance(error, KeyboardInterrupt)
    more, error = taken_until_an_error(iterator)
    # Not a second process beside the one that was started, which would take the same tasks.
    assert "exited unexpectedly" in str(error)
    assert "the start of a successor has failed or was interrupted" in error.__notes__[-1]
    assert got + more == list(range(len(got + more)))
    del iterator, error
    snapshot.assert_nothing_left()


def test_an_interrupt_behind_a_start_loses_nothing(tmp_path, monkeypatch, snapshot):
    iterator: Any = iter(interrupted_loader(tmp_path))
    raising_at_restarts(monkeypatch, Restarting, "successor")
    got, error = taken_until_an_error(iterator)
    assert isinstance(error, KeyboardInterrupt)
    more, error = taken_until_an_error(iterator)
    assert isinstance(error, StopIteration)
    assert got + more == list(range(12))
    del iterator, error
    snapshot.assert_nothing_left()


def test_an_interrupt_behind_a_start_and_the_end_leave_no_process(tmp_path, monkeypatch, snapshot):
    iterator: Any = iter(interrupted_loader(tmp_path))
    raising_at_restarts(monkeypatch, Restarting, "successor")
    _, error = taken_until_an_error(iterator)
    assert isinstance(error, KeyboardInterrupt)
    del iterator, error
    assert wait_without_children(0) == {}
    snapshot.assert_nothing_left()


def test_no_process_can_be_had(tmp_path, monkeypatch):
    loader = interrupted_loader(tmp_path)
    iterator: Any = iter(loader)

    def fork() -> int:
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr(os, "fork", fork)
    _, error = taken_until_an_error(iterator)
    assert isinstance(error, BlockingIOError)
    _, error = taken_until_an_error(iterator)
    assert "the start of a successor has failed" in error.__notes__[-1]
    monkeypatch.undo()
    loader.shutdown()
    # `multiprocessing` itself leaves the pipes of a process that could not be forked.
    assert wait_without_children(10) == {}


def test_a_shutdown_within_a_start_leaves_no_process(tmp_path, monkeypatch, snapshot):
    loader = interrupted_loader(tmp_path)
    iterator: Any = iter(loader)
    started = ProcessTransport._record_start

    def with_shutdown(self: Any, worker: int, process: Any) -> None:
        started(self, worker, process)
        if not self.sound:
            loader.shutdown()

    monkeypatch.setattr(ProcessTransport, "_record_start", with_shutdown)
    _, error = taken_until_an_error(iterator)
    assert "was ended by DataLoader.shutdown()" in str(error)
    assert wait_without_children(0) == {}
    del iterator, error
    snapshot.assert_nothing_left()


class OfTensors(torch.utils.data.Sampler[Any]):
    def __iter__(self) -> Any:
        number = torch.zeros((), dtype=torch.int64)
        for value in range(24):
            # One tensor each time: the batch that was sent has the value of then.
            number.fill_(value)
            yield [number]

    def __len__(self) -> int:
        return 24


class ByTensor(DiesOnce):
    def __getitem__(self, index: Any) -> torch.Tensor:
        return super().__getitem__(int(index))


@pytest.mark.parametrize("method", METHODS)
def test_an_index_that_is_a_tensor_is_sent_again(method, tmp_path, capfd):
    # torch's handle of its memory can be taken once only.
    loader = DataLoader(
        ByTensor(24, {3: "kill", 4: "kill"}, tmp_path),
        batch_sampler=OfTensors(),
        num_workers=2,
        restart_workers=2,
        multiprocessing_context=method,
    )
    assert firsts(loader) == list(range(24))
    loader.shutdown()
    assert "Error" not in capfd.readouterr().err
