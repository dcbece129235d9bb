"""A dispatching process, its workers and its parent, each of which may die."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time

import pytest
import torch

from faults.proc import Snapshot, descendants, is_running, wait_until
from faults.script import finish, start
from ringloader import DataLoader, Dispatch
from ringloader._features.dispatch import process

DISPATCHER_DIED = r"the dispatching process \(pid \d+\) that reads the source .* exited unexpectedly"


class Numbers:
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return map(torch.tensor, range(self.n))


class DiesAt:
    """The process that reads ends in front of one number."""

    def __init__(self, number, how):
        self.number = number
        self.how = how

    def __iter__(self):
        for number in range(100):
            if number == self.number:
                os._exit(self.how) if self.how >= 0 else os.kill(os.getpid(), -self.how)
            yield torch.tensor(number)


class Waits:
    """Gives some numbers, then waits forever; says when it is closed."""

    def __init__(self, numbers, folder):
        self.numbers = numbers
        self.folder = folder

    def __iter__(self):
        try:
            for number in range(self.numbers):
                yield torch.tensor(number)
            (self.folder / str(os.getpid())).touch()
            threading.Event().wait()
        finally:
            (self.folder / "closed").touch()


class WillNotEnd(Waits):
    def __iter__(self):
        (self.folder / str(os.getpid())).touch()
        while True:
            try:
                time.sleep(60)
            except BaseException:
                continue
        yield


def kill_own_worker(item):
    if int(item) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


@pytest.fixture
def snapshot():
    assert len(list(DataLoader(Dispatch(Numbers(4)), num_workers=1))) == 4
    return Snapshot.take()


def dispatcher_of(iterator):
    (feature,) = iterator._features
    return feature._dispatching._process


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("at", [0, 7])
@pytest.mark.parametrize("how", [0, 3, -signal.SIGKILL])
def test_a_dead_dispatcher_is_named_and_nothing_is_left(how, at, persistent, snapshot):
    loader = DataLoader(Dispatch(DiesAt(at, how)), None, num_workers=2, persistent_workers=persistent)
    found = []
    with pytest.raises(RuntimeError, match=DISPATCHER_DIED) as raised:
        for item in loader:
            found.append(int(item))
    # Items that the process had sent come before that.
    assert found == list(range(at))
    del loader, raised
    snapshot.assert_nothing_left()


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_a_dispatcher_that_was_not_forked_dies(start_method):
    dataset = Dispatch(DiesAt(3, -signal.SIGKILL))
    with pytest.raises(RuntimeError, match=DISPATCHER_DIED):
        list(DataLoader(dataset, num_workers=2, multiprocessing_context=start_method))


def test_it_dies_while_workers_wait(tmp_path, snapshot):
    iterator = iter(DataLoader(Dispatch(Waits(3, tmp_path)), None, num_workers=2))
    assert [int(next(iterator)) for _ in range(3)] == [0, 1, 2]
    dispatcher_of(iterator).kill()
    with pytest.raises(RuntimeError, match=DISPATCHER_DIED) as raised:
        next(iterator)
    del iterator, raised
    snapshot.assert_nothing_left()


def test_a_dead_worker_is_torchs_error_and_the_dispatcher_ends(snapshot):
    loader = DataLoader(Dispatch(Numbers(100)).map(kill_own_worker), None, num_workers=2)
    with pytest.raises(RuntimeError, match="exited unexpectedly") as raised:
        list(loader)
    assert "DataLoader worker" in str(raised.value)
    del loader, raised
    snapshot.assert_nothing_left()


def test_a_waiting_source_is_closed_at_the_end_of_its_iterator(tmp_path, snapshot, monkeypatch):
    monkeypatch.setattr(process, "_GRACE_SECONDS", 60.0)
    iterator = iter(DataLoader(Dispatch(Waits(3, tmp_path)), None, num_workers=2))
    assert [int(next(iterator)) for _ in range(3)] == [0, 1, 2]
    pid = dispatcher_of(iterator).pid
    assert wait_until((tmp_path / str(pid)).exists, 20)
    begun = time.monotonic()
    del iterator
    # Less than what a process has that does not end.
    assert time.monotonic() - begun < 30
    assert not is_running(pid)
    assert (tmp_path / "closed").exists()
    snapshot.assert_nothing_left()


def test_a_source_that_will_not_end_is_killed(tmp_path, snapshot):
    iterator = iter(DataLoader(Dispatch(WillNotEnd(0, tmp_path)), None, num_workers=1))
    pid = dispatcher_of(iterator).pid
    assert wait_until((tmp_path / str(pid)).exists, 20)
    del iterator
    assert not is_running(pid)
    snapshot.assert_nothing_left()


class NotToBeSent:
    """A source whose pickling raises the errors by which memory is refused too."""

    def __init__(self, error):
        self.error = error

    def __iter__(self):
        return iter(range(4))

    def __reduce__(self):
        raise self.error


@pytest.mark.parametrize("error", [ValueError("a pointer"), OSError(12, "mine")], ids=repr)
def test_a_source_that_cannot_be_sent_is_its_own_error(error, snapshot):
    """Nothing is said of memory."""
    loader = DataLoader(Dispatch(NotToBeSent(error)), num_workers=1, multiprocessing_context="forkserver")
    for _ in range(2):
        with pytest.raises(type(error)) as raised:
            iter(loader)
        assert raised.value is error
    error.__traceback__ = None
    del raised, loader
    gc.collect()
    snapshot.assert_nothing_left()


def test_workers_that_cannot_start_leave_no_dispatcher(snapshot, monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    loader = DataLoader(
        Dispatch(Numbers(5)), num_workers=2, multiprocessing_context="spawn", collate_fn=lambda batch: batch
    )
    # From 3.12 on Python says "get" instead of "pickle".
    with pytest.raises(Exception, match="local object"):
        iter(loader)
    del loader
    assert wait_until(lambda: not descendants(), 20)
    snapshot.assert_nothing_left()


PARENT = """
    import itertools
    import pathlib
    from ringloader import Dispatch

    class Source:
        def __iter__(self):
            yield from map(torch.tensor, range(3))
            if {waits}:
                time.sleep(1000)
            yield from map(torch.tensor, itertools.count())

    def main():
        loader = DataLoader(Dispatch(Source()), None, num_workers=2, multiprocessing_context={method!r})
        iterator = iter(loader)
        next(iterator)
        (feature,) = iterator._features
        print(feature._dispatching._process.pid, *(w.pid for w in iterator._workers), flush=True)
        time.sleep(1000)

    if __name__ == "__main__":
        main()
"""


@pytest.mark.parametrize(("method", "waits"), [("fork", False), ("fork", True), ("spawn", True)])
def test_it_ends_when_the_parent_is_killed(method, waits, tmp_path):
    process = start("ringloader", PARENT.format(method=method, waits=waits), tmp_path)
    try:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 3, process.stderr.read()
        process.kill()
        assert wait_until(lambda: not any(map(is_running, pids)), 20), "processes outlive their parent"
        finish(process, 20)
    finally:
        process.kill()
        process.communicate()
