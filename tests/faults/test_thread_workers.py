"""Workers that are threads, in trouble: what hangs, ends, forks or is dropped, and what is left of them."""

from __future__ import annotations

import copy
import gc
import logging
import os
import pickle
import signal
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data import IterableDataset

import ringloader
from faults.script import run_script
from ringloader import DataLoader
from ringloader._features.threads.thread import WorkerThread
from ringloader._features.threads.transport import ThreadTransport
from small_datasets import Numbers

pytestmark = pytest.mark.rings_only


def identity(value: Any) -> Any:
    return value


def threads(dataset: Any, **options: Any) -> Any:
    return DataLoader(dataset, **{"num_workers": 2, "batch_size": None, "worker_method": "thread", **options})


def workers_left() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, WorkerThread)]


@pytest.fixture(autouse=True)
def _no_thread_left():
    yield
    gc.collect()
    limit = time.monotonic() + 10
    while workers_left() and time.monotonic() < limit:
        time.sleep(0.01)
    assert workers_left() == []


@pytest.mark.parametrize("persistent", [False, True])
def test_no_thread_is_left(persistent):
    loader = threads(Numbers(20, 4), persistent_workers=persistent)
    for epoch in range(3):
        iterator = iter(loader)
        next(iterator)
        if epoch == 1:
            list(iterator)
    assert len(workers_left()) == 2
    del iterator, loader
    assert workers_left() == []


class Held(Numbers):
    """Sample 1 waits until it is released."""

    def __init__(self) -> None:
        super().__init__(6, 4)
        self.inside = threading.Event()
        self.released = threading.Event()

    def __getitem__(self, index: Any) -> Any:
        if index == 1:
            self.inside.set()
            assert self.released.wait(60)
        return super().__getitem__(index)


def test_a_thread_that_hangs_is_left_and_said(monkeypatch, caplog):
    monkeypatch.setattr(ThreadTransport, "_join_seconds", 0.2)
    dataset = Held()
    iterator = iter(threads(dataset, num_workers=3))
    next(iterator)
    assert dataset.inside.wait(10)
    with caplog.at_level(logging.WARNING, "ringloader"):
        begun = time.monotonic()
        del iterator
        took = time.monotonic() - begun
    assert took >= 0.2
    # Not once for each worker, and again after `terminate`.
    assert caplog.text.count("1 of the worker threads are still in the dataset") == 1
    assert len(workers_left()) == 1
    dataset.released.set()


def test_a_hanging_dataset_times_out():
    dataset = Held()
    iterator = iter(threads(dataset, timeout=0.2))
    assert next(iterator).tolist() == [0] * 4
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.2 seconds") as raised:
        next(iterator)
    assert "worker 1 (pid " in raised.value.__notes__[0] and "dataset index 1" in raised.value.__notes__[0]
    dataset.released.set()
    # A caller that goes on gets what comes later, as with torch.
    assert next(iterator).tolist() == [1] * 4


class Ends(Numbers):
    def __init__(self, error: BaseException) -> None:
        super().__init__(8, 4)
        self.error = error

    def __getitem__(self, index: Any) -> Any:
        if index == 3:
            raise self.error
        return super().__getitem__(index)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_what_is_no_exception_ends_the_worker(error):
    iterator = iter(threads(Ends(error)))
    seen = []
    with pytest.raises(RuntimeError, match=r"DataLoader worker .*exited unexpectedly") as raised:
        for batch in iterator:
            seen.append(int(batch[0]))
    assert str(raised.value) == "DataLoader worker thread 1 exited unexpectedly"
    assert raised.value.__cause__ is error
    # The loss is said before batches of other workers that come later.
    assert seen == list(range(len(seen))) and len(seen) <= 3


def test_an_interrupt_ends_a_wait():
    dataset = Held()
    iterator = iter(threads(dataset))
    next(iterator)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        dataset.released.set()
    assert [int(batch[0]) for batch in iterator] == [1, 2, 3, 4, 5]


