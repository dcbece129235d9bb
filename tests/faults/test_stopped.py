"""Workers that are busy, stopped, or asleep where only SIGKILL reaches them, when they are to end."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import multiprocessing
import os
import platform
import signal
import time
from multiprocessing.util import Finalize

import pytest

from faults.failing_datasets import Numbers
from faults.proc import Snapshot, descendants, is_running, wait_until
from faults.script import finish, start
from ringloader import DataLoader, Dispatch, WorkerPool
from ringloader._common import proc
from ringloader._start import processes
from ringloader._transport.processes import ProcessTransport

pytestmark = [pytest.mark.rings_only, pytest.mark.limit(300)]

# Far less than torch's five seconds for each worker, which then lives on.
SOON = 4.5

_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
_CLONE_VFORK = 0x4000


class Notes(Numbers):
    """Notes in a file of its worker that it came to its end, as ``multiprocessing`` ends a process."""

    def __init__(self, n, folder):
        super().__init__(n)
        self.folder = folder
        self.pid = os.getpid()

    def __getitem__(self, index):
        if self.pid != os.getpid():
            self.pid = os.getpid()
            Finalize(None, (self.folder / f"ended-{self.pid}").touch, exitpriority=1)
        return super().__getitem__(index)


class Sleeps(Numbers):
    """A dataset whose worker waits in the kernel, at one index, for a child that does not end."""

    def __init__(self, n, at, folder):
        super().__init__(n)
        self.at = at
        self.folder = folder

    def __getitem__(self, index):
        if index >= self.at:
            (self.folder / f"worker-{os.getpid()}").touch()
            # Holds the interpreter lock, as only one thread goes on in the child.
            syscall = ctypes.PyDLL(None).syscall
            syscall.restype = ctypes.c_long
            no = ctypes.c_long(0)
            if (
                syscall(ctypes.c_long(_CLONE), ctypes.c_long(_CLONE_VFORK | signal.SIGCHLD), no, no, no, no)
                == 0
            ):
                (self.folder / f"child-{os.getpid()}").touch()
                time.sleep(60)
                os._exit(0)
        return super().__getitem__(index)


class Endless:
    def __iter__(self):
        number = 0
        while True:
            yield number
            number += 1


def state(pid):
    return proc.state_of(pid)


def stop(pids):
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    assert wait_until(lambda: all(state(pid) == "T" for pid in pids), 10)


def pids_noted(folder, kind):
    return [int(path.name.partition("-")[2]) for path in folder.glob(f"{kind}-*")]


@pytest.fixture
def children(tmp_path):
    yield tmp_path
    for pid in pids_noted(tmp_path, "child"):
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("persistent", "how"), [(False, "del"), (True, "shutdown")])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_stopped_workers_end(method, persistent, how):
    options = {"multiprocessing_context": method, "persistent_workers": persistent, "num_workers": 2}
    loader = DataLoader(Numbers(50), **options)
    assert len(list(loader)) == 50
    loader.shutdown()
    snapshot = Snapshot.take()
    iterator = iter(loader)
    next(iterator)
    processes = iterator._workers
    pids = [process.pid for process in processes]
    stop(pids)
    before = time.monotonic()
    if how == "shutdown":
        loader.shutdown()
    else:
        del iterator
        loader._iterator = None
        gc.collect()
    assert time.monotonic() - before < SOON
    assert [process.exitcode for process in processes] == [0, 0], "they end as those do that go on"
    assert not any(map(is_running, pids))
    iterator = None
    del processes
    loader.shutdown()
    snapshot.assert_nothing_left()
    assert [int(batch[0, 0]) for batch in loader] == list(range(50)), "it may be used again"
    loader.shutdown()


def test_a_stopped_worker_goes_to_its_own_end(tmp_path):
    """The worker's finalizers run, as when it was never stopped."""
    loader = DataLoader(Notes(50, tmp_path), num_workers=2, multiprocessing_context="spawn")
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    pids = [process.pid for process in iterator._workers]
    stop(pids)
    loader.shutdown()
    assert set(pids) <= set(pids_noted(tmp_path, "ended"))


