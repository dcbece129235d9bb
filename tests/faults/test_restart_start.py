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


def taken_until_an_error(iterator: Any) -> tuple[list[int], BaseException]:
    got: list[int] = []
    try:
        while True:
            got += firsts([next(iterator)])
    except BaseException as error:
        return got, error


HAS_ENDED = "worker 0 was lost, and no successor could be started: "


@pytest.mark.parametrize("name", ["_end_of", "_begin", "start_later"])
@pytest.mark.parametrize("is_behind", [False, True])
def test_an_interrupted_restart_ends_the_iterator(name, is_behind, tmp_path, monkeypatch, snapshot):
    """Before a successor is started, and behind its start; the batches until then are right."""
    iterator: Any = iter(interrupted_loader(tmp_path))
    method = getattr(ProcessTransport, name)

    def interrupted(self: Any, *args: Any) -> Any:
        if self.sound:
            return method(self, *args)
        if is_behind:
            method(self, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(ProcessTransport, name, interrupted)
    got, error = taken_until_an_error(iterator)
    assert isinstance(error, KeyboardInterrupt)
    assert got == list(range(len(got)))
    assert wait_without_children(0) == {}
    more, error = taken_until_an_error(iterator)
    assert (more, str(error)) == ([], f"{HAS_ENDED}KeyboardInterrupt()")
    del iterator, error
    snapshot.assert_nothing_left()


def test_no_process_can_be_had(tmp_path, monkeypatch):
    loader = interrupted_loader(tmp_path)
    iterator: Any = iter(loader)

    def fork() -> int:
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr(os, "fork", fork)
    _, error = taken_until_an_error(iterator)
    assert str(error) == f"{HAS_ENDED}BlockingIOError(11, 'no more processes')"
    _, again = taken_until_an_error(iterator)
    assert str(again) == str(error)
    monkeypatch.undo()
    # `multiprocessing` itself leaves the pipes of a process that could not be forked.
    assert wait_without_children(10) == {}


def test_a_shutdown_within_a_start_leaves_no_process(tmp_path, monkeypatch, snapshot):
    loader = interrupted_loader(tmp_path)
    iterator: Any = iter(loader)
    begin = ProcessTransport._begin

    def with_shutdown(self: Any, *args: Any) -> Any:
        process = begin(self, *args)
        if not self.sound:
            loader.shutdown()
        return process

    monkeypatch.setattr(ProcessTransport, "_begin", with_shutdown)
    _, error = taken_until_an_error(iterator)
    assert "was ended by DataLoader.shutdown()" in str(error)
    assert wait_without_children(0) == {}
    del iterator, error
    snapshot.assert_nothing_left()
