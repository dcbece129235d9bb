"""``main_prefetch``: a thread decodes batches before their turn, and none is lost, early or kept."""

import gc
import os
import subprocess
import threading
import time
import warnings
import weakref

import pytest
import torch

import ringloader
from faults.proc import wait_until
from programs import client
from ringloader import DataLoader
from ringloader._features.main_prefetch import decoding
from small_datasets import Stream

pytestmark = pytest.mark.rings_only

# Set by each sample that is unpickled: its number, and the thread.
SEEN = []


class Told:
    """Pickled, and says when and where it is unpickled. ``failing``: what that raises."""

    def __init__(self, number, failing=None):
        self.number, self.failing = number, failing
        self.padding = bytes(4000)

    def __getstate__(self):
        return vars(self)

    def __setstate__(self, state):
        vars(self).update(state)
        SEEN.append((self.number, threading.current_thread().name))
        if self.failing is not None:
            raise self.failing


def identity(batch):
    return batch


@pytest.fixture(autouse=True)
def _nothing_seen():
    SEEN.clear()


def loader_of(samples, ahead, **options):
    options = {"num_workers": 1, "prefetch_factor": 4, **options}
    return DataLoader(samples, batch_size=None, collate_fn=identity, main_prefetch=ahead, **options)


def ready(iterator, count):
    assert wait_until(lambda: iterator._transport.engine.committed() >= count, 20)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "ringloader_decode"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ahead", [1, 3])
def test_so_many_are_decoded_ahead_by_the_thread(ahead, stream):
    samples = [Told(number) for number in range(8)]
    iterator = iter(loader_of(Stream(samples) if stream else samples, ahead))
    ready(iterator, 4)
    assert next(iterator).number == 0
    assert wait_until(lambda: len(SEEN) == ahead + 1, 20)
    # Tasks go out when a batch is handed out, as without it.
    assert iterator._send_idx == 5
    assert [batch.number for batch in iterator] == [1, 2, 3, 4, 5, 6, 7]
    assert [number for number, _ in SEEN] == list(range(8))
    assert {thread for _, thread in SEEN} == {"ringloader_decode"}


def test_without_it_there_is_no_thread():
    assert [batch.number for batch in loader_of([Told(0), Told(1)], 0)] == [0, 1]
    assert {name for _, name in SEEN} == {"MainThread"}
    assert threads() == []


@pytest.mark.parametrize("persistent", [False, True])
def test_epochs_to_their_end_and_abandoned(persistent):
    samples = [Told(number) for number in range(9)]
    loader = loader_of(samples, 3, num_workers=2, persistent_workers=persistent)
    for _ in range(3):
        iterator = iter(loader)
        ready(iterator, 4)
        assert [next(iterator).number, next(iterator).number] == [0, 1]
        assert len(threads()) == 1
    assert [batch.number for batch in loader] == list(range(9))
    del iterator, loader
    gc.collect()
    assert threads() == []


def test_an_error_comes_in_its_turn():
    samples = [Told(0), Told(1, ValueError("one")), Told(2)]
    iterator = iter(loader_of(samples, 3))
    ready(iterator, 3)
    assert next(iterator).number == 0
    assert wait_until(lambda: len(SEEN) == 3, 20)
    with pytest.raises(ValueError, match="one"):
        next(iterator)
    assert [batch.number for batch in iterator] == [2]


def test_what_interrupts_is_raised_in_its_turn_and_the_batch_is_lost():
    iterator = iter(loader_of([Told(0), Told(1, KeyboardInterrupt()), Told(2)], 3))
    ready(iterator, 3)
    assert next(iterator).number == 0
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    with pytest.raises(RuntimeError, match="lost when KeyboardInterrupt"):
        next(iterator)
    assert [batch.number for batch in iterator] == [2]


def test_a_batch_that_was_returned_is_the_callers_alone():
    class Weak(Told):
        pass

    globals()["Weak"] = Weak
    Weak.__qualname__ = "Weak"
    iterator = iter(loader_of([Weak(0), Weak(1)], 2))
    ready(iterator, 2)
    batch = next(iterator)
    gone = weakref.ref(batch)
    del batch
    assert wait_until(lambda: gone() is None, 5), "neither the thread nor the lookahead has it"
    assert next(iterator).number == 1


