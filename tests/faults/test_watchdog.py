"""``watchdog``: a batch that does not come is said, with worker, batch, time and stack."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import signal
import threading
import time

import pytest
import torch
from torch.utils.data import IterableDataset

import ringloader
from faults.failing_datasets import Dies, Numbers, Waits, WaitsInOne
from faults.proc import Snapshot, is_running
from ringloader import DataLoader, WorkerPool
from ringloader._common import proc
from ringloader._features.losses import stacks

pytestmark = [pytest.mark.rings_only, pytest.mark.limit(300)]

SECONDS = 0.3


class Collect(logging.Handler):
    """Collects what the logger says of waits, with all of these words; calls a function after so many.

    On a busy machine workers are waited for at other moments too.
    """

    def __init__(self, then, after, words):
        super().__init__()
        self.then = then
        self.after = after
        self.words = words
        self.texts = []

    def emit(self, record):
        text = record.getMessage()
        if text.startswith("ringloader: DataLoader has waited") and all(
            re.search(one, text, re.M) for one in self.words
        ):
            self.texts.append(text)
            if len(self.texts) == self.after:
                self.then()


@contextlib.contextmanager
def collected(then, after=1, *words):
    handler = Collect(then, after, words)
    logger = logging.getLogger("ringloader")
    logger.addHandler(handler)
    try:
        yield handler.texts
    finally:
        logger.removeHandler(handler)


@pytest.fixture
def released(tmp_path):
    """The file that datasets wait for."""
    file = tmp_path / "released"
    yield file
    file.touch()


def seconds_of(text):
    return float(re.search(r"has waited ([\d.]+) s", text)[1])


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_worker_batch_time_and_stack(method, released):
    assert len(list(DataLoader(Numbers(4), num_workers=1, multiprocessing_context=method))) == 4
    snapshot = Snapshot.take()
    loader = DataLoader(
        Waits({5}, released, 12),
        batch_size=2,
        num_workers=2,
        watchdog=SECONDS,
        multiprocessing_context=method,
    )
    with collected(released.touch, 2, r"\[4, 5\]", "in wait") as texts:
        iterator = iter(loader)
        pid = iterator._workers[0].pid
        batches = [next(iterator).tolist() for _ in range(2)]
        held = next(iterator)
        batches += [held.tolist(), *(batch.tolist() for batch in iterator)]
    assert batches == [[n, n + 1] for n in range(0, 12, 2)]
    assert ringloader.report(loader).path == "native"
    first, second, *_ = texts
    begin = f"worker 0 (pid {pid}) owes batch 2 of the epoch: dataset indices [4, 5]; "
    assert first.split("\n")[1].startswith(begin)
    assert float(re.search(r"has been making a batch for ([\d.]+) s", second)[1]) >= SECONDS
    lines = first.split("\n")[3:]
    assert "in wait" in lines[0]
    assert "in __getitem__" in lines[1]
    assert re.search(r"/loop\.py\", line \d+ in run$", lines[-1]), "what is beneath tells nothing"
    assert seconds_of(first) >= SECONDS - 0.05
    assert seconds_of(second) >= 2 * SECONDS - 0.05
    del iterator, held
    loader.shutdown()
    del loader
    snapshot.assert_nothing_left()


@pytest.mark.parametrize("path", ["ahead", "thread"])
def test_on_every_path(path, released):
    options = {"main_prefetch": 2} if path == "ahead" else {"worker_method": "thread"}
    loader = DataLoader(Waits({5}, released, 12), batch_size=2, num_workers=2, watchdog=SECONDS, **options)
    with collected(released.touch, 2, r"\[4, 5\]", "in __getitem__") as texts:
        assert [batch.tolist() for batch in loader] == [[n, n + 1] for n in range(0, 12, 2)]
    for text in texts:
        assert re.match(r"worker (thread )?0 ", text.split("\n")[1])
        assert "batch 2 of the epoch" in text
        assert "has been making a batch for" in text


class HoldsTheLock(Numbers):
    """At one index it opens a pipe in C, with the interpreter lock, until another process opens it too."""

    def __init__(self, length, at, pipe):
        super().__init__(length, 3)
        self.at = at
        self.pipe = pipe

    def __getitem__(self, index):
        if index == self.at:
            fd = ctypes.PyDLL(None).open(str(self.pipe).encode(), os.O_RDONLY)
            assert fd >= 0, "the signal must not be seen"
            os.close(fd)
        return super().__getitem__(index)


def test_a_worker_that_holds_the_interpreter_lock(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    opened = []
    loader = DataLoader(HoldsTheLock(8, 3, pipe), num_workers=2, watchdog=SECONDS)
    with collected(lambda: opened.append(os.open(pipe, os.O_RDWR)), 2, "batch 3 ", "in __getitem__") as texts:
        assert [int(batch[0, 0]) for batch in loader] == list(range(8))
    os.close(opened[0])
    assert "sleeps and has been making a batch" in texts[0]


def test_a_stopped_worker():
    loader = DataLoader(Numbers(50, 3), num_workers=2, watchdog=SECONDS)
    iterator = iter(loader)
    assert [int(next(iterator)[0, 0]) for _ in range(2)] == [0, 1]
    pid = iterator._workers[1].pid
    os.kill(pid, signal.SIGSTOP)
    with collected(lambda: os.kill(pid, signal.SIGCONT), 2, f"pid {pid}") as texts:
        assert [int(batch[0, 0]) for batch in iterator] == list(range(2, 50))
    assert "was stopped by a signal" in texts[0]
    assert "(no stack: it cannot answer)" in texts[0]


class GivesUp(Waits):
    """A dataset whose worker takes the handler away, or blocks its signal, before it waits."""

    def __init__(self, how, released):
        super().__init__({1}, released, 4)
        self.how = how

    def __getitem__(self, index):
        if index == 1:
            number = stacks._Answering.signal
            assert number
            if self.how == "given up":
                signal.signal(number, signal.SIG_DFL)
            else:
                signal.pthread_sigmask(signal.SIG_BLOCK, {number})
        return super().__getitem__(index)


@pytest.mark.parametrize(("how", "words"), [("given up", "has given up its handler"), ("blocked", "blocks")])
def test_a_worker_that_cannot_answer_lives_on(how, words, released):
    loader = DataLoader(GivesUp(how, released), num_workers=1, watchdog=SECONDS)
    with collected(released.touch, 2, words) as texts:
        assert torch.cat(list(loader)).tolist() == [0, 1, 2, 3]
    assert "dataset indices [1]" in texts[0]


def test_another_process_of_that_number_is_not_asked():
    """A signal without a handler would end it."""
    told = stacks.Stacks(1, notes=True)
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    try:
        told._records.set(0, stacks._PID, pid)
        told._records.set(0, stacks._START, proc.start_of(pid) - 1)
        told._records.set(0, stacks._SIGNAL, signal.SIGRTMIN + 1)
        assert "given up" in told.stack(0, pid, time.monotonic() + 5)
        told._records.set(0, stacks._START, proc.start_of(pid))
        assert "given up" in told.stack(0, pid, time.monotonic() + 5)
        # The record is that of another process.
        assert "has not come" in told.stack(0, os.getpid(), time.monotonic() + 5)
        for number in (0, signal.SIGKILL, -1 << 63):
            told._records.set(0, stacks._SIGNAL, number)
            assert "no signal is left" in told.stack(0, pid, time.monotonic() + 5)
        assert is_running(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        told.close()


class DiesThenWaits(Waits):
    def __init__(self, folder):
        super().__init__({3}, folder / "released", 8)
        self.folder = folder

    def __getitem__(self, index):
        mark = self.folder / "died"
        if index == 3 and not mark.exists():
            mark.touch()
            Dies(1, 0, "kill")[0]
        return super().__getitem__(index)


@pytest.mark.parametrize("pool", [None, "fork", "spawn"])
def test_a_successor_answers(pool, tmp_path):
    workers = {"worker_pool": WorkerPool(2, start_method=pool)} if pool else {"num_workers": 2}
    loader = DataLoader(DiesThenWaits(tmp_path), watchdog=SECONDS, restart_workers=1, **workers)
    iterator = iter(loader)
    lost = iterator._workers[1].pid
    with collected((tmp_path / "released").touch, 2, "batch 3 ", "in __getitem__") as texts:
        assert torch.cat(list(iterator)).tolist() == list(range(8))
    assert f"(pid {lost})" not in texts[-1]
    if pool:
        # A pool that goes by itself leaves the server for spawn until other code looks at its processes.
        workers["worker_pool"].shutdown()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_of_a_pool_answer_for_one_iterator_after_another(method, tmp_path):
    pool = WorkerPool(1, start_method=method)
    try:
        pids = set()
        released = tmp_path / "released"
        loader = DataLoader(Waits({2}, released, 4), worker_pool=pool, watchdog=SECONDS)
        for _ in range(2):
            released.unlink(missing_ok=True)
            with collected(released.touch, 2, r"\[2\]", "in __getitem__") as texts:
                iterator = iter(loader)
                pids.add(iterator._workers[0].pid)
                assert torch.cat(list(iterator)).tolist() == [0, 1, 2, 3]
            assert len(re.findall("in wait", texts[1])) == 1, "the stack of one moment alone"
        assert len(pids) == 1
        assert is_running(*pids)
    finally:
        pool.shutdown()


def test_persistent_workers_and_abandoned_epochs(released):
    loader = DataLoader(
        Waits({7}, released, 8), num_workers=2, watchdog=SECONDS, persistent_workers=True, prefetch_factor=1
    )
    next(iter(loader))
    with collected(released.touch, 2, "batch 7 ", "in __getitem__"):
        assert torch.cat(list(loader)).tolist() == list(range(8))
    assert torch.cat(list(loader)).tolist() == list(range(8))
    loader.shutdown()


def test_out_of_order_all_in_batches_are_named(released):
    loader = DataLoader(
        Waits(range(4, 8), released, 8), batch_size=None, num_workers=2, watchdog=SECONDS, in_order=False
    )
    with collected(released.touch, 2, r"in __getitem__(.|\n)*in __getitem__") as texts:
        assert sorted(loader) == list(range(8))
    named = re.findall(r"^worker (\d) .* batch (\d) .* dataset index (\d)", texts[-1], re.M)
    assert sorted(worker for worker, _, _ in named) == ["0", "1"]
    assert all(batch == index for _, batch, index in named)
    assert "4" in {index for _, _, index in named}
    assert len(re.findall("in __getitem__", texts[-1])) == 2


@pytest.mark.parametrize("worker_method", ["multiprocessing", "thread"])
def test_only_workers_that_are_in_batches_are_named_beside_the_one_whose_turn_it_is(worker_method, released):
    """Worker 1 has made its tasks, worker 2 waits in its second."""
    loader = DataLoader(
        Waits({0, 5}, released, 12),
        batch_size=None,
        num_workers=3,
        watchdog=SECONDS,
        worker_method=worker_method,
    )
    # Batches before those are still on their way.
    both = "dataset index 0;(.|\n)*in __getitem__(.|\n)*dataset index 5;(.|\n)*in __getitem__"
    with collected(released.touch, 2, both) as texts:
        assert [int(one) for one in loader] == list(range(12))
    assert re.findall(r"^worker (?:thread )?(\d) .*dataset index (\d+)", texts[-1], re.M) == [
        ("0", "0"),
        ("2", "5"),
    ]


def test_an_iterable_dataset(released):
    loader = DataLoader(WaitsInOne(released), batch_size=None, num_workers=2, watchdog=SECONDS)
    with collected(released.touch, 2, "^worker 1", "in __iter__") as texts:
        assert list(loader) == [0, 1]
    assert "owes its next batch" in texts[0]


class WaitsInInit:
    def __init__(self, released):
        self.waits = Waits((), released)

    def __call__(self, _worker):
        self.waits.wait()


def test_a_worker_that_has_not_begun(released):
    loader = DataLoader(Numbers(2, 3), num_workers=1, watchdog=SECONDS, worker_init_fn=WaitsInInit(released))
    with collected(released.touch, 1, "in __call__") as texts:
        assert len(list(loader)) == 2
    assert "makes no batch at this moment" in texts[0]


@pytest.mark.parametrize("options", [{}, {"worker_method": "thread"}], ids=["process", "thread"])
def test_the_error_of_a_timeout_has_the_stack(options, released):
    iterator = iter(DataLoader(Waits({0}, released, 4), num_workers=1, timeout=SECONDS, **options))
    with pytest.raises(RuntimeError) as caught:
        # The worker may not have come to its loop yet.
        for _ in range(100):
            try:
                next(iterator)
            except RuntimeError as error:
                if "in __getitem__" in "".join(error.__notes__):
                    raise
    assert str(caught.value) == f"DataLoader timed out after {SECONDS} seconds"
    named, told = caught.value.__notes__
    assert "is late with batch 0 of the epoch: dataset indices [0]" in named
    assert told.startswith("worker 0 ")
    caught.value.__traceback__ = None
    released.touch()


def test_without_memory_for_stacks_the_rest_is_said(released, monkeypatch):
    def refused(*_):
        raise PermissionError("memfd_create")

    monkeypatch.setattr(os, "memfd_create", refused)
    loader = DataLoader(Waits({1}, released, 4), num_workers=1, watchdog=SECONDS)
    with collected(released.touch, 1, "batch 1 ") as texts:
        assert torch.cat(list(loader)).tolist() == [0, 1, 2, 3]
    assert "dataset indices [1]" in texts[0]


@pytest.mark.parametrize("options", [{}, {"worker_method": "thread"}], ids=["process", "thread"])
def test_off_leaves_no_trace(options):
    iterator = iter(DataLoader(Numbers(4), num_workers=1, **options))
    transport = iterator._transport
    assert tuple(iterator._features) == ()
    assert tuple(transport.options) == ()
    assert len(list(iterator)) == 4


def test_without_waits_nothing_is_said():
    with collected(lambda: None) as texts:
        assert len(list(DataLoader(Numbers(40), num_workers=2, watchdog=60))) == 40
        assert len(list(DataLoader(Numbers(4), watchdog=60))) == 4, (
            "without workers there is nothing to watch"
        )
    assert texts == []


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (0, ValueError, "watchdog must be positive, not 0"),
        (-1.5, ValueError, "watchdog must be positive, not -1.5"),
        (float("nan"), ValueError, "watchdog must be positive, not nan"),
        (True, TypeError, "watchdog must be a number of seconds or None, not True"),
        ("5", TypeError, "not '5'"),
    ],
)
def test_wrong_values(value, error, words):
    with pytest.raises(error, match=words):
        DataLoader(Numbers(4), num_workers=1, watchdog=value)


def test_a_time_that_never_comes():
    assert len(list(DataLoader(Numbers(4), num_workers=1, watchdog=float("inf")))) == 4


def takes_the_signal(_worker):
    for number in range(signal.SIGRTMIN, signal.SIGRTMAX + 1):
        signal.signal(number, lambda *_: os._exit(3))


@pytest.mark.parametrize("options", [{"watchdog": SECONDS}, {"timeout": 1}])
def test_a_handler_of_the_program_is_not_called(options, released):
    loader = DataLoader(Waits({2}, released, 4), num_workers=1, worker_init_fn=takes_the_signal, **options)
    words = r"\(no stack: no signal is left in the worker\)"
    found, iterator = [], iter(loader)
    with collected(released.touch, 1, words) as texts:
        while len(found) < 4:
            try:
                found += next(iterator).tolist()
            except RuntimeError as error:
                assert "timed out" in str(error), "the worker lives"
                if re.search(words, "".join(error.__notes__)):
                    texts.append("a note")
                    released.touch()
    assert found == [0, 1, 2, 3] and texts


class WaitsToBegin(IterableDataset):
    def __init__(self, waits):
        self.waits = waits

    def __iter__(self):
        self.waits.wait()
        return iter(range(4))


@pytest.mark.parametrize("where", ["worker_init_fn", "__iter__"])
@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
def test_out_of_order_those_that_have_not_begun_are_described(method, where, released):
    waits = Waits((), released)
    if where == "__iter__":
        dataset, options = WaitsToBegin(waits), {}
    else:
        dataset, options = Numbers(4), {"worker_init_fn": lambda _: waits.wait()}
    loader = DataLoader(
        dataset, num_workers=2, in_order=False, worker_method=method, watchdog=SECONDS, **options
    )
    with collected(released.touch, 1, "in wait(.|\n)*in wait") as texts:
        list(loader)
    assert len(re.findall(r"worker (?:thread )?\d .*owes", texts[0])) == 2


def test_what_was_waited_for_in_the_last_epoch_is_not_said_again():
    # Longer than a start on a busy machine.
    loader = DataLoader(Numbers(4), num_workers=2, persistent_workers=True, watchdog=3)
    with collected(lambda: None) as texts:
        assert len(list(loader)) == 4
        time.sleep(3.5)
        assert len(list(loader)) == 4
    assert texts == []


def test_the_end_of_the_iterator_while_a_stack_is_awaited():
    """The iterator's memory stays until the answer is read."""
    told = stacks.Stacks(1, notes=True)
    pid = os.getpid()
    told._records.set(0, stacks._PID, pid)
    told._records.set(0, stacks._SIGNAL, signal.SIGRTMAX - 1)
    ending = threading.Thread(target=told.close)

    def ask(*_):
        ending.start()
        ending.join(0.1)
        assert told._records.get(0, stacks._PID) == pid
        return "the stack"

    told._ask = ask
    assert told.stack(0, pid, time.monotonic() + 1) == "the stack"
    ending.join()
    assert told.stack(0, pid, time.monotonic() + 1) == "(no stack: the iterator has ended)"
    assert told.seconds_in_batch(0, pid) is None
    assert not told.has_begun(0, pid)
    with pytest.raises(OSError):
        os.fstat(told._fd)


def test_a_handler_that_ends_the_iterator_waits_for_no_answer():
    told = stacks.Stacks(1, notes=True)
    with told._lock:
        told.close()
    assert not told.has_begun(0, os.getpid())
