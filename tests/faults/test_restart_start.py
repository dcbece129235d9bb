"""The start of a successor is interrupted, fails, or meets the end of the iterator."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from faults.failing_datasets import Numbers
from faults.proc import Snapshot, wait_without_children
from faults.restart_parts import DiesOnce, firsts
from ringloader import DataLoader
from ringloader._iterator.restarting import Restarting
from ringloader._transport.processes import ProcessTransport

pytestmark = pytest.mark.rings_only


@pytest.fixture
def snapshot() -> Snapshot:
    firsts(DataLoader(Numbers(4), num_workers=1))
    return Snapshot.take()


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