def test_next_in_a_forked_child_raises_at_once():
    iterator = iter(threads(Numbers(50, 4)))
    next(iterator)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            try:
                next(iterator)
                said = "nothing"
            except AssertionError as error:
                said = str(error)
            del iterator
            gc.collect()
            os.write(write, said.encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answers:
        said = answers.read()
    os.waitpid(child, 0)
    assert said.startswith("can only test a child process: this iterator was made by process")
    assert len(list(iterator)) == 49, "nothing of it was the child's"


def test_many_forks_while_threads_work():
    """A child must never wait for a lock that a thread of its parent had."""
    iterator = iter(threads(Numbers(3000, 4), num_workers=4, prefetch_factor=8))
    for count, _ in enumerate(iterator):
        if count % 150 == 0:
            child = os.fork()
            if child == 0:
                try:
                    next(iterator)
                except AssertionError:
                    os._exit(7)
                finally:
                    os._exit(1)
            assert os.waitpid(child, 0)[1] == 7 << 8


class Drops(Numbers):
    """A dataset whose worker drops the last reference to the iterator."""

    def __init__(self) -> None:
        super().__init__(100, 4)
        self.holder: list[Any] = []
        self.dropped = threading.Event()

    def __getitem__(self, index: Any) -> Any:
        if self.holder and index > 2:
            self.holder.clear()
            self.dropped.set()
        return index


def test_the_iterator_may_go_in_a_worker():
    dataset = Drops()
    iterator = iter(threads(dataset, prefetch_factor=1))
    gone = weakref.ref(iterator)
    next(iterator)
    dataset.holder.append(iterator)
    del iterator
    held = dataset.holder[:1]
    next(held.pop())
    assert dataset.dropped.wait(10)
    limit = time.monotonic() + 10
    while gone() is not None and time.monotonic() < limit:
        time.sleep(0.01)
    assert gone() is None


def test_a_batch_goes_when_its_last_user_does():
    """Not when the worker begins the next."""

    class Big(Numbers):
        def __getitem__(self, index):
            return Batch()

    class Batch:
        pass

    loader = threads(Big(1), num_workers=1, persistent_workers=True, collate_fn=identity)
    iterator = iter(loader)
    batch = next(iterator)
    gone = weakref.ref(batch)
    del batch
    limit = time.monotonic() + 10
    while gone() is not None and time.monotonic() < limit:
        time.sleep(0.01)
    assert gone() is None


def test_two_threads_take_batches_of_one_iterator():
    iterator = iter(threads(Numbers(400, 4), num_workers=3))
    taken: list[list[int]] = [[], []]

    def take(into: list[int]) -> None:
        into.extend(int(batch[0]) for batch in iterator)

    takers = [threading.Thread(target=take, args=(into,)) for into in taken]
    for taker in takers:
        taker.start()
    for taker in takers:
        taker.join(40)
    assert sorted(taken[0] + taken[1]) == list(range(400))


def test_persistent_workers_over_given_up_epochs():
    """Batches that a given up epoch left in the queues are nobody's."""
    loader = threads(Numbers(40, 4), persistent_workers=True, prefetch_factor=4)
    for taken in (0, 1, 5, 39):
        iterator = iter(loader)
        for _ in range(taken):
            next(iterator)
    alive = workers_left()
    assert [int(batch[0]) for batch in loader] == list(range(40))
    assert workers_left() == alive


def test_loaders_are_copied_and_pickled():
    loader = threads(Numbers(4, 4))
    for other in (copy.copy(loader), pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)):
        assert len(list(other)) == 4
        assert ringloader.report(other).path == "threads"


def test_install_and_convert_and_subclasses():
    class Mine(torch.utils.data.DataLoader):
        pass

    mine = Mine(Numbers(4, 4), num_workers=1)
    with ringloader.installed(worker_method="thread"):
        assert len(list(mine)) == 4
        assert ringloader.report(mine).path == "threads"
    converted = ringloader.convert(Mine(Numbers(4, 4), num_workers=1), worker_method="thread")
    assert len(list(converted)) == 4
    assert (ringloader.report(converted).path, isinstance(converted, Mine)) == ("threads", True)


