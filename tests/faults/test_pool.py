"""A pool whose processes die, whose loaders fail, which is shut down, and whose parent ends."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from faults.failing_datasets import Dies, Numbers
from faults.proc import Snapshot, is_running, wait_until, wait_without_children
from faults.script import finish, run_script, start
from ringloader import DataLoader, WorkerPool
from ringloader._core import epochs

pytestmark = [pytest.mark.rings_only, pytest.mark.limit(300)]

DIED = r"DataLoader worker \(pid\(s\) \d+\) exited unexpectedly"


def workers(pool):
    return [process.process.pid for process in pool._crew._processes]


def look_after(pool):
    """Does what a pool does whenever it is asked for something."""
    with pool._crew._held():
        pass


def numbers(loader):
    return [int(batch.view(-1)[0]) for batch in loader]


class Added(Numbers):
    first = 0

    def __getitem__(self, index):
        return super().__getitem__(index) + self.first


@pytest.mark.parametrize("how", ["kill", "exit", "exit 0", "segfault"])
def test_a_lost_process_is_missed_by_its_iterator_alone(how):
    with WorkerPool(2) as pool:
        good, bad = (DataLoader(data, worker_pool=pool) for data in (Numbers(40), Dies(12, 5, how)))
        iterator = iter(good)
        found = [int(next(iterator).view(-1)[0]) for _ in range(3)]
        with pytest.raises(RuntimeError, match=DIED):
            numbers(bad)
        found += numbers(iterator)
        assert found == list(range(40))
        assert numbers(good) == list(range(40))
        with pytest.raises(RuntimeError, match=DIED):
            numbers(bad)
        assert numbers(good) == list(range(40))


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_process_that_is_lost_while_it_is_idle_is_replaced(method):
    """The new one has the dataset as the other one has it."""
    with WorkerPool(2, method) as pool:
        dataset = Added(8)
        loader = DataLoader(dataset, worker_pool=pool)
        assert numbers(loader) == list(range(8))
        before = workers(pool)
        dataset.first = 100
        os.kill(before[0], signal.SIGKILL)
        assert wait_until(lambda: not is_running(before[0]), 10)
        assert numbers(loader) == list(range(8))
        assert before[1] in workers(pool)
        assert before[0] not in workers(pool)
        assert len(workers(pool)) == 2


def test_an_end_that_the_fork_server_has_not_told_yet(monkeypatch):
    with WorkerPool(2, "forkserver") as pool:
        loader = DataLoader(Numbers(8), worker_pool=pool)
        assert numbers(loader) == list(range(8))
        lost = pool._crew._processes[0]
        os.kill(lost.process.pid, signal.SIGKILL)
        assert wait_until(lambda: not is_running(lost.process.pid), 10)
        monkeypatch.setattr(lost, "is_alive", lambda: True)
        assert numbers(loader) == list(range(8))
        assert lost not in pool._crew._processes


@pytest.mark.parametrize("tidies", [False, True])
@pytest.mark.parametrize("lost", [1, 2])
def test_a_process_that_is_lost_as_it_is_given_work(lost, tidies, monkeypatch):
    """Another one takes its place, and the epoch has its number.

    Looking after the pool meanwhile, as another thread does, closes the process's channel.
    """
    from ringloader._features.pools.process import PoolProcess

    assign, given = PoolProcess.assign, []

    def kill_one(self, *args):
        given.append(self)
        if len(given) == lost:
            self.process.kill()
            self.process.join()
            if tidies:
                look_after(pool)
                assert self.channel.fileno() < 0
        assign(self, *args)

    with WorkerPool(2) as pool:
        loader = DataLoader(Numbers(8), worker_pool=pool, seeding="batch")
        numbers(loader)
        monkeypatch.setattr(PoolProcess, "assign", kill_one)
        for _ in range(3):
            assert numbers(loader) == list(range(8))
        assert len(given) == 7
        assert epochs.next_of(loader) == 4
        assert given[lost - 1].process.pid not in workers(pool)
        assert len(workers(pool)) == 2


def test_processes_that_are_lost_as_they_start_are_not_replaced_for_ever(monkeypatch):
    from ringloader._features.pools.process import PoolProcess

    assign, given = PoolProcess.assign, []

    def kill(self, *args):
        given.append(self)
        self.process.kill()
        self.process.join()
        assign(self, *args)

    with WorkerPool(2) as pool:
        loader = DataLoader(Numbers(8), worker_pool=pool)
        monkeypatch.setattr(PoolProcess, "assign", kill)
        with pytest.raises(RuntimeError, match=DIED):
            iter(loader)
        assert len(given) == 1
        monkeypatch.undo()
        assert numbers(loader) == list(range(8))


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_pool_that_is_dropped_leaves_no_zombies(method):
    pool = WorkerPool(2, method)
    loader = DataLoader(Numbers(8), worker_pool=pool)
    numbers(loader)
    mine = workers(pool)
    assert len(mine) == 2
    del pool, loader
    gc.collect()
    assert not [pid for pid in mine if Path(f"/proc/{pid}").exists()]


def test_processes_that_are_ended_leave_no_zombies():
    """More than twice the pool's number are idle."""
    with WorkerPool(1, "fork") as pool:
        loader = DataLoader(Numbers(8), worker_pool=pool)
        iterators = [iter(loader) for _ in range(4)]
        mine = workers(pool)
        assert len(mine) == 4
        while iterators:
            assert sum(len(batch) for batch in iterators.pop()) == 8
        gc.collect()
        ended = set(mine) - set(workers(pool))
        assert len(ended) == 2
        assert wait_until(lambda: not any(map(is_running, ended)), 10)
        look_after(pool)
        assert not [pid for pid in ended if Path(f"/proc/{pid}").exists()]


