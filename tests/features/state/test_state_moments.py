"""States that are asked for, and interrupts that come, while ``next`` or ``iter`` runs."""

import contextlib
import itertools
import os
import signal
import sys
import threading
import time

import pytest
from torch.utils.data import Dataset, IterableDataset, Sampler

from features.next_epoch.prefetch_epochs_parts import next_epoch_of
from ringloader import StatefulDataLoader

pytestmark = pytest.mark.rings_only

N = 24
SIZE = 3


class Numbers(Dataset):
    """Calls a function in the midst of a batch."""

    def __init__(self, call=None):
        self.call = call

    def __len__(self):
        return N

    def __getitem__(self, index):
        if self.call is not None and index % SIZE == 1:
            self.call()
        return int(index)


class Stateful(Numbers):
    """Counts the samples that it gave."""

    given = 0

    def __getitem__(self, index):
        self.given += 1
        return super().__getitem__(index)

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


class Stream(IterableDataset):
    def __init__(self, call=None):
        self.call = call

    def __iter__(self):
        for index in range(N):
            if self.call is not None and index % SIZE == 1:
                self.call()
            yield index


class StatefulStream(Stream):
    at = 0

    def __iter__(self):
        while self.at < N:
            self.at += 1
            if self.call is not None and self.at % SIZE == 2:
                self.call()
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Order(Sampler):
    """Has a state."""

    at = 0

    def __len__(self):
        return N

    def __iter__(self):
        while self.at < N:
            self.at += 1
            yield self.at - 1
        self.at = 0

    state_dict, load_state_dict = StatefulStream.state_dict, StatefulStream.load_state_dict


KINDS = {
    "map": lambda call: (Numbers(call), {}),
    "map with a state": lambda call: (Stateful(call), {}),
    "stream": lambda call: (Stream(call), {}),
    "stream with a state": lambda call: (StatefulStream(call), {}),
    "sampler with a state": lambda call: (Numbers(call), {"sampler": Order()}),
}
WAYS = {
    "none": {},
    "processes": {"num_workers": 2},
    "threads": {"num_workers": 1, "worker_method": "thread"},
}


def made(kind, call=None, **options):
    dataset, given = KINDS[kind](call)
    return StatefulDataLoader(dataset, batch_size=SIZE, collate_fn=list, **given, **options)


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


def rest_of(kind, state, **options):
    loader = made(kind, **options)
    loader.load_state_dict(state)
    return flat(loader)


