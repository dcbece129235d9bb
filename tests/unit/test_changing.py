"""``num_workers="auto"``: workers are added and ended while an epoch runs, and batches stay as they are."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, get_worker_info

import ringloader
from faults.proc import Snapshot, is_running
from ringloader import DataLoader
from ringloader._auto import measuring, numbers
from ringloader._auto.controller import Controller, Decision
from ringloader._iterator import changing
from small_datasets import Made, Numbers, SharedStream

pytestmark = pytest.mark.rings_only

MOST = 5
both_tasks = pytest.mark.parametrize("task", ["batch", "sample"])


class Noisy(Dataset[Any]):
    """Sample ``i`` is random; with it come the number of its worker and the count of workers."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        info = get_worker_info()
        assert info is not None
        return torch.cat([torch.rand(400), torch.full((1,), index)]), info.id, info.num_workers


class Scripted(Controller):
    """Changes the number by one at each look, until it is the one of the script.

    Args:
        script: The number from a count of batches on.
        first: The number at the beginning.
    """

    def __init__(self, script: dict[int, int], first: int = 1) -> None:
        super().__init__(MOST, MOST)
        self.script = script
        self.number = first
        self.seen = 0
        self.changes: list[int] = []

    def is_due(self, batches: int, seconds: float) -> bool:  # noqa: ARG002
        return True

    def decide(self, look: Any, has_memory: Any = lambda _: True) -> Decision:  # noqa: ARG002
        self.seen += look.batches
        wanted = next((self.script[at] for at in sorted(self.script, reverse=True) if at <= self.seen), 1)
        change = (wanted > self.number) - (wanted < self.number)
        self.number += change
        if change:
            self.changes.append(self.number)
        return Decision(change, "it is said so")

    def decide_more(self, look: Any, has_memory: Any = None) -> Decision:  # noqa: ARG002
        return Decision(0)


@pytest.fixture(autouse=True)
def each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changing, "_MOST_BETWEEN", 1)
    monkeypatch.setattr(numbers, "bound", lambda: 2)
    monkeypatch.setattr(numbers, "most", lambda: MOST)


UP_AND_DOWN = {5: 3, 30: 1, 50: 4, 70: 2, 90: 5}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    found = Scripted(dict(UP_AND_DOWN))
    monkeypatch.setattr(numbers, "controller_of", lambda *_: found)
    return found


def slowly(batches: Any) -> Iterator[Any]:
    """Gives workers the time to answer, and waits for the ends of those that were told."""
    iterator = iter(batches)
    for batch in iterator:
        time.sleep(0.003)
        for number, worker in enumerate(iterator._workers):
            if iterator._transport.has_been_ended(number):
                worker.join(20)
        yield batch


def firsts(batches: Any) -> list[list[float]]:
    return [batch[0].tolist() for batch in batches]


def made(cls: Any = DataLoader, length: int = 480, **options: Any) -> Any:
    order = torch.Generator().manual_seed(5)
    dataset = options.pop("dataset", None) or Noisy(length)
    return cls(dataset, batch_size=4, shuffle=True, seed=3, generator=order, **options)


def fixed(**options: Any) -> Any:
    return made(**{"num_workers": 2, "seeding": "sample", **options})


def auto(task: str = "batch", **options: Any) -> Any:
    return made(num_workers="auto", worker_task=task, **options)


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
        assert type(loader.num_workers) is int


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


@both_tasks
@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
def test_a_worker_that_is_added_in_a_later_epoch_makes_samples(
    task: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numbers, "controller_of", lambda *_: Scripted({130: 3}))
    loader = auto(task, persistent_workers=True, worker_method=method)
    makers = [{worker for batch in slowly(loader) for worker in batch[1].tolist()} for _ in range(2)]
    assert makers == [{0}, {0, 1, 2}]
    loader.shutdown()


class Settling(Scripted):
    """Changes the number no more until the last change is seen in the batches."""

    def decide(self, look: Any, has_memory: Any = lambda _: True) -> Decision:
        if not self.is_settled:
            return Decision(0)
        found = super().decide(look, has_memory)
        if found.change:
            self._changed()
        return found


@both_tasks
def test_each_change_is_seen_in_the_batches_some_time(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Settling({5: 3, 40: 1, 70: 2})
    monkeypatch.setattr(numbers, "controller_of", lambda *_: script)
    assert firsts(slowly(auto(task))) == firsts(fixed())
    assert script.changes == [2, 3, 2, 1, 2]
    assert script.is_settled


def test_the_number_is_kept_for_the_next_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Scripted({5: 3})
    monkeypatch.setattr(numbers, "controller_of", lambda *_: script)
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
    [*itertools.product(["batch"], range(0, 100, 11)), *(("sample", at) for at in (6, 32, 72))],
)
def test_a_worker_that_is_killed_at_a_change_is_restarted(task: str, at: int) -> None:
    loader = auto(task, restart_workers=9)
    iterator = iter(loader)
    found = []
    for number, batch in enumerate(slowly(iterator)):
        found.append(batch[0].tolist())
        if number in (at, at + 1):
            # One that was told to end may have ended.
            with contextlib.suppress(ProcessLookupError):
                os.kill(iterator._workers[-1].pid, signal.SIGKILL)
    assert found == firsts(fixed())


