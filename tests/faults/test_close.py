"""An iterator that is closed during a wait: from another thread, and from a signal handler."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import pytest
from torch.utils.data import _utils

from faults.failing_datasets import Numbers, Sticks
from faults.proc import Snapshot, is_running, wait_until
from parity.harness import assert_path
from small_datasets import SharedStream

# Torch's words for `next` after a shutdown.
CLOSED = "Invalid iterator state"


@pytest.fixture(autouse=True)
def _not_torchs(loader_name):
    if loader_name == "torch":
        pytest.skip("torch's own loader hangs, or raises what it happens to find")


@pytest.fixture
def snapshot(loader_class):
    """Taken after one loader has run, so that what a process starts once is already there."""
    assert len(list(loader_class(Numbers(4), num_workers=1))) == 4
    return Snapshot.take()


def stuck_iterator(loader_class, folder, **options):
    """After two batches its next one does not come before the test releases the worker."""
    stream = options.pop("stream", False)
    samples = Sticks(100, (1, 1), folder)
    iterator = iter(loader_class(SharedStream(samples) if stream else samples, num_workers=2, **options))
    assert_path(iterator, 2)
    assert sorted(int(next(iterator).view(-1)[0]) for _ in range(2)) == [0, 1]
    assert wait_until(samples.stuck(0).exists, 20)
    return iterator, samples


def release(samples):
    samples.released(0).touch()
    samples.released(1).touch()


def take_one(iterator, outcome):
    try:
        outcome.append(next(iterator))
    except Exception as error:
        error.__traceback__ = None
        outcome.append(error)


def thread_in_wait(iterator):
    """A thread that has come to where it waits for the next batch, and the list for what it gets."""
    outcome = []
    thread = threading.Thread(target=take_one, args=(iterator, outcome))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    return thread, outcome


@contextlib.contextmanager
def interrupted_by(handler):
    """Interrupts, by a signal with this handler, what the block waits for."""
    previous = signal.signal(signal.SIGUSR1, handler)
    timer = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGUSR1])
    timer.start()
    try:
        yield
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, previous)


OPTIONS = [
    {},
    {"in_order": False},
    {"persistent_workers": True},
    {"batch_size": None},
    {"stream": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_closed_by_another_thread(loader_class, snapshot, tmp_path, options):
    iterator, samples = stuck_iterator(loader_class, tmp_path, **dict(options))
    thread, outcome = thread_in_wait(iterator)
    # The worker that is stuck ends only after it was asked to.
    threading.Timer(0.2, release, [samples]).start()
    iterator._shutdown_workers()
    thread.join(10)
    assert not thread.is_alive(), "the wait goes on"
    # A batch that came in the meantime is as good.
    assert len(outcome) == 1
    if isinstance(outcome[0], Exception):
        assert isinstance(outcome[0], AssertionError) and CLOSED in str(outcome[0]), outcome
    after_the_end(iterator)
    outcome.clear()
    iterator = None
    snapshot.assert_nothing_left()


@pytest.mark.parametrize("in_order", [True, False])
def test_workers_that_are_ended_are_no_deaths(loader_class, snapshot, tmp_path, monkeypatch, in_order):
    """A waiting caller hears of the end of workers that torch terminates, before the iterator is closed."""
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.3)
    iterator, _ = stuck_iterator(loader_class, tmp_path, in_order=in_order)
    thread, outcome = thread_in_wait(iterator)
    iterator._shutdown_workers()
    thread.join(10)
    assert not thread.is_alive(), "the wait goes on"
    assert isinstance(outcome[0], AssertionError) and CLOSED in str(outcome[0]), outcome
    outcome.clear()
    iterator = None
    snapshot.assert_nothing_left()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_closed_by_a_signal_handler(loader_class, snapshot, tmp_path, options):
    """Below the very wait that it ends."""
    iterator, samples = stuck_iterator(loader_class, tmp_path, **dict(options))
    closed = []

    def close(_signum, _frame):
        release(samples)
        iterator._shutdown_workers()
        closed.append(True)

    with interrupted_by(close), pytest.raises(AssertionError, match=CLOSED) as caught:
        next(iterator)
    assert closed == [True]
    caught.value.__traceback__ = None
    after_the_end(iterator)
    iterator = caught = None
    snapshot.assert_nothing_left()


def test_a_handler_that_raises_after_closing(loader_class, snapshot, tmp_path):
    """The handler's error comes out of `next`, as KeyboardInterrupt does."""
    iterator, samples = stuck_iterator(loader_class, tmp_path)

    def close(_signum, _frame):
        release(samples)
        iterator._shutdown_workers()
        raise ZeroDivisionError("the user's own")

    with interrupted_by(close), pytest.raises(ZeroDivisionError) as caught:
        next(iterator)
    caught.value.__traceback__ = None
    after_the_end(iterator)
    iterator = caught = None
    snapshot.assert_nothing_left()


