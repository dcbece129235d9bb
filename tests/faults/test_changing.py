"""``num_workers="auto"``: processes that die, cannot start or are interrupted where their number changes."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import get_worker_info

from faults.proc import Snapshot, is_running
from ringloader import DataLoader
from scripted_number import (
    MOST,
    UP_AND_DOWN,
    Noisy,
    Scripted,
    auto,
    both_tasks,
    firsts,
    fixed,
    look_at_each_batch,
    put,
    slowly,
)

pytestmark = pytest.mark.rings_only


@pytest.fixture(autouse=True)
def each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    look_at_each_batch(monkeypatch)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    return put(Scripted(dict(UP_AND_DOWN)), monkeypatch)


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
    script = put(Scripted({3: 2}), monkeypatch)
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
    script = put(Scripted({5: 2, 27: 1}), monkeypatch)
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
