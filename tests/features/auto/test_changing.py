"""``num_workers="auto"``: workers are added and ended while an epoch runs, and batches stay as they are."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, get_worker_info

import ringloader
from ringloader import DataLoader
from ringloader._features.auto import auto_workers, controller
from ringloader._features.auto.controller import Decision
from scripted_number import (
    MOST,
    UP_AND_DOWN,
    Noisy,
    Scripted,
    auto,
    auto_of,
    begin_with,
    both_tasks,
    firsts,
    fixed,
    look_at_each_batch,
    made,
    put,
    slowly,
)
from small_datasets import Numbers, Stream

pytestmark = pytest.mark.rings_only


@pytest.fixture(autouse=True)
def each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    look_at_each_batch(monkeypatch)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    return put(Scripted(dict(UP_AND_DOWN)), monkeypatch)


class NoisyInThreads(Noisy):
    """The same with the generators of threads."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        info = get_worker_info()
        assert info is not None
        generator = info.rng.torch_generator
        return (
            torch.cat([torch.rand(400, generator=generator), torch.full((1,), index)]),
            info.id,
            info.num_workers,
        )


@both_tasks
@pytest.mark.parametrize("persistent", [False, True])
def test_threads_too(task: str, persistent: bool, script: Scripted) -> None:
    options = {"dataset": NoisyInThreads(480), "persistent_workers": persistent, "worker_method": "thread"}
    before = threading.active_count()
    expected, found = fixed(**options), auto(task, **options)
    for _ in range(3):
        assert firsts(slowly(found)) == firsts(expected)
    assert set(script.changes) >= {1, 2, 3, 4, 5}
    found.shutdown()
    expected.shutdown()
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("task", "method", "persistent"),
    [
        *itertools.product(["batch"], ["fork", "spawn", "forkserver"], [False, True]),
        ("sample", "fork", False),
        ("sample", "fork", True),
        ("sample", "spawn", True),
        ("sample", "forkserver", False),
    ],
)
def test_batches_are_those_of_any_number(task: str, method: str, persistent: bool, script: Scripted) -> None:
    expected = fixed(persistent_workers=persistent)
    found = auto(task, persistent_workers=persistent, multiprocessing_context=method)
    if method != "fork":
        # Starts take long.
        script.script = {5: 3, 40: 1, 70: 2}
    for _ in range(2 if persistent or method == "fork" else 1):
        assert firsts(slowly(found)) == firsts(expected)
    assert set(script.changes) >= {1, 2, 3}
    found.shutdown()
    expected.shutdown()
    assert ringloader.report(found).path == "native"


@pytest.mark.parametrize(
    "options",
    [
        {"restart_workers": 2},
        {"sample_timeout": 60.0},
        {"watchdog": 60.0},
        {"stats": True},
        {"main_prefetch": 2},
        {"prefetch_factor": 1},
        {"prefetch_factor": 5},
        {"timeout": 60},
        {"max_shared_bytes": 1 << 20},
        {"seeding": "batch"},
        {"task": "sample", "sample_timeout": 60.0},
        {"task": "sample", "watchdog": 60.0},
        {"task": "sample", "stats": True},
        {"task": "sample", "main_prefetch": 2},
        {"task": "sample", "prefetch_factor": 1},
        {"task": "sample", "max_shared_bytes": 1 << 20},
    ],
    ids=str,
)
def test_other_options_go_with_it(options: dict[str, Any], script: Scripted) -> None:
    expected = fixed(seeding=options.get("seeding", "sample"))
    assert firsts(slowly(auto(**options))) == firsts(expected)
    assert len(script.changes) > 4


@both_tasks
def test_as_they_come(task: str, script: Scripted) -> None:
    found = sorted(firsts(slowly(auto(task, in_order=False))))
    assert found == sorted(firsts(fixed()))
    assert len(script.changes) > 4


def test_the_first_workers_run(script: Scripted) -> None:
    """Numbers of workers are those of the processes that run; their count never changes."""
    loader = auto()
    iterator = iter(loader)
    for batch in slowly(iterator):
        assert batch[2].tolist() == [MOST] * 4
        assert set(batch[1].tolist()) <= set(range(MOST))
        alive = [worker for worker in iterator._workers if worker.is_alive()]
        assert script.number <= len(alive) <= MOST
        assert loader.num_workers == script.number
        assert f"num_workers=auto ({script.number})" in repr(loader)
        assert isinstance(loader.num_workers, int) and json.dumps(loader.num_workers) == str(script.number)