def fails(_worker):
    raise ValueError("not this one")


class Raises(Numbers):
    def __getitem__(self, index):
        if index == 3:
            raise KeyError("three")
        return super().__getitem__(index)


def test_errors_leave_the_processes():
    with WorkerPool(2) as pool:
        good = DataLoader(Numbers(8), worker_pool=pool)
        numbers(good)
        failing = DataLoader(Numbers(8), worker_pool=pool, worker_init_fn=fails)
        raising = DataLoader(Raises(8), worker_pool=pool)
        for loader, error, text in ((failing, ValueError, "not this one"), (raising, KeyError, "three")):
            for _ in range(2):
                with pytest.raises(error, match=text) as caught:
                    numbers(loader)
                caught.value.__traceback__ = None
                del caught
                gc.collect()
                now = workers(pool)
                assert numbers(good) == list(range(8))
                assert workers(pool) == now
        assert len(workers(pool)) == 2


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_what_cannot_be_pickled_is_torchs_error(method):
    with WorkerPool(1, method) as pool:
        bad = Numbers(4)
        bad.lines = (number for number in ())
        with pytest.raises(TypeError, match="cannot pickle 'generator' object") as caught:
            iter(DataLoader(bad, worker_pool=pool))
        # From 3.14 on, pickle's own notes come before it.
        *_, note = caught.value.__notes__
        assert note.startswith("<class 'generator'> cannot be pickled")
        bad.lines = multiprocessing.get_context("fork").Value("i")
        with pytest.raises(RuntimeError, match="created in a fork context") as caught:
            iter(DataLoader(bad, worker_pool=pool))
        *_, note = caught.value.__notes__
        assert note.startswith("<class 'multiprocessing.synchronize.RLock'> cannot be pickled")
        assert "make it with multiprocessing.get_context('spawn')" in note
        assert numbers(DataLoader(Numbers(4), worker_pool=pool)) == [0, 1, 2, 3]


def test_a_pool_that_was_shut_down():
    snapshot = Snapshot.take()
    pool = WorkerPool(2)
    with pool:
        loader = DataLoader(Numbers(8), worker_pool=pool)
        numbers(loader)
        iterator = iter(loader)
        next(iterator)
        ended = workers(pool)
    assert [pid for pid in ended if is_running(pid)] == []
    with pytest.raises(RuntimeError, match="worker_pool of this loader was shut down"):
        iter(loader)
    with pytest.raises(RuntimeError, match=DIED):
        list(iterator)
    del iterator
    pool.shutdown()
    snapshot.assert_nothing_left()


def test_a_pool_that_is_forgotten_ends():
    snapshot = Snapshot.take()
    assert numbers(DataLoader(Numbers(8), worker_pool=WorkerPool(2))) == list(range(8))
    wait_without_children(10)
    # The call collects children that nothing waits for.
    multiprocessing.active_children()
    snapshot.assert_nothing_left()


