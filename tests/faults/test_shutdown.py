"""``DataLoader.shutdown`` and the ``with`` block: all of this loader ends now, and nothing else does."""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
import time

import pytest
import torch
from torch.utils.data import IterableDataset, _utils

import ringloader
from faults.failing_datasets import Hangs, Numbers, Pauses
from faults.proc import Snapshot, descendants, descriptors, mappings, wait_until
from faults.script import run_script
from ringloader import DataLoader
from ringloader._features import spawn_server
from ringloader._torch import select_path

pytestmark = pytest.mark.rings_only

ENDED = "ended by DataLoader.shutdown"


@pytest.fixture(params=["native", "ahead", "torch", "without workers"])
def path(request, monkeypatch):
    if request.param == "torch":
        reason = select_path.Reason("the test wants it")
        monkeypatch.setattr(select_path, "reason_for_torch", lambda *_: reason)
    return request.param


def made(path, dataset, **options):
    workers = 0 if path == "without workers" else 2
    if workers == 0:
        options.pop("persistent_workers", None)
    if path == "ahead":
        options["main_prefetch"] = 2
    return DataLoader(dataset, batch_size=None, num_workers=workers, **options)


def segments():
    return sum("memfd:ringloader" in line for line in mappings())


def first_elements(batches):
    return [int(batch[0]) for batch in batches]


def assert_ended(iterator):
    for _ in range(2):
        with pytest.raises(RuntimeError, match=ENDED) as caught:
            next(iterator)
        caught.value.__traceback__ = None
    with pytest.raises(RuntimeError, match=ENDED):
        iterator.resume()
    assert not iterator.is_paused()


@pytest.mark.parametrize("persistent", [False, True])
def test_an_iterator_that_is_held_ends_with_its_workers(path, persistent):
    loader = made(path, Numbers(20), persistent_workers=persistent)
    for _ in range(2):
        iterator = iter(loader)
        assert first_elements([next(iterator), next(iterator)]) == [0, 1]
        loader.shutdown()
        assert not descendants()
        assert_ended(iterator)
        loader.shutdown()
        assert first_elements(loader) == list(range(20)), "it may be used again"
        loader.shutdown()
    assert not descendants()


def test_before_and_between_epochs(path):
    loader = made(path, Numbers(6))
    loader.shutdown()
    for _ in range(2):
        assert first_elements(loader) == list(range(6))
        loader.shutdown()
    with loader as same:
        assert same is loader
        assert first_elements(loader) == list(range(6))
    with loader:
        assert first_elements(loader) == list(range(6))


def test_batches_stay_valid(path):
    """Later loaders fill memory with other bytes."""
    loader = made(path, Numbers(10, elements=40_000))
    held = [batch for batch, _ in zip(loader, range(4), strict=False)]
    loader.shutdown()
    for _ in range(3):
        other = made(path, Numbers(10, elements=40_000))
        for batch in other:
            batch.fill_(-1)
        other.shutdown()
    assert [bool((batch == number).all()) for number, batch in enumerate(held)] == [True] * 4
    held[0].fill_(7)
    assert bool((held[1] == 1).all())


@pytest.mark.parametrize("persistent", [False, True])
def test_nothing_is_left(path, persistent):
    warm = made(path, Numbers(20), persistent_workers=persistent)
    assert len(list(warm)) == 20
    warm.shutdown()
    del warm
    snapshot, before = Snapshot.take(), segments()
    loader = made(path, Numbers(20), persistent_workers=persistent)
    abandoned = iter(loader)
    next(abandoned)
    if not persistent:
        assert len(list(loader)) == 20
        if path in ("native", "ahead"):
            assert segments() > before
    loader.shutdown()
    assert segments() == before, "what the loader kept for its next epoch, and the iterator's"
    assert not descendants()
    assert_ended(abandoned)
    # The iterator has its process objects, and they have a pipe each.
    del abandoned
    snapshot.assert_nothing_left()