@pytest.mark.parametrize("persistent", [False, True])
def test_shutdown_while_another_thread_waits(persistent):
    dataset = Held()
    ended: list[object] = []

    def wait(iterator: Any) -> None:
        try:
            ended.append(int(next(iterator)[0]))
        except Exception as error:
            ended.append(type(error))

    with threads(dataset, persistent_workers=persistent) as loader:
        iterator = iter(loader)
        next(iterator)
        assert dataset.inside.wait(10)
        waiting = threading.Thread(target=wait, args=(iterator,))
        waiting.start()
        time.sleep(0.1)
        releases = threading.Timer(0.3, dataset.released.set)
        releases.start()
    waiting.join(20)
    # The sample in which the worker was may still come.
    assert ended in ([1], [RuntimeError], [AssertionError]) and not waiting.is_alive()
    assert workers_left() == []
    assert [int(batch[0]) for batch in loader] == list(range(6)), "with new workers"
    loader.shutdown()


def test_limit_and_resume():
    iterator = iter(threads(Numbers(6, 4), persistent_workers=True))
    iterator.limit(2)
    taken = []
    for _ in range(3):
        taken.append([int(batch[0]) for batch in iterator])
        iterator.resume()
    assert taken == [[0, 1], [2, 3], [4, 5]]


def test_without_workers_it_means_nothing():
    loader = threads(Numbers(4, 4), num_workers=0)
    assert len(list(loader)) == 4
    assert ringloader.report(loader).path == "single-process"


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        number = 0
        while True:
            yield number
            number += 1


def test_no_more_is_made_than_the_prefetch_factor_allows():
    made = []

    class Counts(Endless):
        def __iter__(self):
            for number in super().__iter__():
                made.append(number)
                yield number

    iterator = iter(threads(Counts(), num_workers=1, prefetch_factor=3))
    next(iterator)
    limit = time.monotonic() + 10
    while len(made) < 4 and time.monotonic() < limit:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(made) == 4


MAKES_LOADER = """
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 10**6
    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.full((100,), index)
class Hangs(Slow):
    def __getitem__(self, index):
        if index == 1:
            for _ in range(10):
                time.sleep(1)
        return index
loader = DataLoader(Slow(), num_workers=2, batch_size=4, worker_method="thread")
"""
BODIES = {
    "an iterator is alive": "iterator = iter(loader); next(iterator)",
    "persistent": """
loader = DataLoader(Slow(), num_workers=2, worker_method="thread", persistent_workers=True)
iterator = iter(loader)
next(iterator)
""",
    "persistent, behind processes that persist": """
processes = DataLoader(range(4), num_workers=1, persistent_workers=True)
list(processes)
loader = DataLoader(Slow(), num_workers=2, worker_method="thread", persistent_workers=True)
iterator = iter(loader)
next(iterator)
""",
    "kept until the modules are torn down": "os.kept = iter(loader); next(os.kept)",
    "sys.exit in the loop": "for batch in loader: sys.exit(0)",
    "one hangs without the interpreter lock": """
from ringloader._torch import internals
internals.JOIN_SECONDS = 0.2
iterator = iter(DataLoader(Hangs(), num_workers=2, worker_method="thread"))
next(iterator)
time.sleep(0.2)
""",
    "in a sequence of an ArrayDataset": """
from ringloader import ArrayDataset
from ringloader._torch import internals
internals.JOIN_SECONDS = 0.2
class Waits:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        while True:
            time.sleep(0.0005)
iterator = iter(DataLoader(ArrayDataset(Waits()), num_workers=2, batch_size=4, worker_method="thread"))
time.sleep(0.2)
""",
    "in native collation": """
from ringloader._worker.collate import Collation
from ringloader._torch import internals
from torch.utils.data import default_collate
internals.JOIN_SECONDS = 0.0
# Not in the threads: an exit while one waits for the interpreter in torch's own code aborts the process.
samples = [torch.zeros(8)] * 64
class Collates(Slow):
    def __getitem__(self, index):
        collation = Collation(default_collate)
        while True:
            collation(samples)
iterator = iter(DataLoader(Collates(), num_workers=2, worker_method="thread"))
time.sleep(0.2)
""",
    "in a native gather": """
from ringloader import ArrayDataset
from ringloader._torch import internals
from ringloader._features.arrays import Rows
internals.JOIN_SECONDS = 0.0
rows = torch.zeros(64, 8)
class Gathers(Slow):
    def __getitem__(self, index):
        fetcher = internals.create_fetcher(internals.MAP, rows, True, None, False)
        gathering = Rows(fetcher)
        while True:
            assert gathering.batch(list(range(64))) is not None
iterator = iter(DataLoader(Gathers(), num_workers=2, worker_method="thread"))
time.sleep(0.2)
""",
}