def test_a_worker_that_is_killed_at_its_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Scripted({3: 2})
    monkeypatch.setattr(numbers, "controller_of", lambda *_: script)
    loader = auto()
    iterator = iter(loader)
    found = []
    with pytest.raises(RuntimeError, match=r"exited unexpectedly|killed by signal"):
        for batch in slowly(iterator):
            found.append(batch[0].tolist())
            if len(iterator._workers) == 2:
                os.kill(iterator._workers[1].pid, signal.SIGKILL)
    # The number stays after that, and the others go on as torch's do.
    script.script = {0: 5}
    rest = firsts(iterator)
    assert script.number == 2
    expected = firsts(fixed())
    assert found == expected[: len(found)]
    assert rest == [one for one in expected[len(found) :] if one in rest]


@pytest.mark.usefixtures("script")
@both_tasks
def test_nothing_is_left_behind(task: str) -> None:
    firsts(auto(task, length=8))
    before = Snapshot.take()
    pids = set()
    for _ in range(2):
        loader = auto(task)
        iterator = iter(loader)
        for batch in slowly(iterator):
            pids |= {worker.pid for worker in iterator._workers}
            del batch
        del iterator, loader
    assert len(pids) > MOST
    assert not [pid for pid in pids if is_running(pid)]
    before.assert_nothing_left()


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


def test_a_state_has_the_number_to_begin_with() -> None:
    first = made(cls=ringloader.StatefulDataLoader, num_workers="auto")
    assert "auto_workers" not in first.state_dict()
    numbers.begin_with(first, numbers.limits(None), 4)
    iterator = iter(first)
    found = [next(iterator)[0].tolist() for _ in range(3)]
    state = json.loads(json.dumps(first.state_dict()))
    assert state["auto_workers"] >= 4
    del iterator
    resumed = made(cls=ringloader.StatefulDataLoader, num_workers="auto")
    resumed.load_state_dict(state)
    iterator = iter(resumed)
    assert len(iterator._workers) >= 4
    found += firsts(iterator)
    assert found == firsts(fixed())
    # Another machine may have room for fewer; a loader with a number of its own keeps it.
    numbers.begin_with(resumed, numbers.limits(None), 99)
    assert numbers.found_for(resumed) == MOST
    own = fixed(cls=ringloader.StatefulDataLoader)
    own.load_state_dict(state)
    assert len(iter(own)._workers) == 2
    with pytest.raises(ValueError, match="'auto_workers' must be a positive int, not 0"):
        resumed.load_state_dict({**state, "auto_workers": 0})