@pytest.mark.parametrize("kind", KINDS)
def test_in_the_dataset_while_it_makes_a_batch(kind):
    loader, returned, asked = None, [], []

    def ask():
        asked.append((len(returned), loader.state_dict(), loader.fingerprint()))

    loader = made(kind, ask)
    sums = [None if "stream" in kind else 0]
    for batch in loader:
        returned += batch
        sums.append(loader.fingerprint())
    assert sums == [sums[0]] * len(sums) == [None] * len(sums) if "stream" in kind else len(set(sums)) == 9
    assert len(asked) == len(returned) // SIZE == N // SIZE
    for many, state, fingerprint in asked:
        assert fingerprint == sums[many // SIZE]
        if kind == "map with a state":
            # In the midst of a batch, as it is then.
            assert state["workers"]["parts"][0]["dataset"] == {"given": many + 2}
        assert returned[:many] + rest_of(kind, state) == returned


@contextlib.contextmanager
def handled(signum, handler):
    """Has ``handler`` called for a signal."""
    before = signal.signal(signum, handler)
    try:
        yield
    finally:
        signal.signal(signum, before)


@contextlib.contextmanager
def sent(signum, seconds, times=1 << 30):
    """Sends the process a signal again and again, while it does what it does."""
    is_over = threading.Event()

    def send():
        for _ in range(times):
            if is_over.wait(seconds):
                return
            os.kill(os.getpid(), signum)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_in_the_handler_of_a_signal_wherever_it_comes(kind, way):
    """As a cluster's notice does, whose handler saves and ends the program."""
    whole = flat(made(kind, **WAYS[way]))
    loader, returned, asked = made(kind, **WAYS[way]), [], []

    def ask(*_):
        asked.append((len(returned), loader.state_dict()))

    with handled(signal.SIGTERM, ask), sent(signal.SIGTERM, 0.003):
        while len(asked) < 15:
            returned.clear()
            for batch in loader:
                returned += batch
            assert returned == whole
    distinct = {repr(state): (many, state) for many, state in asked}
    for many, state in distinct.values():
        rest = rest_of(kind, state, **WAYS[way])
        if state["_iterator_finished"]:
            assert rest == whole
        else:
            # The handler may run between the return of `next` and the note of the test.
            assert many <= SIZE * state["_num_yielded"] <= many + SIZE
            assert rest == whole[SIZE * state["_num_yielded"] :]


class Interrupting(Numbers):
    """Interrupts the program, as Ctrl-C does, at a sample."""

    at = None

    def __getitem__(self, index):
        if index == self.at:
            self.at = None
            signal.raise_signal(signal.SIGINT)
        return super().__getitem__(index)


def test_an_interrupt_in_the_dataset_changes_no_state():
    loader = StatefulDataLoader(Interrupting(), batch_size=SIZE, collate_fn=list)
    loader.dataset.at = 7
    iterator, returned = iter(loader), []
    with pytest.raises(KeyboardInterrupt):
        for batch in iterator:
            returned += batch
    state = loader.state_dict()
    assert returned == list(range(6))
    assert returned + rest_of("map", state) == list(range(N))
    # The batch of that call is lost to a program that goes on, and no other one.
    assert returned + flat(iterator) == [*range(6), *range(9, N)]


class Slow(Numbers):
    def __getitem__(self, index):
        time.sleep(0.002)
        return super().__getitem__(index)


@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
def test_an_interrupt_of_a_call_that_waits_changes_no_state(method):
    """The program saves where it catches the interrupt, or goes on."""

    def made():
        return StatefulDataLoader(
            Slow(), batch_size=SIZE, collate_fn=list, num_workers=1, worker_method=method
        )

    # No other code runs in the calls, so the interrupt comes in one.
    loader, returned, interrupts = made(), [], 0
    iterator = iter(loader)
    with handled(signal.SIGINT, signal.default_int_handler), sent(signal.SIGINT, 0.02, times=3):
        while True:
            try:
                before = len(returned)
                returned += next(iterator)
            except KeyboardInterrupt:
                interrupts += 1
                state, many = loader.state_dict(), before
            except StopIteration:
                break
    assert interrupts
    assert len(returned) == len(set(returned)) >= N - SIZE * interrupts
    if len(returned) == N:
        assert SIZE * state["_num_yielded"] == many
    again = made()
    again.load_state_dict(state)
    assert flat(again) == list(range(SIZE * state["_num_yielded"], N))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_a_step_is_saved_where_it_is_caught(kind, way):
    """As a trainer's checkpoint on an exception does."""
    whole = flat(made(kind, **WAYS[way]))
    for error in (ValueError, KeyboardInterrupt, SystemExit):
        loader, returned = made(kind, **WAYS[way]), []
        with pytest.raises(error):
            try:
                for batch in loader:
                    returned += batch
                    if len(returned) == 4 * SIZE:
                        raise error
            except BaseException:
                state = loader.state_dict()
                raise
        assert returned + rest_of(kind, state, **WAYS[way]) == whole


class AskingOrder(Sampler):
    """Calls a function where its epoch begins, which is in ``iter`` of the loader."""

    def __init__(self, call):
        self.call = call

    def __len__(self):
        return N

    def __iter__(self):
        self.call()
        return iter(range(N))


@pytest.mark.parametrize("way", WAYS)
def test_while_iter_runs_the_state_is_that_of_the_epoch_before(way):
    loader, asked = None, []

    def ask():
        asked.append((loader.state_dict(), loader.fingerprint()))

    def made(call=lambda: None):
        order = AskingOrder(call)
        return StatefulDataLoader(Numbers(), None, sampler=order, seeding="sample", seed=3, **WAYS[way])

    loader = made(ask)
    for epoch in range(3):
        before = loader.state_dict(), loader.fingerprint()
        assert before[0]["number"] + before[0]["_iterator_finished"] == epoch
        asked.clear()
        assert list(loader) == list(range(N))
        # With workers torch asks the sampler twice.
        assert asked and all(found == before for found in asked)
    again = made()
    again.load_state_dict(asked[0][0])
    assert list(again) == list(range(N))
    loader.load_state_dict(asked[0][0])
    asked.clear()
    list(loader)
    assert asked[0][0] == before[0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_loaded", [False, True])
def test_an_interrupted_iter_is_no_epoch(is_loaded, way):
    """The state is the one before it, and the next ``iter`` begins anew."""
    armed = []

    def interrupt():
        if armed:
            raise armed.pop()

    loader = StatefulDataLoader(Numbers(), None, sampler=AskingOrder(interrupt), **WAYS[way])
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    state = loader.state_dict()
    assert state["_num_yielded"] == 2
    if is_loaded:
        loader.load_state_dict(state)
    armed.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        iter(loader)
    assert loader.state_dict() == state
    assert list(loader) == list(range(2 if is_loaded else 0, N))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_in_another_thread(kind, way):
    whole = flat(made(kind, **WAYS[way]))
    loader, asked, errors = made(kind, **WAYS[way]), [], []
    is_over = threading.Event()

    def ask():
        try:
            while not is_over.is_set():
                asked.append(loader.state_dict())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        while len(asked) < 25 and not errors:
            assert flat(loader) == whole
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(before)
    assert errors == []
    for state in list({repr(state): state for state in asked}.values())[:25]:
        rest = rest_of(kind, state, **WAYS[way])
        many = N if state["_iterator_finished"] else SIZE * state["_num_yielded"]
        # After the end of an epoch, the next one.
        assert rest == (whole if state["_iterator_finished"] else whole[many:])


@pytest.mark.parametrize("way", WAYS)
def test_while_another_thread_begins_the_first_epoch(way):
    """The sampler has moved on when it says its state."""
    armed, begun = [], []

    class Moving(Order):
        def state_dict(self):
            if armed:
                armed.pop()
                begun.append(iter(loader))
                next(begun[0])
                next(begun[0])
            return super().state_dict()

    def made():
        return StatefulDataLoader(Numbers(), SIZE, sampler=Moving(), collate_fn=list, **WAYS[way])

    loader = made()
    armed.append(True)
    state = loader.state_dict()
    assert state["_num_yielded"] == 2
    again = made()
    again.load_state_dict(state)
    assert flat(again) == list(range(2 * SIZE, N))
    loader.shutdown()


def test_while_the_next_epoch_is_begun_early():
    loader = StatefulDataLoader(
        Slow(),
        batch_size=SIZE,
        collate_fn=list,
        num_workers=1,
        persistent_workers=True,
        prefetch_epochs=True,
    )
    returned, asked = [], []

    def ask(*_):
        asked.append((len(returned), loader.state_dict()["_num_yielded"]))

    iterator = iter(loader)
    with handled(signal.SIGALRM, ask), sent(signal.SIGALRM, 0.001):
        for batch in iterator:
            returned += batch
    assert next_epoch_of(iterator)._begun is not None, "no epoch was begun early"
    assert asked and all(many <= SIZE * batches <= many + SIZE for many, batches in asked)
    loader.shutdown()
