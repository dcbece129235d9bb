"""Processes that die: workers at every moment, and the parent."""

from __future__ import annotations

import functools
import os
import re
import signal
import threading
import time

import pytest
import torch

from faults.failing_datasets import Dies, Hangs, Numbers
from faults.proc import Snapshot, descendants, is_running, wait_until
from faults.script import finish, start
from parity.datasets import Slow
from parity.harness import assert_path

DIED = r"DataLoader worker \(pid(\(s\))? [\d, ]+\)"


@pytest.fixture
def snapshot(loader_class, loader_name):
    """Taken after one loader has run, so that what a process starts once is already there."""
    if loader_name == "torch":
        pytest.skip("torch's SIGCHLD handler raises in whatever runs, the test's own code included")
    assert len(list(loader_class(Numbers(4), num_workers=1))) == 4
    return Snapshot.take()


def death_of(function):
    """The text of the error. Its frames are let go of, and with them the iterator.

    While the iterator lives, torch's SIGCHLD handler raises in whatever runs when its other workers end.
    """
    try:
        function()
    except RuntimeError as error:
        error.__traceback__ = None
        assert re.match(DIED, str(error)), error
        return str(error)
    raise AssertionError("no worker's death was noticed")


def collect(iterator, into):
    """Everything up to the error; torch's SIGCHLD handler may raise anywhere in here."""
    for batch in iterator:
        into.append(int(batch.view(-1)[0]))


@pytest.mark.parametrize("how", ["kill", "exit", "exit 0", "segfault"])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("at", [0, 7])
def test_worker_dies_while_it_fetches(loader_class, snapshot, how, workers, at):
    got = []
    loader = loader_class(Dies(12, at, how), num_workers=workers)

    def walk():
        iterator = iter(loader)
        assert_path(iterator, workers)
        collect(iterator, got)

    death_of(walk)
    assert got == list(range(len(got))) and len(got) <= at
    loader = None
    snapshot.assert_nothing_left()


def test_worker_is_killed_while_it_fetches(loader_class, snapshot, tmp_path):
    told = tmp_path / "pid"
    loader = loader_class(Hangs(6, 3, str(told)), num_workers=1)
    got = []

    def walk():
        for batch in loader:
            got.append(int(batch[0, 0]))
            if len(got) == 3:
                assert wait_until(told.exists, 20)
                os.kill(int(told.read_text() or "0") or iterator_pid(), signal.SIGKILL)

    def iterator_pid():
        return next(iter(descendants()))

    death_of(walk)
    assert got == [0, 1, 2]
    loader = None
    snapshot.assert_nothing_left()


@pytest.mark.parametrize("workers", [1, 2])
def test_idle_worker_is_killed(loader_class, snapshot, workers):
    """Between two epochs of persistent workers."""
    loader = loader_class(Numbers(8), num_workers=workers, persistent_workers=True)
    assert len(list(loader)) == 8

    def walk():
        os.kill(loader._iterator._workers[0].pid, signal.SIGKILL)
        time.sleep(0.3)
        for _ in range(3):
            collect(loader, [])

    death_of(walk)
    loader = walk = None
    snapshot.assert_nothing_left()


def test_worker_is_killed_after_it_committed(loader_class, snapshot):
    """Committed batches are whole: they come, or the error does, and nothing is wrong."""
    loader = loader_class(Numbers(40), num_workers=1, prefetch_factor=4)
    iterator = iter(loader)
    assert int(next(iterator)[0, 0]) == 0
    time.sleep(0.5)
    got = []

    def walk():
        os.kill(iterator._workers[0].pid, signal.SIGKILL)
        for batch in iterator:
            assert bool((batch == batch[0, 0]).all())
            got.append(int(batch[0, 0]))

    death_of(walk)
    assert got == list(range(1, len(got) + 1)) and len(got) < 39
    iterator = loader = walk = None
    snapshot.assert_nothing_left()


def test_one_of_two_is_killed_and_the_other_is_ended(loader_class, snapshot):
    loader = loader_class(Numbers(200), num_workers=2)
    iterator = iter(loader)
    next(iterator)
    other = iterator._workers[1].pid

    def walk():
        os.kill(iterator._workers[0].pid, signal.SIGKILL)
        collect(iterator, [])

    death_of(walk)
    iterator = loader = walk = None
    snapshot.assert_nothing_left()
    assert not is_running(other)


@pytest.mark.slow
@pytest.mark.limit(240)
def test_killed_again_and_again(loader_class, snapshot):
    """Many deaths at random moments in one process: batches are right, and nothing piles up."""
    for delay in range(30):
        loader = loader_class(Numbers(10**6, 5000), num_workers=2, persistent_workers=True)
        iterator = iter(loader)
        pid = iterator._workers[delay % 2].pid

        def walk(iterator, pid, seconds):
            end = time.monotonic() + seconds
            for expected, batch in enumerate(iterator):
                assert bool((batch == expected).all())
                if time.monotonic() > end and pid:
                    os.kill(pid, signal.SIGKILL)
                    pid = 0

        death_of(functools.partial(walk, iterator, pid, 0.003 * delay))
        del iterator, loader
    snapshot.assert_nothing_left()