@both_tasks
@pytest.mark.parametrize("name", ["start_later", "send"])
def test_an_interrupt_in_a_change_loses_no_batch(
    task: str, name: str, script: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ringloader._transport.processes import ProcessTransport

    change, has_come = getattr(ProcessTransport, name), []

    def interrupted(transport: Any, *arguments: Any) -> Any:
        if name == "send" and arguments[-1] is not None:
            return change(transport, *arguments)
        has_come.append(script.number)
        if len(has_come) == 2:
            raise KeyboardInterrupt
        return change(transport, *arguments)

    monkeypatch.setattr(ProcessTransport, name, interrupted)
    before = Snapshot.take()
    found = []
    iterator = iter(auto(task))
    batches = slowly(iterator)
    while len(found) < 120:
        try:
            found += [next(batches)[0].tolist()]
        except KeyboardInterrupt:
            batches = slowly(iterator)
    assert len(has_come) >= 2
    assert found == firsts(fixed())
    del batches, iterator
    before.assert_nothing_left()


def test_a_start_that_fails_leaves_the_others(
    script: Scripted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ringloader._transport.processes import ProcessTransport

    def refuse(*_: Any) -> None:
        raise OSError(12, "no memory")

    monkeypatch.setattr(ProcessTransport, "start_later", refuse)
    with caplog.at_level(logging.WARNING, "ringloader"):
        assert firsts(slowly(auto())) == firsts(fixed())
    assert script.number == 1
    assert caplog.text.count("stays at 1") == 1


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


def test_memory_for_two_workers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the real decision, over samples that wait."""
    running: list[int] = []

    def has_memory(pids: Any, more: int) -> bool:
        running.append(len(pids) + more)
        return len(pids) + more <= 2

    monkeypatch.setattr(measuring, "has_memory", has_memory)
    loader = DataLoader(Sleeps(60), batch_size=1, num_workers="auto")
    assert len(list(loader)) == 60
    assert loader.num_workers == 2
    assert set(running) == {2, 3}


class Sleeps(Dataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        time.sleep(0.05)
        return index


def burn(index: int) -> int:
    end = time.thread_time() + 0.004
    while time.thread_time() < end:
        pass
    return index


def test_it_does_not_grow_where_other_programs_have_all_processors() -> None:
    hog = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    hogs = [subprocess.Popen(hog, stdout=subprocess.PIPE) for _ in range(2 * len(os.sched_getaffinity(0)))]
    try:
        for process in hogs:
            assert process.stdout is not None
            process.stdout.readline()
        loader = DataLoader(Made(burn, 130), batch_size=1, num_workers="auto")
        assert torch.cat(list(loader)).tolist() == list(range(130))
        assert loader.num_workers == 1
    finally:
        for process in hogs:
            process.kill()
            process.communicate()


@both_tasks
def test_samples_that_wait_get_more_workers_than_the_bound(task: Any) -> None:
    loader = DataLoader(Sleeps(200), batch_size=1, num_workers="auto", worker_task=task)
    assert torch.cat(list(loader)).tolist() == list(range(200))
    assert 2 < loader.num_workers <= MOST


def test_iterable_datasets_have_the_bound() -> None:
    loader = DataLoader(SharedStream(range(40)), batch_size=4, num_workers="auto")
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(40))
    assert loader.num_workers == 2


def test_torchs_own_loader_has_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = auto(seeding="torch") if False else DataLoader(Numbers(8), num_workers="auto")
    monkeypatch.setenv("RINGLOADER", "off")
    iterator = iter(loader)
    assert len(iterator._workers) == loader.num_workers == 2
    assert len(list(iterator)) == 8


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


@pytest.mark.parametrize("value", ["Auto", "4", ""])
def test_another_text_is_an_error(value: Any) -> None:
    with pytest.raises(TypeError, match=f"num_workers must be an int or 'auto', not '{value}'"):
        DataLoader([1], num_workers=value)


def test_install_takes_no_number() -> None:
    with pytest.raises(TypeError, match=r"install\(\) takes no num_workers but 'auto', not 4"):
        ringloader.install(num_workers=4)  # type: ignore[typeddict-item]


class Deadly(Noisy):
    """A sample that kills worker 1, once: of the samples from ``at`` on, its first."""

    def __init__(self, length: int, at: int, folder: Path) -> None:
        super().__init__(length)
        self.at, self.taken, self.killed = at, folder / "taken", folder / "killed"

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        info = get_worker_info()
        assert info is not None
        if info.id == 0 and index >= self.at - 12:
            # The main process has too few batches to end worker 1, until that has its sample.
            until = time.monotonic() + 30
            while not self.taken.exists() and time.monotonic() < until:
                time.sleep(0.01)
        if info.id == 1 and index >= self.at and not self.killed.exists():
            self.taken.touch()
            # The main process tells this worker to end meanwhile.
            time.sleep(0.5)
            self.killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_worker_that_dies_where_it_is_to_end_loses_no_sample(
    restarts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has taken samples of a batch, which others wait for."""
    script = Scripted({5: 2, 27: 1})
    monkeypatch.setattr(numbers, "controller_of", lambda *_: script)
    dataset = Deadly(480, 112, tmp_path)
    loader = DataLoader(
        dataset, batch_size=4, seed=3, num_workers="auto", worker_task="sample", restart_workers=restarts
    )
    expected = firsts(DataLoader(Noisy(480), batch_size=4, seed=3, seeding="sample", num_workers=1))
    iterator = iter(loader)
    found: list[list[float]] = []
    errors = 0
    while True:
        try:
            found.append(next(iterator)[0].tolist())
            time.sleep(0.003)
        except StopIteration:
            break
        except RuntimeError as error:
            errors += "exited unexpectedly" in str(error)
    assert (tmp_path / "killed").exists()
    # The others make what the dead one had, also after the error.
    assert found == expected
    assert errors == (0 if restarts else 1)
    # On a busy machine it may die before it is to end.
    assert script.changes in ([2, 1], [2])


@pytest.mark.parametrize(("given", "most"), [(None, [4, 4, 10]), (3, [3, 3, 3])])
def test_the_window_of_shared_tasks_follows_the_number(
    given: int | None, most: list[int], script: Scripted
) -> None:
    script.script = {0: 1}
    loader = DataLoader(
        Noisy(200), batch_size=1, num_workers="auto", worker_task="sample", prefetch_factor=given
    )
    iterator = iter(loader)
    assert [iterator._most_tasks_of(workers) for workers in (1, 2, 5)] == most

    def under_way() -> int:
        # With those that have come before their turn.
        return int(iterator._send_idx - iterator._rcvd_idx)

    assert under_way() == most[0]
    script.script = {0: 5}
    assert max(under_way() for _ in slowly(iterator)) == most[2]


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    """A script for a pool of three, which wants more."""
    found = Scripted({5: 3, 30: 1, 50: 2})
    monkeypatch.setattr(numbers, "controller_of", lambda *_: found)
    return found


def pids_of(pool: Any) -> set[int]:
    return {process.process.pid for process in pool._crew._processes}


@pytest.mark.parametrize(
    ("task", "method"),
    [*itertools.product(["batch", "sample"], ["fork"]), ("batch", "spawn"), ("sample", "forkserver")],
)
def test_processes_come_from_a_pool_and_go_back(task: str, method: str, limited: Scripted) -> None:
    other = fixed()
    with ringloader.WorkerPool(3, start_method=method) as pool:
        loader = auto(task, worker_pool=pool)
        assert loader.num_workers == 2
        pids: set[int] = set()
        for _ in range(2):
            found = []
            for batch in slowly(loader):
                found.append(batch[0].tolist())
                pids |= pids_of(pool)
                # What was given back is idle, for other iterators.
                lent = sum(process.is_lent for process in pool._crew._processes)
                assert lent <= 3 and len(pids) <= 3
            assert found == firsts(other)
            limited.seen = 0
        assert limited.changes[:5] == [2, 3, 2, 1, 2]
        assert pids_of(pool) == pids and len(pids) == 3


def test_a_process_that_was_given_back_serves_another_iterator(limited: Scripted) -> None:
    limited.script = {5: 3, 30: 1}
    with ringloader.WorkerPool(3, start_method="spawn") as pool:
        # As in a loop over a loader that nobody else has.
        iterator = iter(auto(worker_pool=pool))
        found, most = [], 0
        for number, batch in enumerate(slowly(iterator)):
            found.append(batch[0].tolist())
            most = max(most, len(iterator._workers))
            if number == 60:
                before = pids_of(pool)
                other = fixed(worker_pool=pool)
                assert firsts(other) == firsts(fixed())
                assert pids_of(pool) == before, "none was started for it"
        assert found == firsts(fixed())
        assert most == 3


def test_a_pool_is_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    with ringloader.WorkerPool(1) as pool:
        loader = auto(worker_pool=pool)
        assert loader.num_workers == 1
        assert numbers.limits(pool) == (1, 1)
        iterator = iter(loader)
        assert next(iterator)[2].tolist() == [1] * 4
        assert iterator._changing._controller.most == 1
        del iterator
    # A loader that has found its number gets a smaller pool, or fewer processors.
    loader = auto()
    numbers.begin_with(loader, numbers.limits(None), 4)
    monkeypatch.setattr(numbers, "most", lambda: 3)
    iterator = iter(loader)
    assert len(iterator._workers) == 3
    assert firsts(iterator) == firsts(fixed())


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("at", [6, 31, 52])
@both_tasks
def test_a_pools_process_that_is_killed_at_a_change_is_replaced(task: str, at: int) -> None:
    with ringloader.WorkerPool(3, start_method="fork") as pool:
        iterator = iter(auto(task, worker_pool=pool, restart_workers=9))
        found = []
        for number, batch in enumerate(slowly(iterator)):
            found.append(batch[0].tolist())
            if number in (at, at + 1):
                with contextlib.suppress(ProcessLookupError, TypeError):
                    os.kill(iterator._workers[-1].pid, signal.SIGKILL)
        assert found == firsts(fixed())
        del iterator, batch
        # The pool is as before.
        assert firsts(fixed(worker_pool=pool)) == firsts(fixed())


def test_iterators_that_run_at_once_have_workers_of_their_own() -> None:
    loader = auto()
    first = iter(loader)
    next(first)
    numbers.begin_with(loader, numbers.limits(None), 3)
    second = iter(loader)
    for _ in range(10):
        assert next(second) is not None
        assert next(first) is not None
    assert first._changing._controller is not second._changing._controller
    assert [len(one._workers) >= number for one, number in ((first, 1), (second, 3))] == [True, True]
    assert numbers.found_for(loader) == second._changing.number


def test_without_the_option_nothing_is_put_around_next() -> None:
    iterator = iter(DataLoader(Numbers(4), num_workers=1))
    assert iterator._changing is None
    assert iterator._source == iterator._scheduler.next
    list(iterator)