@pytest.mark.skipif(_CLONE is None, reason="no number of the system call for this machine")
def test_workers_asleep_in_the_kernel_are_killed(children, monkeypatch):
    """A sleep that SIGTERM does not end; torch leaves such a worker behind."""
    monkeypatch.setattr(ProcessTransport, "_join_seconds", 1.0)
    loader = DataLoader(Sleeps(50, 8, children), num_workers=4)
    iterator = iter(loader)
    for _ in range(8):
        next(iterator)
    workers = iterator._workers
    pids = [process.pid for process in workers]
    assert wait_until(lambda: [state(pid) for pid in pids] == ["D"] * 4, 10)
    assert sorted(pids_noted(children, "worker")) == sorted(pids)
    before = time.monotonic()
    loader.shutdown()
    assert time.monotonic() - before < 8, "1 s, 1 s after SIGTERM, 1 s after SIGKILL at most"
    assert [process.exitcode for process in workers] == [-signal.SIGKILL] * 4
    assert len(pids_noted(children, "child")) == 4


class Busy(Numbers):
    """A worker in the sample at ``at``, or after it, is so for a minute, unless a signal ends it."""

    def __init__(self, n, at, folder, ignores):
        super().__init__(n)
        self.at = at
        self.folder = folder
        self.ignores = ignores

    def __getitem__(self, index):
        if index >= self.at:
            if self.ignores:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (self.folder / f"worker-{os.getpid()}").touch()
            time.sleep(60)
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("ignores", "most"),
    [pytest.param(False, 9, marks=pytest.mark.slow), (True, 15)],
    ids=["busy", "that ignore SIGTERM"],
)
@pytest.mark.parametrize("pooled", [False, True], ids=["own", "pool"])
def test_many_workers_have_the_time_of_one(pooled, ignores, most, tmp_path):
    """Five seconds, and five after SIGTERM; torch takes as long for each of them."""
    pool = WorkerPool(6) if pooled else None
    dataset = Busy(60, 12, tmp_path, ignores)
    loader = DataLoader(dataset, worker_pool=pool) if pooled else DataLoader(dataset, num_workers=6)
    iterator = iter(loader)
    for _ in range(12):
        next(iterator)
    assert wait_until(lambda: len(pids_noted(tmp_path, "worker")) == 6, 10)
    pids = pids_noted(tmp_path, "worker")
    before = time.monotonic()
    del iterator
    loader.shutdown()
    if pool is not None:
        pool.shutdown()
    assert not any(is_running(pid) for pid in pids)
    assert time.monotonic() - before < most


class Pretended:
    """A process object whose process is in the states of a list, one a look, and stays in the last."""

    def __init__(self, states, ends_at=None):
        self.pid = 1
        self.states = states
        self.ends_at = ends_at
        self.began = time.monotonic()
        self.signals = []

    def is_alive(self):
        return self.ends_at is None or time.monotonic() - self.began < self.ends_at

    def join(self, timeout):
        assert timeout <= 1.0, "torch's five seconds go by in looks"
        time.sleep(timeout)

    def kill(self):
        self.signals.append("kill")

    def look(self):
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]


@pytest.fixture
def pretended(monkeypatch):
    def make(states, ends_at=None):
        process = Pretended(list(states), ends_at)
        monkeypatch.setattr(proc, "state_of", lambda _: process.look())
        return process

    return make


def test_what_no_signal_ends_is_left_and_said(pretended, caplog, monkeypatch):
    monkeypatch.setattr(processes, "_KILLED_WITHIN", 0.2)
    process = pretended("D")
    multiprocessing.process._children.add(process)
    try:
        before = time.monotonic()
        with caplog.at_level(logging.WARNING, "ringloader"):
            processes.end(process, 0.5)
        assert time.monotonic() - before < 5
        assert process.signals == ["kill"]
        assert process not in multiprocessing.process._children, "the exit would wait for it for ever"
    finally:
        multiprocessing.process._children.discard(process)
    assert "process 1 was killed and has not ended" in caplog.text