def test_a_loader_after_a_death(loader_class, snapshot):
    death_of(lambda: collect(loader_class(Dies(12, 3, "kill"), num_workers=2), []))
    assert len(list(loader_class(Numbers(8), num_workers=2))) == 8
    snapshot.assert_nothing_left()


def test_batches_outlive_a_killed_worker(loader_class, snapshot):
    loader = loader_class(Dies(60, 50, "kill"), num_workers=2)
    kept = []
    death_of(lambda: kept.extend(map(torch.Tensor.detach, loader)))
    loader = None
    assert kept
    for number, batch in enumerate(kept):
        assert bool((batch == number).all())
    kept.clear()
    batch = None
    snapshot.assert_nothing_left()


PARENT = """
    def main():
        loader = DataLoader(Numbers(10**6), num_workers=2, multiprocessing_context={method!r})
        iterator = iter(loader)
        next(iterator)
        print(" ".join(str(w.pid) for w in iterator._workers), flush=True)
        time.sleep(600)

    if __name__ == "__main__":
        main()
"""


@pytest.mark.limit(300)
@pytest.mark.parametrize(
    "method",
    [
        "fork",
        pytest.param("spawn", marks=pytest.mark.slow),
        pytest.param("forkserver", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM])
def test_parent_is_killed(loader_name, tmp_path, method, sig):
    """The workers see it, also when they sleep with nothing to do."""
    process = start(loader_name, PARENT.format(method=method), tmp_path)
    try:
        line = process.stdout.readline()
        workers = [int(pid) for pid in line.split()]
        assert len(workers) == 2, process.stderr.read()
        assert all(map(is_running, workers))
        process.send_signal(sig)
        # Torch's own look after their parent every five seconds.
        assert wait_until(lambda: not any(map(is_running, workers)), 20), "workers outlive their parent"
        assert finish(process, 20).code == -sig
    finally:
        process.kill()
        process.communicate()


def test_ctrl_c(loader_name, tmp_path):
    """SIGINT to the whole group, as a terminal sends it: KeyboardInterrupt, once, and no worker is left."""
    body = """
        def main():
            iterator = iter(DataLoader(Numbers(10**7), num_workers=2))
            print(" ".join(str(w.pid) for w in iterator._workers), flush=True)
            for batch in iterator:
                pass

        if __name__ == "__main__":
            main()
    """
    process = start(loader_name, body, tmp_path)
    try:
        workers = [int(pid) for pid in process.stdout.readline().split()]
        time.sleep(1)
        os.killpg(process.pid, signal.SIGINT)
        ended = finish(process, 40)
    finally:
        process.kill()
        process.communicate()
    assert ended.code in (-signal.SIGINT, 130), ended
    assert ended.err.count("Traceback (most recent call last)") == 1, ended.err
    assert ended.err.rstrip().endswith("KeyboardInterrupt"), ended.err
    assert wait_until(lambda: not any(map(is_running, workers)), 10)


def test_ctrl_c_to_a_waiting_parent(loader_name, tmp_path):
    """SIGINT to the parent alone, while it waits for a batch that never comes; then it goes on."""
    body = """
        def main():
            iterator = iter(DataLoader(Hangs(4, 1, sys.argv[0] + ".told"), num_workers=1))
            next(iterator)
            print(iterator._workers[0].pid, flush=True)
            try:
                next(iterator)
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            os.kill(iterator._workers[0].pid, signal.SIGKILL)
            try:
                next(iterator)
            except RuntimeError as error:
                print("died", flush=True)

        if __name__ == "__main__":
            main()
    """
    process = start(loader_name, body, tmp_path)
    try:
        worker = int(process.stdout.readline())
        assert wait_until(lambda: (tmp_path / "program.py.told").exists(), 20)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        ended = finish(process, 40)
    finally:
        process.kill()
        process.communicate()
    assert "interrupted" in ended.out, ended
    assert "died" in ended.out or loader_name == "torch", ended
    assert wait_until(lambda: not is_running(worker), 10)


def test_worker_is_stopped_and_goes_on(loader_class):
    """SIGSTOP for a while is no death."""
    iterator = iter(loader_class(Numbers(30), num_workers=1))
    got = [int(next(iterator)[0, 0])]
    pid = iterator._workers[0].pid
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(1.0, lambda: os.kill(pid, signal.SIGCONT))
    timer.start()
    got += [int(batch[0, 0]) for batch in iterator]
    timer.join()
    assert got == list(range(30))


def test_signals_interrupt_no_wait(loader_class):
    """A handler that returns leaves the wait for a batch as it was."""
    seen = []
    previous = signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
    try:
        iterator = iter(loader_class(Slow(3, {1: 1.0}), num_workers=1))
        next(iterator)
        timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGUSR1))
        timer.start()
        assert int(next(iterator)["index"]) == 1
        timer.join()
        assert seen == [1]
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert torch.is_tensor(next(iterator)["value"])
