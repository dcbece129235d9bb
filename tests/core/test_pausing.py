"""``limit``, ``pause`` and ``resume``: DataLoader2's semantics, on every path, for several epochs."""

import gc
import sys
import threading
import weakref

import pytest
import torch
from torch.utils.data import IterableDataset, Sampler, get_worker_info

import ringloader
from ringloader import DataLoader
from ringloader._core import pausing
from ringloader._torch import select_path

pytestmark = pytest.mark.rings_only

PATHS = ["native", "ahead", "torch", "without workers"]


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    """Returns the path. The number of workers follows from it."""
    if request.param == "torch":
        reason = select_path.Reason("the test wants it")
        monkeypatch.setattr(select_path, "reason_for_torch", lambda *_: reason)
    return request.param


def made(path, dataset, **options):
    workers = 0 if path == "without workers" else 2
    if workers == 0:
        options.pop("persistent_workers", None)
    if path == "ahead":
        options["main_prefetch"] = 3
    return DataLoader(dataset, batch_size=None, num_workers=workers, **options)


def begun(path, loader):
    iterator = iter(loader)
    expected = {"without workers": "single-process", "ahead": "native"}.get(path, path)
    assert ringloader.report(iterator).path == expected
    return iterator


def numbers(count):
    return [torch.tensor(number) for number in range(count)]


def taken(iterator):
    return [int(batch) for batch in iterator]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_limit_holds_after_each_resume_until_the_epoch_ends(path, persistent):
    loader = made(path, numbers(10), persistent_workers=persistent)
    for _ in range(3):
        iterator = begun(path, loader)
        assert int(next(iterator)) == 0
        iterator.limit(4)
        assert taken(iterator) == [1, 2, 3, 4]
        assert iterator.is_paused()
        assert taken(iterator) == []
        iterator.resume()
        assert not iterator.is_paused()
        assert taken(iterator) == [5, 6, 7, 8]
        iterator.resume()
        assert taken(iterator) == [9]
        assert not iterator.is_paused(), "the epoch has ended"
        assert taken(iterator) == []


@pytest.mark.parametrize("persistent", [False, True])
def test_an_epoch_that_was_limited_and_abandoned_limits_no_other(path, persistent):
    loader = made(path, numbers(8), persistent_workers=persistent)
    for _ in range(2):
        iterator = begun(path, loader)
        iterator.limit(3)
        assert taken(iterator) == [0, 1, 2]
    iterator = None
    assert taken(loader) == list(range(8))


def test_no_limit_any_more(path):
    iterator = begun(path, made(path, numbers(9)))
    take_next = iterator._take_next
    iterator.limit(2)
    assert taken(iterator) == [0, 1]
    iterator.limit(None)
    assert taken(iterator) == [], "it is paused until it is resumed"
    iterator.resume()
    assert iterator._take_next is take_next, "nothing stands in the way of a batch"
    assert taken(iterator) == [2, 3, 4, 5, 6, 7, 8]


def test_a_limit_begins_with_its_call(path):
    iterator = begun(path, made(path, numbers(9)))
    iterator.limit(3)
    next(iterator)
    iterator.limit(4)
    assert taken(iterator) == [1, 2, 3, 4]
    iterator.limit(1)
    assert taken(iterator) == []
    iterator.resume()
    assert taken(iterator) == [5]


def test_a_pause_in_a_limit_begins_it_anew(path):
    iterator = begun(path, made(path, numbers(9)))
    iterator.limit(3)
    next(iterator)
    iterator.pause()
    assert taken(iterator) == []
    iterator.resume()
    assert taken(iterator) == [1, 2, 3]


def test_pause_and_resume(path):
    iterator = begun(path, made(path, numbers(6)))
    assert not iterator.is_paused()
    iterator.resume()
    for number in range(6):
        iterator.pause()
        iterator.pause()
        assert iterator.is_paused() and next(iterator, None) is None
        iterator.resume()
        assert int(next(iterator)) == number
    assert taken(iterator) == []


class Read(Sampler):
    """Says how many indices were read of it."""

    def __init__(self, count):
        self.count, self.read = count, 0

    def __iter__(self):
        for number in range(self.count):
            self.read += 1
            yield number

    def __len__(self):
        return self.count


def test_the_sampler_is_read_at_torchs_moments(path):
    sampler = Read(40)
    iterator = begun(path, made(path, numbers(40), sampler=sampler))
    ahead = 0 if path == "without workers" else 4
    iterator.limit(5)
    assert len(taken(iterator)) == 5
    assert taken(iterator) == []
    assert sampler.read == 5 + ahead
    iterator.pause()
    iterator.resume()
    assert sampler.read == 5 + ahead


class Parts(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        worker = 0 if info is None else info.id
        return iter(numbers(20)[worker * 10 : worker * 10 + 3 + worker])


def test_iterable_datasets(path):
    loader = made(path, Parts(), persistent_workers=True)
    whole = taken(loader)
    for _ in range(2):
        iterator = begun(path, loader)
        iterator.limit(2)
        got = []
        while True:
            got += taken(iterator)
            if not iterator.is_paused():
                break
            iterator.resume()
        assert got == whole


def test_out_of_order(path):
    iterator = begun(path, made(path, numbers(20), in_order=False))
    iterator.limit(7)
    got = []
    for _ in range(3):
        part = taken(iterator)
        got += part
        assert len(part) == min(7, 20 - len(got) + len(part))
        iterator.resume()
    assert sorted(got) == list(range(20))


class FailsAt(list):
    def __getitem__(self, index):
        if index == 2:
            raise KeyError("two")
        return super().__getitem__(index)


def test_an_error_is_no_batch(path):
    iterator = begun(path, made(path, FailsAt(numbers(9))))
    iterator.limit(3)
    assert [int(next(iterator)), int(next(iterator))] == [0, 1]
    with pytest.raises(KeyError, match="two") as caught:
        next(iterator)
    # In a cycle with it, torch's iterator would wait for its workers.
    caught.value.__traceback__ = None
    assert taken(iterator) == [3]
    assert iterator.is_paused()


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        (0, ValueError, "must be positive, not 0"),
        (-1, ValueError, "not -1"),
        (1.0, TypeError, "not 1.0"),
        (True, TypeError, "not True"),
        ("2", TypeError, "not '2'"),
    ],
)
def test_a_wrong_limit(value, kind, words):
    iterator = iter(DataLoader(numbers(3)))
    with pytest.raises(kind, match=words):
        iterator.limit(value)
    assert len(list(iterator)) == 3