def test_next_below_next(loader_class, snapshot, tmp_path):
    """A handler that asks the iterator that waits: an error, and the wait goes on."""
    iterator, samples = stuck_iterator(loader_class, tmp_path)
    seen = []

    def ask(_signum, _frame):
        try:
            next(iterator)
        except RuntimeError as error:
            seen.append(str(error))
        release(samples)

    with interrupted_by(ask):
        assert int(next(iterator)[0, 0]) == 2
    assert seen == ["this iterator is being advanced elsewhere; wait until that call of next has returned"]
    assert [int(batch[0, 0]) for batch in iterator] == list(range(3, 100))
    iterator = None
    snapshot.assert_nothing_left()


def test_next_beside_next(loader_class, snapshot, tmp_path):
    """Threads that share an iterator wait for each other, and each batch goes to one of them."""
    iterator, samples = stuck_iterator(loader_class, tmp_path)
    walked = [[], []]

    def walk(found):
        try:
            found.extend(int(batch[0, 0]) for batch in iterator)
        except Exception as error:
            error.__traceback__ = None
            found.append(error)

    threads = [threading.Thread(target=walk, args=(found,)) for found in walked]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    pid = os.fork()
    if pid == 0:
        try:
            next(iterator)
        except AssertionError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0, "a forked child has no thread to wait for"
    release(samples)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert sorted(walked[0] + walked[1]) == list(range(2, 100))
    iterator = walk = thread = threads = None
    snapshot.assert_nothing_left()


@pytest.mark.parametrize("in_order", [True, False])
def test_closed_while_batches_fly(loader_class, snapshot, in_order):
    """At any moment of a thread that iterates at full speed."""
    for number in range(12):
        iterator = iter(loader_class(Numbers(10**6, 100), num_workers=2, in_order=in_order))
        outcome = []

        def walk(iterator=iterator, outcome=outcome):
            try:
                for batch in iterator:
                    assert bool((batch == batch[0, 0]).all())
                outcome.append("ended")
            except Exception as error:
                error.__traceback__ = None
                outcome.append(error)

        thread = threading.Thread(target=walk)
        thread.start()
        time.sleep(0.005 * number)
        iterator._shutdown_workers()
        thread.join(10)
        assert not thread.is_alive(), "the wait goes on"
        assert outcome == ["ended"] or CLOSED in str(outcome[0]), outcome
        del iterator, walk, thread
    snapshot.assert_nothing_left()


def after_the_end(iterator):
    """Checks what torch has after a shutdown: the epoch is over, again and again, or its words for it."""
    for _ in range(3):
        with pytest.raises((StopIteration, AssertionError)):
            while True:
                next(iterator)


@pytest.mark.rings_only
@pytest.mark.parametrize("name", ["_group", "send"])
@pytest.mark.parametrize("in_pool", [False, True])
def test_an_interrupt_as_workers_are_ended_leaves_none(loader_class, snapshot, monkeypatch, name, in_pool):
    from ringloader import WorkerPool
    from ringloader._transport.processes import ProcessTransport

    method, calls = getattr(ProcessTransport, name), []

    def interrupted(*args):
        calls.append(name)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return method(*args)

    with contextlib.ExitStack() as at_last:
        pool = at_last.enter_context(WorkerPool(2)) if in_pool else None
        iterator = iter(loader_class(Numbers(8), num_workers=2, worker_pool=pool))
        next(iterator)
        pids = [worker.pid for worker in iterator._workers]
        with monkeypatch.context() as patch:
            patch.setattr(
                ProcessTransport, name, staticmethod(interrupted) if name == "_group" else interrupted
            )
            with pytest.raises(KeyboardInterrupt):
                iterator._shutdown_workers()
        assert not any(is_running(pid) for pid in pids)
        assert calls
        iterator = None
    snapshot.assert_nothing_left()