def test_one_that_only_works_long_has_its_time(pretended):
    process = pretended("R", ends_at=1.5)
    processes.end(process, 1.0)
    assert 1.0 <= time.monotonic() - process.began < 15
    assert process.signals == ["kill"]


def test_one_that_other_code_has_waited_for_is_not_waited_for():
    """A program may reap any child. The process object then says without end that it is alive."""
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    os.waitpid(process.pid, 0)
    try:
        assert process.is_alive()
        before = time.monotonic()
        processes.end(process, 40.0)
        assert time.monotonic() - before < 20
    finally:
        multiprocessing.process._children.discard(process)


@pytest.mark.parametrize("how", ["lent", "idle", "gone"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_stopped_processes_of_a_pool_end(method, how):
    pool = WorkerPool(2, start_method=method)
    loader = DataLoader(Numbers(50), worker_pool=pool)
    iterator = iter(loader)
    next(iterator)
    pids = [process.pid for process in iterator._workers]
    if how != "lent":
        for _ in iterator:
            pass
    stop(pids)
    before = time.monotonic()
    if how == "gone":
        del loader, iterator, pool
        gc.collect()
    else:
        loader.shutdown()
        if how == "lent":
            assert sorted(process.process.pid for process in pool._crew._processes) == sorted(pids)
            assert time.monotonic() - before < SOON
            stop(pids)
        before = time.monotonic()
        pool.shutdown()
    assert time.monotonic() - before < SOON
    assert wait_until(lambda: not any(map(is_running, pids)), 5)
    # The server for spawn stays until it is asked how they ended, as here or when another process starts.
    multiprocessing.active_children()


def test_a_stopped_dispatching_process_ends():
    loader = DataLoader(Dispatch(Endless()), num_workers=2)
    iterator = iter(loader)
    next(iterator)
    pids = descendants()
    assert len(pids) == 3
    stop(pids)
    before = time.monotonic()
    loader.shutdown()
    assert time.monotonic() - before < SOON
    assert not descendants()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_stopped_workers_do_not_hold_up_the_exit(method, tmp_path):
    body = f"""
    if __name__ == "__main__":
        loader = DataLoader(Numbers(50), num_workers=2, multiprocessing_context={method!r})
        iterator = iter(loader)
        next(iterator)
        for process in iterator._workers:
            print(process.pid)
            os.kill(process.pid, signal.SIGSTOP)
    """
    process = start("ringloader", body, tmp_path)
    try:
        ended = finish(process, 30)
    finally:
        # The session's: stopped workers would outlive the program that hangs.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert ended.code == 0, ended
    assert wait_until(lambda: not any(is_running(int(pid)) for pid in ended.out.split()), 5)


def test_at_the_exit_a_stop_that_is_under_way_is_taken_back(monkeypatch):
    loader = DataLoader(Numbers(8), num_workers=1)
    iterator = iter(loader)
    next(iterator)
    pid = iterator._workers[0].pid
    stop([pid])
    # The state that it sees before the signal has stopped it.
    monkeypatch.setattr(proc, "state_of", lambda _: "R")
    processes._resume_at_exit()
    monkeypatch.undo()
    assert state(pid) != "T"
    loader.shutdown()


def test_a_stopped_child_of_other_code_stays_stopped():
    """Only workers are continued."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    try:
        stop([pid])
        loader = DataLoader(Numbers(8), num_workers=1)
        iterator = iter(loader)
        next(iterator)
        stop([iterator._workers[0].pid])
        loader.shutdown()
        processes._resume_at_exit()
        assert state(pid) == "T"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