@both_tasks
@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
def test_epochs_that_are_begun_before_iter(task: str, method: str, script: Scripted) -> None:
    kept = {"persistent_workers": True, "prefetch_epochs": True, "worker_method": method}
    if method == "thread":
        kept["dataset"] = NoisyInThreads(480)
    script.script |= {130: 1, 150: 4, 250: 2, 300: 5, 370: 1}
    expected, found = fixed(**kept), auto(task, **kept)
    for _ in range(4):
        assert firsts(slowly(found)) == firsts(expected)
    assert script.changes.count(1) == 3 and set(script.changes) == {1, 2, 3, 4, 5}
    found.shutdown()
    expected.shutdown()


class Unhurried(Noisy):
    """Takes so long for a sample that no worker makes them all."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        time.sleep(0.001)
        return super().__getitem__(index)


@both_tasks
@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
def test_a_worker_that_is_added_in_a_later_epoch_makes_samples(
    task: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(Scripted({130: 3}), monkeypatch)
    loader = auto(task, dataset=Unhurried(480), persistent_workers=True, worker_method=method)
    makers = [{worker for batch in slowly(loader) for worker in batch[1].tolist()} for _ in range(2)]
    assert makers == [{0}, {0, 1, 2}]
    loader.shutdown()


class Settling(Scripted):
    """Changes the number again once the last change is seen in the batches."""

    def __init__(self) -> None:
        super().__init__({})
        self.steps = [1, 1, -1, -1, 1]

    def decide(self, look: Any, has_memory: Any = lambda _: True) -> Decision:  # noqa: ARG002
        if not self.is_settled or not self.steps:
            return Decision(0)
        change = self.steps.pop(0)
        self.number += change
        self.changes.append(self.number)
        self._changed()
        return Decision(change, "it is said so")


@both_tasks
def test_each_change_is_seen_in_the_batches_some_time(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = put(Settling(), monkeypatch)
    for _ in slowly(auto(task, length=40_000)):
        if not script.steps and script.is_settled:
            break
    assert script.changes == [2, 3, 2, 1, 2]
    assert script.is_settled


def test_the_number_is_kept_for_the_next_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    put(Scripted({5: 3}), monkeypatch)
    loader = auto()
    assert loader.num_workers == 2
    list(slowly(loader))
    assert loader.num_workers == 3
    iterator = iter(loader)
    assert len(iterator._workers) == 3
    next(iterator)
    iterator._shutdown_workers()


def mark(worker: int) -> None:
    folder = Path(os.environ["RINGLOADER_TEST_MARKS"])
    (folder / f"{worker}-{os.getpid()}-{time.monotonic_ns()}").touch()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_init_fn_runs_once_in_each(
    method: str, script: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGLOADER_TEST_MARKS", str(tmp_path))
    list(slowly(auto(worker_init_fn=mark, multiprocessing_context=method)))
    marks = [file.name.split("-")[:2] for file in tmp_path.iterdir()]
    assert len(marks) == len({pid for _, pid in marks})
    # One at first, and one for each that was added.
    added = sum(now > before for before, now in zip([1, *script.changes], script.changes, strict=False))
    assert len(marks) == 1 + added


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize(
    ("task", "at"),
    [*itertools.product(["batch"], [6, 7, 31, 32, 33, 51, 71]), *(("sample", at) for at in (7, 32, 51))],
)
def test_it_goes_on_from_a_state_in_the_middle_of_a_change(task: str, at: int) -> None:
    def loader() -> Any:
        return auto(task, cls=ringloader.StatefulDataLoader)

    stopped = loader()
    iterator = iter(stopped)
    found = [next(iterator)[0].tolist() for _ in range(at)]
    state = stopped.state_dict()
    del iterator, stopped
    resumed = loader()
    resumed.load_state_dict(state)
    found += firsts(slowly(resumed))
    assert found == firsts(fixed())


def test_each_change_is_a_line_of_the_log(script: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ringloader"):
        list(slowly(auto()))
    lines = [one for one in caplog.messages if "num_workers='auto'" in one]
    assert len(lines) == len(script.changes)
    assert "2 workers instead of 1: it is said so (" in lines[0]
    assert "batches/s, the caller waits" in lines[0]


def test_the_figures_of_an_epoch_have_the_changes(script: Scripted, tmp_path: Path) -> None:
    loader = auto(stats=True)
    list(slowly(loader))
    stats = loader.epoch_stats()
    assert [one.num_workers for one in stats.changes] == script.changes
    assert stats.num_workers == script.number
    seconds = [one.seconds for one in stats.changes]
    assert seconds == sorted(seconds)
    assert 0 < seconds[0] < seconds[-1] < stats.seconds
    assert [one.id for one in stats.workers] == list(range(max(script.changes)))
    assert sum(one.batches for one in stats.workers) == stats.batches == 120
    assert f"{script.changes[0]} workers from {seconds[0]:.3f} s on: it is said so (" in repr(stats)
    assert stats.to_dict()["changes"][0]["num_workers"] == script.changes[0]
    stats.save_trace(tmp_path / "trace")
    events = json.loads((tmp_path / "trace").read_text())["traceEvents"]
    assert [one["args"]["num_workers"] for one in events if one["ph"] == "C"] == script.changes
    assert "num_workers" not in stats.verdict.change
    # Those of an epoch are its own.
    script.script = {0: script.number}
    list(loader)
    assert loader.epoch_stats().changes == ()


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_install_reaches_loaders_with_any_number(workers: int, script: Scripted) -> None:
    plain = TorchLoader(Numbers(400), batch_size=4, num_workers=workers)
    expected = [batch.tolist() for batch in plain]
    with ringloader.installed(num_workers="auto"):
        assert [batch.tolist() for batch in slowly(plain)] == expected
        assert ringloader.report(plain).path == "native"
    assert len(script.changes) > 4
    # The number is the program's.
    assert plain.num_workers == workers
    assert plain.prefetch_factor == (2 if workers else None)


def test_convert_makes_a_loader_find_its_number(script: Scripted) -> None:
    loader = ringloader.convert(TorchLoader(Numbers(400), batch_size=4), num_workers="auto")
    assert loader.num_workers == 2
    assert len(list(slowly(loader))) == 100
    assert len(script.changes) > 4
    assert "num_workers=auto" in repr(loader)


def test_a_loader_that_is_made_of_the_attributes_of_another_one_finds_its_number_too(
    script: Scripted,
) -> None:
    first = auto()
    list(slowly(first))
    number = first.num_workers
    assert number == script.number
    for given in (number, copy.deepcopy(number), pickle.loads(pickle.dumps(number))):
        found = made(num_workers=given)
        assert found.num_workers == 2
        assert "num_workers=auto (2)" in repr(found)
        assert auto_of(iter(found)) is not None
    # A number that is computed is a number.
    assert auto_of(iter(made(num_workers=number * 1, seeding="sample"))) is None
    copied = pickle.loads(pickle.dumps(first))
    assert auto_of(iter(copied)) is not None
    assert "auto_workers" not in vars(first)
    with pytest.raises(TypeError, match="unexpected keyword argument 'auto_workers'"):
        auto(auto_workers=True)


def test_convert_gives_the_number_back(script: Scripted) -> None:
    loader = auto()
    list(slowly(loader))
    fixed_now = ringloader.convert(loader, num_workers=None, seeding="sample")
    assert type(fixed_now.num_workers) is int and fixed_now.num_workers == script.number
    assert auto_of(iter(fixed_now)) is None


@pytest.mark.parametrize("value", ["Auto", "4", ""])
def test_another_text_is_an_error(value: Any) -> None:
    with pytest.raises(TypeError, match=f"num_workers must be an int or 'auto', not '{value}'"):
        DataLoader([1], num_workers=value)


def test_install_takes_no_number() -> None:
    with pytest.raises(TypeError, match="num_workers must be 'auto' here, not 4: pass a number to DataL"):
        ringloader.install(num_workers=4)  # type: ignore[typeddict-item]


class WithOwnLoader(Dataset[Any]):
    """Each sample is the numbers that a loader of the dataset's own gives, and its number of workers."""

    def __init__(self, loader: Any = None) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        loader = self.loader or DataLoader([index, 3, 5], num_workers="auto", prefetch_factor=3)
        return [batch.tolist() for batch in loader], loader.num_workers


