"""``restart_workers``: lost workers get successors; each batch comes once, in order, with its bytes."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info

import ringloader
from faults.failing_datasets import Dies, Numbers
from faults.proc import Snapshot
from faults.restart_parts import METHODS, DiesOnce, firsts
from ringloader import DataLoader, Dispatch

pytestmark = pytest.mark.rings_only


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
    notes = ["it was in batch 3 of the epoch: dataset indices [6, 7]"]
    if most:
        notes += [
            "it died in the sample at index 6",
            f"restart_workers={most}: all restarts of this epoch are used",
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


def test_without_workers_it_means_nothing():
    assert len(list(DataLoader(range(2), restart_workers=3))) == 2


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
