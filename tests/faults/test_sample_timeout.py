"""``sample_timeout``: samples that hang are errors of their own, and the epoch goes on."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import random
import signal
import threading
import time
import types
from pathlib import Path

import pytest
import torch
import torch.utils.data

import ringloader
from faults.proc import Snapshot
from ringloader import DataLoader, Retry
from ringloader._features import shared_words
from ringloader._features.losses import samples

pytestmark = pytest.mark.rings_only

LIMIT = 0.5
FOREVER = 1000


class Hangs(torch.utils.data.Dataset):
    """Numbers; some take for ever, as long as the file is not there."""

    def __init__(self, which=(5,), n=12, unless=None):
        self.which = set(which)
        self.n = n
        self.unless = unless

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        if index in self.which and not (self.unless and self.unless.exists()):
            if self.unless:
                self.unless.touch()
            self.hang()
        return index

    def hang(self):
        time.sleep(FOREVER)


class HangsInNativeCode(Hangs):
    def hang(self):
        # Keeps the interpreter lock.
        ctypes.PyDLL(None).sleep(FOREVER)


class HangsWhole(Hangs):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def results(loader):
    """The batches of an epoch, and the last line of each error in its place."""
    found, iterator = [], iter(loader)
    while True:
        try:
            found.append(next(iterator).tolist())
        except TimeoutError as error:
            found.append(str(error).strip().splitlines()[-1].partition(";")[0])
        except StopIteration:
            return found


def error(what):
    return f"TimeoutError: {what} took longer than sample_timeout={LIMIT} s"


def late(index):
    return error(f"the sample at index {index}")


def made(dataset, **options):
    options = {"batch_size": 4, "num_workers": 2, "sample_timeout": LIMIT, **options}
    return DataLoader(dataset, **options)


@pytest.fixture
def snapshot():
    return Snapshot.take()


@pytest.mark.parametrize("dataset", [Hangs(), HangsInNativeCode()])
def test_it_is_an_error_in_its_turn_and_the_epoch_goes_on(dataset, snapshot, caplog):
    with caplog.at_level(logging.WARNING, "ringloader"):
        loader = made(dataset)
        assert results(loader) == [[0, 1, 2, 3], late(5), [8, 9, 10, 11]]
    logged = (
        f"the sample at index 5 took longer than sample_timeout={LIMIT} s in batch 1 of the epoch: dataset"
    )
    assert logged in caplog.text
    # Each epoch anew, also the next.
    assert results(loader) == [[0, 1, 2, 3], late(5), [8, 9, 10, 11]]
    del loader
    snapshot.assert_nothing_left()


@pytest.mark.parametrize(
    ("call", "index", "batches", "words"),
    [
        (1, [4, 5], True, "the sample at index 5"),
        (1, ("a", "b"), True, "the sample at index 'b'"),
        (0, "ab", False, "the sample at index 'ab'"),
        (samples._SEVERAL, [4, 5], True, "the samples at indices [4, 5]"),
        (samples._COLLATE, [4, 5], True, "collate_fn"),
        # What the worker wrote is no place of the batch.
        (2, [4, 5], True, "a sample"),
        (-9, [4, 5], True, "a sample"),
        (0, None, True, "a sample"),
    ],
)
def test_the_log_names_what_took_too_long(call, index, batches, words):
    notes = samples.SampleNotes(1, LIMIT, crashes=False, batches=batches)
    notes._words.set(0, samples._EXCEEDED, 1)
    notes._words.set(0, samples._CALL, call)
    assert notes.loss(0, (0, 0, index), -9) == (words, True)
    assert notes.loss(0, (0, 0, index), -9) == (None, False)
    notes.close()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_start_methods(method):
    loader = made(Hangs(), multiprocessing_context=method, on_error="skip")
    assert results(loader) == [[0, 1, 2, 3], [4, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("dataset", [Hangs([4, 5]), HangsWhole([4, 5])])
def test_the_rest_of_the_batch_is_made_again(dataset):
    loader = made(dataset, on_error="skip")
    assert results(loader) == [[0, 1, 2, 3], [6, 7], [8, 9, 10, 11]]
    assert [bad.index for bad in loader.errors if bad.handling == "skipped"] == [4, 5]
    assert all(isinstance(bad.error, TimeoutError) for bad in loader.errors)


def instead(index, error):
    assert isinstance(error, TimeoutError)
    return -index


def test_a_function_decides():
    assert results(made(Hangs(), on_error=instead)) == [[0, 1, 2, 3], [4, -5, 6, 7], [8, 9, 10, 11]]


def test_a_sample_that_hangs_once_is_asked_for_again(tmp_path):
    loader = made(Hangs(unless=tmp_path / "mark"), on_error=Retry(1, backoff=0))
    assert results(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert [(bad.index, bad.handling) for bad in loader.errors] == [(5, "retried")]


def test_a_sample_that_hangs_each_time_ends_the_retries():
    loader = made(Hangs(), on_error=Retry(1, backoff=0, then="skip"))
    assert results(loader) == [[0, 1, 2, 3], [4, 6, 7], [8, 9, 10, 11]]


def test_max_errors_counts_them():
    loader = made(Hangs([1, 5]), on_error="skip", max_errors=1)
    assert results(loader) == [[0, 2, 3], late(5), [8, 9, 10, 11]]


def test_a_batch_that_has_an_index_twice():
    loader = DataLoader(Hangs([1]), batch_sampler=[[1, 0, 1, 2], [0]], num_workers=1, sample_timeout=LIMIT)
    assert results(loader) == [late(1), [0]]
    loader = DataLoader(
        Hangs([1]), batch_sampler=[[1, 0, 1, 2], [0]], num_workers=1, sample_timeout=LIMIT, on_error="skip"
    )
    assert results(loader) == [[0, 2], [0]]


def hangs(samples):
    if 5 in samples:
        time.sleep(FOREVER)
    return torch.tensor(samples)


def test_collate_fn_counts_too():
    loader = made(list(range(12)), collate_fn=hangs)
    assert results(loader) == [[0, 1, 2, 3], error("collate_fn"), [8, 9, 10, 11]]
    assert results(made(list(range(12)), collate_fn=hangs, on_error="skip")) == [[0, 1, 2, 3], [8, 9, 10, 11]]


def test_single_samples():
    loader = made(Hangs([1], n=3), batch_size=None)
    assert results(DataLoader(Hangs([1], n=3), batch_size=1, num_workers=1, sample_timeout=LIMIT)) == [
        [0],
        late(1),
        [2],
    ]
    iterator = iter(loader)
    assert next(iterator) == 0
    with pytest.raises(TimeoutError):
        next(iterator)
    assert list(iterator) == [2]


def test_workers_that_persist_and_epochs_that_are_given_up(snapshot):
    loader = made(Hangs(), persistent_workers=True)
    for _ in range(2):
        iterator = iter(loader)
        assert next(iterator).tolist() == [0, 1, 2, 3]
    # The sample that hangs is in a worker's hands, or has ended it, when the next epoch begins.
    time.sleep(2 * LIMIT)
    assert results(loader) == [[0, 1, 2, 3], late(5), [8, 9, 10, 11]]
    del loader, iterator
    snapshot.assert_nothing_left()


def test_processes_of_a_pool(snapshot):
    with ringloader.WorkerPool(2) as pool:
        loader = made(Hangs(), worker_pool=pool)
        for _ in range(2):
            assert results(loader) == [[0, 1, 2, 3], late(5), [8, 9, 10, 11]]
        # A process that has left the iterator has no limit any more.
        other = DataLoader(Sleeps(3 * LIMIT), num_workers=2, worker_pool=pool)
        assert len(list(other)) == 2
        del loader, other
    snapshot.assert_nothing_left()


class Sleeps(torch.utils.data.Dataset):
    def __init__(self, seconds, n=2):
        self.seconds = seconds
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return index


def test_many_samples_that_are_each_in_time():
    loader = made(Sleeps(LIMIT / 4, n=16), batch_size=8)
    assert [len(batch) for batch in loader] == [8, 8]


def test_no_limit_without_workers_and_in_the_time_of_the_caller():
    loader = made(Sleeps(2 * LIMIT), num_workers=0, batch_size=1)
    assert len(list(loader)) == 2
    for _ in made(list(range(8))):
        time.sleep(1.5 * LIMIT)


def test_a_process_that_is_stopped_has_time():
    iterator = iter(made(Sleeps(LIMIT / 2), batch_size=1, num_workers=1))
    worker = iterator._workers[0]
    time.sleep(LIMIT / 4)
    os.kill(worker.pid, signal.SIGSTOP)
    time.sleep(3 * LIMIT)
    os.kill(worker.pid, signal.SIGCONT)
    assert [batch.tolist() for batch in iterator] == [[0], [1]]
    assert iterator._workers[0] is worker


class Crashes(Hangs):
    def hang(self):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_crashes_is_torchs_error():
    with pytest.raises(RuntimeError, match="exited unexpectedly") as found:
        list(made(Crashes()))
    assert found.value.__notes__ == [
        "it was in batch 1 of the epoch: dataset indices [4, 5, 6, 7]",
        "it died in the sample at index 5",
    ]


def test_restarts_of_crashed_workers_are_counted_apart(tmp_path):
    class Both(Crashes):
        def __getitem__(self, index):
            if index == 9:
                time.sleep(FOREVER)
            return super().__getitem__(index)

    loader = made(Both(unless=tmp_path / "mark"), restart_workers=1, on_error="skip", num_workers=1)
    assert results(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 10, 11]]


class Draws(Hangs):
    def __getitem__(self, index):
        super().__getitem__(index)
        return random.random(), torch.rand(()).item()


def test_with_keys_of_samples_the_rest_draws_the_same():
    options = {"seeding": "sample", "seed": 3, "collate_fn": list}
    expected = [list(batch) for batch in made(Draws([]), num_workers=0, **options)]
    del expected[1][1]
    assert [list(batch) for batch in made(Draws(), on_error="skip", **options)] == expected


def test_a_state_that_is_taken_on_the_way():
    loader = ringloader.StatefulDataLoader(
        Hangs([2, 9]), 4, num_workers=2, sample_timeout=LIMIT, on_error="skip"
    )
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1, 3]
    state = loader.state_dict()
    rest = [batch.tolist() for batch in iterator]
    assert rest == [[4, 5, 6, 7], [8, 10, 11]]
    again = ringloader.StatefulDataLoader(
        Hangs([2, 9]), 4, num_workers=2, sample_timeout=LIMIT, on_error="skip"
    )
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == rest


@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        (Hangs(), {"worker_method": "thread"}, "a thread cannot be killed"),
        (ringloader.Dispatch(range(3)), {}, "a Dispatch as dataset"),
        (ringloader.Sharded(range(3)), {}, "an IterableDataset do not go together"),
        (Hangs(), {"sample_timeout": 0}, "must be positive|more than 0|must be"),
    ],
)
def test_what_it_does_not_go_with(dataset, options, words):
    with pytest.raises(ValueError, match=words):
        made(dataset, **options)


def test_a_fork_in_the_dataset_has_no_limit():
    """A child of the worker's inherits no thread, and its exit does not wait for one."""

    class Forks(Sleeps):
        def __getitem__(self, index):
            pid = os.fork()
            if not pid:
                with contextlib.suppress(BaseException):
                    time.sleep(0.1)
                os._exit(7)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert [batch.tolist() for batch in made(Forks(0), batch_size=1)] == [[7], [7]]