def test_no_batch_is_filled_again_while_it_is_ahead():
    """Slots of tensors are leased by the thread: what the caller gets late is what the worker made."""
    samples = [torch.full((50_000,), number) for number in range(30)]
    loader = DataLoader(samples, batch_size=None, num_workers=2, prefetch_factor=4, main_prefetch=6)
    held = []
    for number, batch in enumerate(loader):
        held = [*held[-3:], (number, batch)]
        time.sleep(0.002)
        for expected, one in held:
            assert bool((one == expected).all())


def test_no_mode_of_the_caller_reaches_the_thread():
    samples = [torch.full((2,), number) for number in range(4)]
    with torch.inference_mode():
        iterator = iter(DataLoader(samples, batch_size=None, num_workers=1, main_prefetch=2))
        assert [batch.is_inference() for batch in iterator] == [False] * 4


def test_a_fork_meanwhile():
    """The child takes nothing, ends nothing, and exits; the parent goes on."""
    iterator = iter(loader_of([Told(number) for number in range(8)], 3))
    assert next(iterator).number == 0
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            next(iterator)
        except AssertionError as error:
            # The exit of a child does this here: its parent's thread may have the lock of the tasks.
            decoding._close_at_exit()
            status = int("can only test a child process" not in str(error))
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert [batch.number for batch in iterator] == list(range(1, 8))


PROGRAM = """
import time, torch
from programs import client
from ringloader import DataLoader
class Slow:
    def __setstate__(self, state):
        time.sleep(0.3)
    def __getstate__(self):
        return {"a": bytes(3000)}
iterator = iter(DataLoader([Slow()] * 20, batch_size=None, collate_fn=lambda one: one, num_workers=1,
                           multiprocessing_context="fork", prefetch_factor=8, main_prefetch=8,
                           persistent_workers=PERSISTENT))
time.sleep(1)
next(iterator)
print("end", flush=True)
"""


