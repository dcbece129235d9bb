"""A state that is asked for, or an interrupt that comes, at any moment of ``next``."""

import contextlib
import dis
import functools
import itertools
import signal
import sys
import threading

import pytest
from torch.utils.data import Dataset, IterableDataset, Sampler

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


@functools.cache
def moments(code):
    """Returns the offsets in a function before which Python may run signal handlers."""
    found, before = set(), ""
    for instruction in dis.get_instructions(code):
        if before.startswith(("CALL", "RESUME", "JUMP_BACKWARD")):
            found.add(instruction.offset)
        before = instruction.opname
    return found


@contextlib.contextmanager
def at_each_moment(call, is_traced):
    """Calls ``call`` whenever a signal handler might run in a function of an ``is_traced`` file."""

    def trace(frame, event, _argument):
        if not is_traced(frame.f_code.co_filename):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti in moments(frame.f_code):
            sys.settrace(None)
            call()
            sys.settrace(trace)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def is_of_loaders(file):
    return "/ringloader/" in file or "/torch/utils/data/" in file


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_in_a_signal_handler_at_each_moment_of_next(kind, way):
    """As a preemption handler would, which saves and ends the program."""
    loader, returned, asked = made(kind, **WAYS[way]), [], []
    iterator = iter(loader)
    whole = flat(made(kind, **WAYS[way]))

    def ask():
        asked.append((len(returned), loader.state_dict()))

    for number in range(len(whole) // SIZE):
        if number in (0, 4):
            with at_each_moment(ask, is_of_loaders):
                batch = next(iterator)
        else:
            batch = next(iterator)
        returned.extend(batch)
    assert returned == whole
    assert len(asked) >= 2
    distinct = {repr(state): (many, state) for many, state in asked}
    assert len(distinct) < 20
    for many, state in distinct.values():
        if kind == "map with a state" and way == "none":
            # In the midst of a batch, as it is then.
            state["workers"] = None
        assert whole[:many] + rest_of(kind, state, **WAYS[way]) == whole


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_at_each_moment_of_next_loses_and_repeats_nothing(kind, way):
    """At one moment of the third call after another."""
    options = WAYS[way]
    whole = flat(made(kind, **options))
    # Each loader with processes takes its time to start.
    for place in itertools.count(0, 3 if way == "processes" else 1):
        loader = made(kind, **options)
        iterator, left = iter(loader), itertools.count(place, -1)

        def interrupt(left=left):
            if next(left) == 0:
                raise Interrupted

        returned = next(iterator) + next(iterator)
        try:
            with at_each_moment(interrupt, is_of_loaders):
                returned += next(iterator)
        except Interrupted:
            state, is_over = loader.state_dict(), False
        else:
            state, is_over = loader.state_dict(), True
        loader.shutdown()
        assert returned + rest_of(kind, state, **options) == whole, place
        if is_over:
            break
    assert place > 1


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


def test_a_real_signal():
    """The handler of an alarm saves the state, as a cluster's notice does."""
    whole, saved, returned = list(range(N)), [], []
    loader = made("map", lambda: signal.raise_signal(signal.SIGALRM))
    before = signal.signal(signal.SIGALRM, lambda *_: saved.append((len(returned), loader.state_dict())))
    try:
        for batch in loader:
            returned += batch
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(saved) == N // SIZE
    for many, state in saved:
        assert whole[:many] + rest_of("map", state) == whole


class Armed(StatefulStream):
    """Sends a signal while it gives its state, and counts its epochs."""

    epoch = 0
    is_armed = False

    def __iter__(self):
        yield from (100 * self.epoch + index for index in super().__iter__())
        self.epoch += 1

    def state_dict(self):
        if self.is_armed:
            self.is_armed = False
            signal.raise_signal(signal.SIGALRM)
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.at, self.epoch = state["at"], state["epoch"]


def test_a_signal_while_the_dataset_gives_its_last_state():
    """In the call of ``next`` that finds the end."""
    loader = StatefulDataLoader(Armed(), batch_size=SIZE, collate_fn=list)
    saved = []
    before = signal.signal(signal.SIGALRM, lambda *_: saved.append(loader.state_dict()))
    try:
        iterator = iter(loader)
        assert flat(next(iterator) for _ in range(N // SIZE)) == list(range(N))
        loader.dataset.is_armed = True
        assert next(iterator, None) is None
    finally:
        signal.signal(signal.SIGALRM, before)
    again = StatefulDataLoader(Armed(), batch_size=SIZE, collate_fn=list)
    again.load_state_dict(saved[0])
    epochs = [flat(again) for _ in range(2)]
    assert list(range(N)) not in epochs and [100 + index for index in range(N)] in epochs


def test_while_the_next_epoch_is_begun_early():
    loader = StatefulDataLoader(
        list(range(N)),
        batch_size=SIZE,
        collate_fn=list,
        num_workers=1,
        persistent_workers=True,
        prefetch_epochs=True,
    )
    returned, asked = [], []

    def ask():
        asked.append((len(returned), loader.state_dict()))

    iterator = iter(loader)
    for _ in range(N // SIZE):
        with at_each_moment(ask, is_of_loaders):
            batch = next(iterator)
        returned += batch
    assert iterator._next_epoch._begun is not None, "no epoch was begun early"
    assert {(many, state["_num_yielded"]) for many, state in asked} == {
        (SIZE * batches, batches) for batches in range(N // SIZE)
    }
    loader.shutdown()