class Stuck(Numbers):
    """Tells that it is at work, and does not end."""

    def __init__(self, file):
        super().__init__(4)
        self.file = file

    def __getitem__(self, index):
        self.file.touch()
        time.sleep(60)


def test_a_worker_that_does_not_come_back_is_replaced(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    with WorkerPool(1) as pool:
        slow = DataLoader(Stuck(tmp_path / "begun"), worker_pool=pool)
        good = DataLoader(Numbers(4), worker_pool=pool)
        iterator = iter(slow)
        (stuck,) = workers(pool)
        assert wait_until((tmp_path / "begun").exists, 20)
        began = time.monotonic()
        del iterator
        gc.collect()
        assert time.monotonic() - began < 10
        assert numbers(good) == [0, 1, 2, 3]
        assert stuck not in workers(pool)


def test_a_lease_that_an_interrupt_has_lost():
    """Between two lines of the main process: nothing has it, and nothing gives it back."""
    with WorkerPool(2) as pool:
        loader = DataLoader(Numbers(4), worker_pool=pool)
        numbers(loader)
        before = workers(pool)
        lease = pool._own().lend(pool, loader, loader.num_workers, loader.num_workers)
        assert all(process.is_lent for process in pool._crew._processes)
        del lease
        assert numbers(loader) == [0, 1, 2, 3]
        assert workers(pool) == before


def test_an_iterator_that_ends_as_others_look_after_the_pool(monkeypatch):
    """The end may come in another thread: after the pool has looked who came back, before lost leases."""
    with WorkerPool(2) as pool:
        iterators = [iter(DataLoader(Numbers(4), worker_pool=pool))]
        before = workers(pool)
        tidy = pool._crew.objects.tidy

        def tidy_meanwhile():
            tidy()
            if iterators:
                assert sum(len(batch) for batch in iterators.pop()) == 4

        monkeypatch.setattr(pool._crew.objects, "tidy", tidy_meanwhile)
        look_after(pool)
        assert not iterators
        time.sleep(0.2)
        assert workers(pool) == before
        assert all(process.is_alive() for process in pool._crew._processes)
        assert numbers(DataLoader(Numbers(4), worker_pool=pool)) == [0, 1, 2, 3]


@pytest.mark.parametrize("moment", ["an iterator ends", "an iterator begins"])
def test_a_signal_handler_shuts_it_down_while_the_pool_is_at_work(moment, monkeypatch):
    """At that moment its thread has the pool's lock."""
    pool = WorkerPool(2)
    # More than its workers may work ahead: some batches are not made yet.
    loader = DataLoader(Numbers(40), worker_pool=pool)
    batches = iter(loader)
    next(batches)
    processes = [process.process for process in pool._crew._processes]
    tidy, left = pool._crew.objects.tidy, ["once"]

    def tidy_meanwhile():
        tidy()
        if left:
            left.clear()
            pool.shutdown()

    monkeypatch.setattr(pool._crew.objects, "tidy", tidy_meanwhile)
    if moment == "an iterator ends":
        del batches
    else:
        with pytest.raises(RuntimeError, match="was shut down"):
            iter(DataLoader(Numbers(4), worker_pool=pool))
        with pytest.raises(RuntimeError, match=DIED):
            list(batches)
    assert not left
    assert wait_until(lambda: not any(process.is_alive() for process in processes), 20)
    with pytest.raises(RuntimeError, match="was shut down"):
        iter(loader)


MOMENTS = """
    import threading
    from faults.proc import descriptors
    from ringloader import WorkerPool

    def numbers(loader):
        return [int(batch.view(-1)[0]) for batch in loader]

    with WorkerPool(2) as pool:
        loader = DataLoader(Numbers(30, 10), worker_pool=pool)
        main, interrupted = threading.main_thread().ident, 0
        for moment in range(40):
            timer = threading.Timer(moment / 1000, signal.pthread_kill, (main, signal.SIGINT))
            try:
                timer.start()
                assert numbers(loader) == list(range(30))
                timer.join()
                time.sleep(0.01)
            except KeyboardInterrupt:
                interrupted += 1
            timer.join()
            gc.collect()
        # In a finalizer, it is told and ignored.
        assert interrupted >= 20, interrupted
        assert numbers(loader) == list(range(30))
        processes = pool._crew._processes
        assert len(processes) <= 4
        assert sum(process.is_lent for process in processes) == 0
        print(*(process.process.pid for process in processes))
    # It keeps memory for the next epoch.
    del loader
    gc.collect()
    # Pipes may be left: to start a process of multiprocessing's is not safe from interrupts.
    print([target for target in descriptors().values() if "memfd:ringloader" in target])
"""


def test_interrupts_at_any_moment(tmp_path):
    """The main process gets SIGINT at 40 moments. The pool goes on, and nothing of it is left."""
    ended = run_script("ringloader", MOMENTS, tmp_path)
    assert ended.code == 0, ended.err
    pids, memory = ended.out.splitlines()
    assert not any(is_running(int(pid)) for pid in pids.split())
    assert memory == "[]"


def held_by(pid):
    descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    mappings = len(Path(f"/proc/{pid}/maps").read_text().splitlines())
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4
    return descriptors, mappings, resident


def test_100_assignments_leave_nothing():
    with WorkerPool(2) as pool:
        loaders = [DataLoader(Numbers(2, size), worker_pool=pool) for size in (100_000, 100)]
        for _ in range(10):
            for loader in loaders:
                numbers(loader)
        pids = [os.getpid(), *workers(pool)]
        before = [held_by(pid) for pid in pids]
        for _ in range(50):
            for loader in loaders:
                numbers(loader)
        gc.collect()
        assert [os.getpid(), *workers(pool)] == pids
        for (fds, maps, kib), pid in zip(before, pids, strict=True):
            now = held_by(pid)
            assert now[0] <= fds, "descriptors"
            assert now[1] <= maps + 10, "mappings"
            assert now[2] <= kib + 4096, "memory"


POOL = """
    from ringloader import WorkerPool
    pool = WorkerPool(2)
    loader = DataLoader(Numbers(8), worker_pool=pool)
    assert len(list(loader)) == 8
    iterator = iter(loader)
    next(iterator)
    spare = iter(DataLoader(Numbers(8), worker_pool=pool))
    del spare
    print(*(process.process.pid for process in pool._crew._processes), flush=True)
"""


def test_an_interpreter_that_ends_leaves_nothing(tmp_path):
    ended = run_script("ringloader", POOL, tmp_path)
    assert (ended.code, ended.err) == (0, "")
    pids = [int(pid) for pid in ended.out.split()]
    assert len(pids) == 4
    assert [pid for pid in pids if is_running(pid)] == []


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_parent_that_dies(tmp_path, sent):
    program = start("ringloader", POOL + "\n    time.sleep(60)", tmp_path)
    pids = [int(pid) for pid in program.stdout.readline().split()]
    assert len(pids) == 4
    program.send_signal(sent)
    assert wait_until(lambda: not any(is_running(pid) for pid in pids), 3)
    assert finish(program, 20).code == -sent


INTERRUPTED = """
    from ringloader import WorkerPool
    pool = WorkerPool(2)
    idle = DataLoader(Numbers(8), worker_pool=pool)
    loader = DataLoader(Numbers(1_000_000), worker_pool=pool)
    assert len(list(idle)) == 8
    try:
        for index, batch in enumerate(loader):
            if index == 10:
                print("ready", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    time.sleep(0.5)
    assert len(list(idle)) == 8
    before = [process.process.pid for process in pool._crew._processes]
    try:
        print("again", flush=True)
        # A signal just before a sleep waits for its end: Python looks for signals between calls.
        while True:
            time.sleep(0.05)
    except KeyboardInterrupt:
        pass
    assert len(list(idle)) == 8
    print(before == [process.process.pid for process in pool._crew._processes])
"""


def test_an_interrupt_from_the_terminal(tmp_path):
    """The interrupt goes to all processes: working ones end, as torch's do; waiting ones ignore it."""
    program = start("ringloader", INTERRUPTED, tmp_path)
    assert program.stdout.readline() == "ready\n"
    os.killpg(program.pid, signal.SIGINT)
    assert program.stdout.readline() == "interrupted\n"
    assert program.stdout.readline() == "again\n"
    os.killpg(program.pid, signal.SIGINT)
    ended = finish(program, 30)
    assert (ended.code, ended.out) == (0, "True\n"), ended.err