def test_an_error_in_the_block(path):
    with pytest.raises(ZeroDivisionError) as caught, made(path, Numbers(20)) as loader:
        iterator = iter(loader)
        next(iterator)
        raise ZeroDivisionError
    caught.value.__traceback__ = None
    assert not descendants()
    assert_ended(iterator)


def test_other_loaders_go_on(path):
    other = made(path, Numbers(20))
    theirs = iter(other)
    next(theirs)
    with made(path, Numbers(20)) as loader:
        next(iter(loader))
        mine = iter(loader)
        next(mine)
    assert first_elements(theirs) == list(range(1, 20))


def test_a_limit_does_not_hide_it(path):
    with made(path, Numbers(20)) as loader:
        iterator = iter(loader)
        iterator.limit(1)
        assert len(list(iterator)) == 1
        assert iterator.is_paused()
    assert_ended(iterator)


def test_a_copy_that_shares_persistent_workers(path):
    loader = made(path, Numbers(6), persistent_workers=True)
    next(iter(loader))
    other = copy.copy(loader)
    other.shutdown()
    assert first_elements(loader) == list(range(6)), "they are the original's"
    other = copy.copy(loader)
    loader.shutdown()
    if path != "without workers":
        with pytest.raises(RuntimeError, match=ENDED):
            iter(other)
    other.shutdown()
    assert first_elements(other) == first_elements(loader) == list(range(6))
    other.shutdown()
    loader.shutdown()


def test_a_converted_loader(path):
    plain = torch.utils.data.DataLoader(
        Numbers(6), batch_size=None, num_workers=0 if path == "without workers" else 2
    )
    with ringloader.convert(plain):
        iterator = iter(plain)
        next(iterator)
    assert_ended(iterator)


def test_from_another_thread_while_a_batch_is_awaited(path, tmp_path, monkeypatch):
    if path == "without workers":
        pytest.skip("the caller itself makes the batch")
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.5)
    told = tmp_path / "told"
    loader = made(path, Hangs(8, 1, str(told)))
    iterator = iter(loader)
    next(iterator)
    outcome = []

    def take():
        try:
            outcome.append(next(iterator))
        except Exception as error:
            error.__traceback__ = None
            outcome.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    assert wait_until(told.exists, 20)
    loader.shutdown()
    thread.join(20)
    assert not thread.is_alive(), "no wait is for ever"
    assert isinstance(outcome[0], Exception)
    # torch's own loop may find the loss first.
    assert path == "torch" or ENDED in str(outcome[0])
    # An older torch does not wait for the end of what it has terminated.
    assert wait_until(lambda: not descendants(), 5)
    assert_ended(iterator)


class Taking(threading.Thread):
    """Asks an iterator for batches, and has what it got, or what was raised."""

    def __init__(self, iterator, batches=1):
        super().__init__(daemon=True)
        self.iterator, self.batches, self.got = iterator, batches, []
        self.start()

    def run(self):
        for _ in range(self.batches):
            try:
                self.got.append(int(next(self.iterator)[0]))
            except BaseException as error:
                error.__traceback__ = None
                self.got.append(str(error))


# Seconds in which a thread that waits is told. Workers that are busy take longer to end.
SOON = 1.0
WAITING = {
    "native": {},
    "one worker": {"num_workers": 1},
    "as completed": {"in_order": False, "num_workers": 1},
    "main_prefetch": {"main_prefetch": 3},
    "threads": {"worker_method": "thread"},
    "on_error": {"on_error": "skip"},
    "on_error and main_prefetch": {"on_error": "skip", "main_prefetch": 2},
    "restart_workers": {"restart_workers": 2},
    "watchdog": {"watchdog": 0.05},
    "timeout": {"timeout": 30},
    "persistent": {"persistent_workers": True},
    "limit": {},
}