def as_it_is(sample: Any) -> Any:
    return sample


@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
@pytest.mark.parametrize("is_made_before", [False, True])
def test_a_loader_in_a_worker_has_no_workers(method: Any, is_made_before: bool) -> None:
    own = DataLoader([0, 3, 5], num_workers="auto") if is_made_before else None
    outer = DataLoader(
        WithOwnLoader(own), batch_size=None, num_workers=1, collate_fn=as_it_is, worker_method=method
    )
    first = 0 if is_made_before else 1
    assert list(outer) == [([[0], [3], [5]], 0), ([[first], [3], [5]], 0)]


@pytest.mark.parametrize(("given", "most"), [(None, [4, 4, 10]), (3, [3, 3, 3])])
def test_the_window_of_shared_tasks_follows_the_number(
    given: int | None, most: list[int], script: Scripted
) -> None:
    script.script = {0: 1}
    loader = DataLoader(
        Noisy(200), batch_size=1, num_workers="auto", worker_task="sample", prefetch_factor=given
    )
    iterator = iter(loader)
    assert [iterator._transport.joint_tasks(workers) for workers in (1, 2, 5)] == most

    def under_way() -> int:
        # With those that have come before their turn.
        return int(iterator._send_idx - iterator._rcvd_idx)

    assert under_way() == most[0]
    script.script = {0: 5}
    assert max(under_way() for _ in slowly(iterator)) == most[2]