@pytest.mark.parametrize("persistent", [False, True])
def test_the_interpreter_ends_while_the_thread_decodes(persistent):
    program = PROGRAM.replace("PERSISTENT", str(persistent))
    begun = time.monotonic()
    done = client.run(["-c", program], timeout=150, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
    assert time.monotonic() - begun < 40


def test_a_shutdown_while_the_thread_decodes_a_batch():
    """The thread that waits for it is told before it is there."""
    released = threading.Event()

    class Slow(Told):
        def __setstate__(self, state):
            super().__setstate__(state)
            released.wait(30)

    globals()["Slow"] = Slow
    Slow.__qualname__ = "Slow"
    loader = loader_of([Slow(number) for number in range(6)], 4)
    iterator = iter(loader)
    ready(iterator, 4)
    outcome = []

    def take():
        try:
            outcome.extend(next(iterator) for _ in range(6))
        except Exception as error:
            outcome.append(str(error))

    thread = threading.Thread(target=take)
    thread.start()
    assert wait_until(lambda: len(SEEN) > 0, 20)
    ending = threading.Thread(target=loader.shutdown)
    ending.start()
    thread.join(1)
    is_alive = thread.is_alive()
    released.set()
    thread.join(10)
    ending.join(20)
    assert not is_alive
    assert len(outcome) == 1 and "ended by DataLoader.shutdown" in outcome[0]
    assert wait_until(lambda: threads() == [], 5)


WRONG = [
    ({"main_prefetch": -1}, ValueError, "main_prefetch must be 0 or more, not -1"),
    ({"main_prefetch": 1.5}, TypeError, "main_prefetch must be an int, not 1.5"),
    ({"main_prefetch": True}, TypeError, "main_prefetch must be an int, not True"),
    ({"main_prefetch": 2}, ValueError, "main_prefetch=2 and num_workers=0 do not go together"),
    (
        {"main_prefetch": 2, "num_workers": 1, "pin_memory": True},
        ValueError,
        "main_prefetch=2 and pin_memory=True",
    ),
    (
        {"main_prefetch": 2, "num_workers": 1, "device": "cpu"},
        ValueError,
        "main_prefetch=2 and device='cpu'",
    ),
]


@pytest.mark.parametrize(("given", "kind", "words"), WRONG, ids=[str(given) for given, _, _ in WRONG])
def test_what_is_refused(given, kind, words):
    with pytest.raises(kind, match=words):
        DataLoader([1, 2], **given)


def test_installed_and_converted():
    plain = torch.utils.data.DataLoader([Told(0), Told(1)], batch_size=None, num_workers=1)
    pinned = torch.utils.data.DataLoader([0], num_workers=1, pin_memory=True)
    with pytest.raises(ValueError, match="main_prefetch=2 and pin_memory=True"):
        ringloader.convert(pinned, main_prefetch=2)
    assert type(pinned) is torch.utils.data.DataLoader
    with ringloader.installed(main_prefetch=2):
        with warnings.catch_warnings():
            # torch has something to say of pinning without an accelerator.
            warnings.simplefilter("ignore")
            assert list(pinned) == [torch.tensor([0])]
        reason = ringloader.report(pinned).reason
        assert reason.count("main_prefetch=2 and pin_memory=True do not go together") == 1
        assert [batch.number for batch in plain] == [0, 1]
        assert "main_prefetch" not in ringloader.report(plain).reason
    assert {name for _, name in SEEN} == {"ringloader_decode"}
    SEEN.clear()
    converted = ringloader.convert(plain, main_prefetch=1)
    assert [batch.number for batch in converted] == [0, 1]
    assert {name for _, name in SEEN} == {"ringloader_decode"}


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("is_begun", [False, True])
def test_an_interrupt_while_the_thread_is_started(is_begun, persistent, monkeypatch):
    """The batch comes when it is asked for again, and so do all others, and the iterator ends."""
    start, interrupted = threading.Thread.start, []

    def interrupted_start(thread):
        if thread.name != "ringloader_decode" or interrupted:
            return start(thread)
        interrupted.append(thread)
        if is_begun:
            start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted_start)
    loader = DataLoader(
        list(range(6)), batch_size=None, num_workers=1, main_prefetch=2, persistent_workers=persistent
    )
    iterator = iter(loader)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert list(iterator) == list(range(6))
    assert list(loader) == list(range(6))
    del iterator, loader
    for thread in interrupted:
        if is_begun:
            thread.join(10)
            assert not thread.is_alive()


def test_a_busy_thread_ends_though_its_batches_are_given_up_again():
    """An iterator's end gives up what is ahead more than once. The thread's end stays for it to find."""
    is_unpacking, may_go_on = threading.Event(), threading.Event()

    class SlowArrival:
        def unpack(self):
            is_unpacking.set()
            may_go_on.wait(30)

    decoder = decoding.Decoding(1)
    decoder._patience = 0.01
    decoder.prepare(SlowArrival())
    (thread,) = threads()
    assert is_unpacking.wait(30)
    decoder.close()
    decoder.abandon()
    decoder.close()
    assert thread.is_alive()
    may_go_on.set()
    thread.join(30)
    assert not thread.is_alive()


LIVE_AT_EXIT = """
import sys
from programs import client
from ringloader import DataLoader
iterator = iter(DataLoader(list(range(50)), batch_size=None, num_workers=1, main_prefetch=3))
next(iterator)
# What lives to the very end, when modules are gone.
sys.keep = iterator
cycle = [iterator]
cycle.append(cycle)
print("end")
"""


def test_a_live_iterator_at_exit_says_nothing():
    done = client.run(
        ["-c", LIVE_AT_EXIT], timeout=150, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


@pytest.mark.parametrize("error", [MemoryError, SystemError("<method 'get'> returned NULL without an error")])
def test_the_thread_goes_on_whatever_its_queue_raises(error):
    """A caller would wait for a batch that no thread decodes."""

    class Batch:
        def decode(self):
            done.append(self)

    class Tasks:
        def get(self):
            found = left.pop(0)
            if found is error:
                raise error
            return found

    done, batch = [], Batch()
    left = [error, batch, None]
    decoding._decode_all(Tasks())
    assert (done, left) == ([batch], [])