@pytest.mark.parametrize("name", BODIES)
def test_exit_is_silent(tmp_path, name):
    ended = run_script("ringloader", MAKES_LOADER + BODIES[name].strip() + "\n", tmp_path)
    assert (ended.code, ended.err) == (0, "")


INTERRUPTED = """
import random, threading
from ringloader._features.threads.thread import WorkerThread
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 40
    def __getitem__(self, index):
        time.sleep(0.0005)
        return torch.full((4,), index)
is_on = False
def interrupt(*_):
    if is_on:
        raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
random.seed(0)
interrupted = 0
while interrupted < 60:
    iterator, got = None, []
    try:
        is_on = True
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0002, 0.05))
        iterator = iter(DataLoader(Numbers(), num_workers=2, batch_size=2, worker_method="thread"))
        for batch in iterator:
            got.append(batch[:, 0].tolist())
        is_on = False
    except KeyboardInterrupt:
        is_on = False
        interrupted += 1
        if iterator is not None:
            got += [batch[:, 0].tolist() for batch in iterator]
    except ValueError as error:
        # torch keeps what its constructor noted under an id, which the next iterator may have.
        is_on = False
        assert "_set_worker_pids" in str(error), error
    signal.setitimer(signal.ITIMER_REAL, 0)
    # A batch may be lost between the call and the assignment, as with torch.
    assert got == sorted(got) and all(b == a + 1 and a % 2 == 0 for a, b in got), got
    assert iterator is None or len(got) >= 18, got
iterator = None
gc.collect()
# One that an interrupt kept from being started stays in CPython's list, and is no thread.
workers = [thread for thread in threading.enumerate() if isinstance(thread, WorkerThread)]
print([thread for thread in workers if thread.ident])
"""


def test_interrupts_at_any_moment(tmp_path):
    ended = run_script("ringloader", INTERRUPTED, tmp_path)
    assert (ended.code, ended.out.strip()) == (0, "[]"), ended.err
    assert "still in the dataset" not in ended.err


def test_exit_while_a_thread_iterates(tmp_path):
    """The thread may live to say that its iterator was shut down, as with processes."""
    body = """
import threading
threading.Thread(target=lambda: [None for _ in loader], daemon=True).start()
time.sleep(0.5)
"""
    assert run_script("ringloader", MAKES_LOADER + body, tmp_path).code == 0


def test_threads_that_make_loaders_at_once_keep_the_number_of_threads(monkeypatch):
    real, before = torch.set_num_threads, torch.get_num_threads()
    has_set = threading.Event()
    found = []

    def set_slowly(number: int) -> None:
        real(number)
        if number == 1 and not has_set.is_set():
            has_set.set()
            time.sleep(0.5)

    def other() -> None:
        # Asks for the first time while a worker's number is that of all.
        has_set.wait(30)
        list(threads(Numbers(4, 4)))
        found.append(torch.get_num_threads())

    real(3)
    monkeypatch.setattr(torch, "set_num_threads", set_slowly)
    beside = threading.Thread(target=other)
    try:
        beside.start()
        list(threads(Numbers(4, 4)))
        beside.join(30)
        assert found == [3]
        assert torch.get_num_threads() == 3
    finally:
        real(before)