def test_threads_share_a_limit(path):
    if path == "torch":
        pytest.skip("torch's own iterator takes no two threads")
    iterator = begun(path, made(path, numbers(300)))
    if path == "without workers":
        # The sampler of this path is a generator.
        iterator._sampler_iter = iter(range(300))
    iterator.limit(100)
    got = [[] for _ in range(4)]
    threads = [threading.Thread(target=lambda into=into: into.extend(taken(iterator))) for into in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(number for into in got for number in into) == list(range(100))
    iterator.limit(None)
    iterator.resume()
    assert taken(iterator) == list(range(100, 300))


def test_a_limited_iterator_goes_with_its_last_reference(path):
    iterator = begun(path, made(path, numbers(9)))
    iterator.limit(2)
    next(iterator)
    gone = weakref.ref(iterator)
    gc.disable()
    try:
        del iterator
        assert gone() is None, "it is in no cycle"
    finally:
        gc.enable()


def test_batches_that_are_ready_stay_ready():
    loader = DataLoader(numbers(8), batch_size=None, num_workers=1, prefetch_factor=4)
    iterator = iter(loader)
    iterator.limit(1)
    assert taken(iterator) == [0]
    worker = iterator._workers[0]
    for _ in range(1000):
        if iterator._transport.engine.committed() == 4:
            break
        worker.join(0.01)
    assert iterator._transport.engine.committed() == 4, "none is made beyond them while it is paused"
    iterator.resume()
    iterator.limit(None)
    assert taken(iterator) == list(range(1, 8))


def test_a_stream_that_is_longer_than_it_said_still_warns(path):
    class Longer(Parts):
        def __len__(self):
            return 2

    loader = made(path, Longer())
    len(loader)
    iterator = begun(path, loader)
    iterator.limit(1)
    with pytest.warns(UserWarning, match="was reported to be 2"):
        for _ in range(8):
            taken(iterator)
            iterator.resume()


@pytest.mark.parametrize("change", ["limit", "resume"])
def test_a_pause_while_the_stages_are_put_holds(path, change, monkeypatch):
    """A signal handler, or another thread, pauses in the middle of another change of the gate."""
    iterator = begun(path, made(path, numbers(6)))
    iterator.limit(5)
    cls = type(iterator)
    chain, pauses = cls._chain, [True]

    def paused_meanwhile(*args, **kwargs):
        found = chain(*args, **kwargs)
        if pauses:
            pauses.clear()
            iterator.pause()
        return found

    monkeypatch.setattr(cls, "_chain", paused_meanwhile)
    if change == "limit":
        iterator.limit(None)
    else:
        iterator.resume()
        iterator.limit(None)
    assert not pauses
    if not iterator.is_paused():
        iterator.pause()
    assert next(iterator, "paused") == "paused"
    iterator.resume()
    assert taken(iterator) == list(range(6))


def test_pause_and_resume_in_two_threads_raise_nothing(path):
    iterator = begun(path, made(path, numbers(6)))
    errors = []

    def call(method):
        try:
            for _ in range(300):
                method()
        except BaseException as error:
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=call, args=(one,)) for one in (iterator.pause, iterator.resume)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert errors == []
    iterator.pause()
    assert next(iterator, "paused") == "paused"
    iterator.resume()
    assert taken(iterator) == list(range(6))


@pytest.mark.parametrize("change", ["limit", "resume"])
def test_an_end_while_the_gate_is_removed_holds(path, change, monkeypatch):
    """A signal handler calls ``shutdown`` after the gate was looked at and before it goes."""
    iterator = begun(path, made(path, numbers(6)))
    iterator.limit(5)
    look, ends = pausing.raise_if_ended, [True]

    def ended_meanwhile(looked_at):
        look(looked_at)
        if ends:
            ends.clear()
            pausing.end(looked_at)

    monkeypatch.setattr(pausing, "raise_if_ended", ended_meanwhile)
    iterator._gate.limit = None
    if change == "limit":
        iterator.limit(None)
    else:
        iterator.resume()
    assert not ends
    with pytest.raises(RuntimeError, match="was ended by"):
        next(iterator)


def test_an_end_holds_where_another_thread_has_removed_the_gate(path, monkeypatch):
    iterator = begun(path, made(path, numbers(6)))
    put, removals = pausing.Pausing._put_gate, [True]

    def removed_meanwhile(looked_at):
        gate = put(looked_at)
        if removals:
            removals.clear()
            looked_at._remove_gate()
        return gate

    monkeypatch.setattr(pausing.Pausing, "_put_gate", removed_meanwhile)
    pausing.end(iterator)
    assert not removals
    with pytest.raises(RuntimeError, match="was ended by"):
        next(iterator)