def test_iterators_that_run_at_once_have_workers_of_their_own() -> None:
    loader = auto()
    first = iter(loader)
    next(first)
    begin_with(loader, 3)
    second = iter(loader)
    for _ in range(10):
        assert next(second) is not None
        assert next(first) is not None
    assert auto_of(first)._controller is not auto_of(second)._controller
    assert [len(one._workers) >= number for one, number in ((first, 1), (second, 3))] == [True, True]
    assert auto_workers._controllers.get(loader).number == auto_of(second).number


def test_without_the_option_nothing_is_put_around_next() -> None:
    iterator = iter(DataLoader(Numbers(4), num_workers=1))
    assert auto_of(iterator) is None
    assert iterator._source == iterator._scheduler.next
    list(iterator)


@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
def test_a_report_says_that_it_is_in_effect(method: Any, script: Scripted) -> None:
    plain: Any = TorchLoader(Numbers(400), batch_size=4)
    with ringloader.installed(num_workers="auto", worker_method=method):
        list(slowly(plain))
    assert ringloader.report(plain).counters["workers"] == script.number
    assert f'num_workers="auto" ({script.number})' in str(ringloader.report(plain))
    lines = [str(one) for one in ringloader.reports()]
    assert f'; num_workers="auto" ({script.number}); 100 batches' in lines[-1]
    assert "workers" not in ringloader.report(fixed_and_iterated()).counters


def fixed_and_iterated() -> Any:
    loader = DataLoader(Numbers(4), num_workers=1)
    list(loader)
    return loader


def test_a_loader_that_has_the_bound_is_reported_too() -> None:
    loader = DataLoader(Stream([1, 2]), num_workers="auto")
    list(loader)
    assert ringloader.report(loader).counters["workers"] == 2


def test_a_number_that_stays_is_a_line_of_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "RAMP_BATCHES", 8)
    monkeypatch.setattr(controller, "RAMP_SECONDS", 0.1)
    # The caller is the limit.
    monkeypatch.setattr(controller, "_CALLER_WAITS", 1.1)
    with caplog.at_level(logging.INFO, "ringloader"):
        for _ in DataLoader(Numbers(100), batch_size=1, num_workers="auto"):
            time.sleep(0.02)
    lines = [one for one in caplog.messages if "num_workers='auto'" in one]
    assert len(lines) == 1
    assert "stays at 1 for now: at most 2, or 5 that wait (" in lines[0]