@pytest.mark.parametrize("case", WAITING)
def test_a_thread_that_waits_is_told_soon_and_gets_no_batch(case, tmp_path):
    """Also not the one that the worker makes before it ends."""
    dataset = Pauses(8, 1, tmp_path)
    loader = DataLoader(dataset, batch_size=None, **{"num_workers": 2, **WAITING[case]})
    iterator = iter(loader)
    if case == "limit":
        iterator.limit(5)
    assert int(next(iterator)[0]) == 0
    waiting = [Taking(iterator, 2), Taking(iterator, 2)]
    assert wait_until(dataset.told.exists, 20)
    time.sleep(0.05)
    ending = threading.Thread(target=loader.shutdown)
    ending.start()
    try:
        for thread in waiting:
            thread.join(SOON)
        still_waiting = [thread.is_alive() for thread in waiting]
    finally:
        dataset.released.touch()
        ending.join(30)
        for thread in waiting:
            thread.join(30)
    for thread in waiting:
        assert len(thread.got) == 2
        assert all(isinstance(got, str) and ENDED in got for got in thread.got), thread.got
    assert not any(still_waiting)
    assert_ended(iterator)
    assert wait_until(lambda: not descendants(), 5)


def test_from_a_signal_handler_while_a_batch_is_awaited(tmp_path, monkeypatch):
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.5)
    told = tmp_path / "told"
    loader = made("native", Hangs(8, 1, str(told)))
    iterator = iter(loader)
    next(iterator)
    before = signal.signal(signal.SIGUSR1, lambda *_: loader.shutdown())
    try:
        thread = threading.Thread(
            target=lambda: (wait_until(told.exists, 20), os.kill(os.getpid(), signal.SIGUSR1))
        )
        thread.start()
        with pytest.raises(RuntimeError, match=ENDED) as caught:
            next(iterator)
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    caught.value.__traceback__ = None
    assert_ended(iterator)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_forked_child_ends_what_is_its_own(path, persistent):
    loader = made(path, Numbers(12), persistent_workers=persistent)
    iterator = iter(loader)
    next(iterator)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            loader.shutdown()
            mine = made("native", Numbers(6))
            theirs = iter(mine)
            next(theirs)
            mine.shutdown()
            try:
                next(theirs)
            except RuntimeError:
                status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert first_elements(iterator) == list(range(1, 12)), "the parent's goes on"
    loader.shutdown()


class Open(IterableDataset):
    def __init__(self):
        self.closed = []

    def __iter__(self):
        try:
            yield from (torch.tensor([number]) for number in range(5))
        finally:
            self.closed.append(True)


def test_without_workers_the_datasets_iterator_is_closed():
    dataset = Open()
    with DataLoader(dataset, batch_size=None) as loader:
        iterator = iter(loader)
        next(iterator)
        assert dataset.closed == []
    assert dataset.closed == [True]
    assert_ended(iterator)


def test_the_server_of_spawned_workers_ends_and_comes_back():
    gc.collect()
    if spawn_server._servers_of:
        pytest.skip("a loader of another test needs it")
    loader = DataLoader(Numbers(4), batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert spawn_server._running() is not None
    for _ in range(2):
        assert first_elements(loader) == [0, 1, 2, 3]
        loader.shutdown()
        assert spawn_server._running() is None
        assert not descendants()


def test_at_the_interpreters_exit(tmp_path):
    ended = run_script(
        "ringloader",
        """
        import atexit
        loaders = [DataLoader(Numbers(20), num_workers=2, persistent_workers=persistent, main_prefetch=ahead)
                   for persistent in (False, True) for ahead in (0, 2)]
        iterators = [iter(loader) for loader in loaders]
        for iterator in iterators:
            next(iterator)
        for loader in loaders:
            atexit.register(loader.shutdown)
        print("end")
        """,
        tmp_path,
    )
    assert (ended.code, ended.out.strip(), ended.err) == (0, "end", "")


def test_a_block_in_a_loop_keeps_nothing():
    def count():
        with DataLoader(Numbers(4), batch_size=None, num_workers=1, main_prefetch=1) as loader:
            next(iter(loader))
        return len(descriptors()), len(mappings()), threading.active_count()

    for _ in range(3):
        before = count()
    begun = time.monotonic()
    for _ in range(20):
        after = count()
    assert after[0] <= before[0] and after[2] <= before[2]
    assert after[1] <= before[1] + 8
    assert time.monotonic() - begun < 30