def test_no_thread_without_the_option():
    class Threads(Sleeps):
        def __getitem__(self, index):
            names = Path("/proc/self/task").glob("*/comm")
            return sum(name.read_text().startswith("ringloader-lim") for name in names)

    assert torch.cat(list(DataLoader(Threads(0), num_workers=1))).tolist() == [0, 0]
    assert torch.cat(list(made(Threads(0), num_workers=1))).tolist() == [1, 1]
    assert threading.active_count() >= 1


def test_nothing_is_left_where_its_memory_cannot_be_had(monkeypatch, snapshot):
    def refuse(_name):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    refusing = types.SimpleNamespace(OwnFd=types.SimpleNamespace(memory=refuse))
    monkeypatch.setattr(shared_words, "_native", refusing)
    with pytest.raises(OSError, match="Too many open files") as caught:
        iter(made(Hangs()))
    # The frames of the error, which lives, have all that was made before.
    snapshot.assert_nothing_left()
    assert caught.value.errno == errno.EMFILE


def test_a_limit_that_is_never_reached():
    loader = made(Hangs(()), sample_timeout=float("inf"))
    assert results(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize(("written", "many"), [(1 << 40, samples._MOST), (-(1 << 40), 1), (-3, 1), (2, 3)])
def test_a_worker_may_write_anything_into_its_record(written, many):
    """The count is a worker's word: the main process reads and writes nothing outside of the record."""
    notes = samples.SampleNotes(2, LIMIT, crashes=False, batches=True)
    words, batch = notes._words, (0, 0, list(range(8)))
    # The batch is known, with no bad call yet.
    notes.loss(0, batch, -9)
    other = words.words[words.size :].tobytes()
    words.set(0, samples._EXCEEDED, 1)
    words.set(0, samples._CALL, 7)
    words.set(0, samples._MANY, written)
    # One more than may be known is a crash: restart_workers counts it.
    assert notes.loss(0, batch, -9) == ("the sample at index 7", many < samples._MOST)
    assert words.get(0, samples._MANY) == many
    assert words.words[words.size :].tobytes() == other
    notes.close()


class SleepsAt(Sleeps):
    def __getitem__(self, index):
        super().__getitem__(index)
        return int(index)


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda dataset: torch.utils.data.Subset(dataset, range(8)),
        lambda dataset: torch.utils.data.random_split(dataset, [8, 0])[0],
        lambda dataset: torch.utils.data.Subset(torch.utils.data.Subset(dataset, range(8)), range(8)),
        lambda dataset: torch.utils.data.StackDataset(dataset),
        ringloader.CachedDataset,
    ],
    ids=["Subset", "random_split", "nested", "StackDataset", "CachedDataset"],
)
def test_the_limit_is_a_samples_where_the_dataset_asks_for_one_after_another(wrapped):
    found = list(made(wrapped(SleepsAt(LIMIT / 4, n=8)), batch_size=8, num_workers=1))
    # `random_split` draws which sample comes first.
    assert sorted(torch.cat([*found[0]] if isinstance(found[0], list) else found).tolist()) == list(range(8))


class Alike:
    """An index whose ``repr`` does not tell it from others."""

    def __init__(self, number):
        self.number = number

    def __repr__(self):
        return "Alike()"

    def __index__(self):
        return self.number


@pytest.mark.parametrize(
    "batch",
    [
        ["0x0", "0x1", "0x2", "0x3"],
        [Alike(number) for number in range(4)],
        [2, 0, 2, 1],
        [torch.tensor(float(number)) for number in range(4)],
    ],
    ids=["text", "objects", "twice", "tensors"],
)
@pytest.mark.parametrize("options", [{}, {"worker_task": "sample"}], ids=["batch", "sample"])
def test_indices_that_are_alike_are_other_samples(batch, options):
    loader = DataLoader(
        ByNumber([2]), batch_sampler=[batch], sample_timeout=LIMIT, num_workers=2, on_error="skip", **options
    )
    numbers = [number(index) for index in batch]
    assert results(loader) == [[one for one in numbers if one != 2]]
    assert len(loader.errors) == numbers.count(2)


def number(index):
    return int(index, 16) if isinstance(index, str) else int(index)


class ByNumber(Hangs):
    def __getitem__(self, index):
        return super().__getitem__(number(index))
