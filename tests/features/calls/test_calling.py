"""``call_workers``: a function in each living worker, between two of its batches."""

import contextlib
import functools
import gc
import os
import pickle
import re
import resource
import signal
import socket
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ringloader import DataLoader
from ringloader._torch import select_path

pytestmark = pytest.mark.rings_only


class Scaled(Dataset):
    def __init__(self, count=12):
        self.count = count
        self.scale = 1

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return index * self.scale


class Streamed(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        # The first worker's part is shorter.
        return iter(range(2 if info.id == 0 else 6))


def set_scale(dataset, scale):
    before, dataset.scale = dataset.scale, scale
    info = get_worker_info()
    return info.id, info.dataset is dataset, before, os.getpid()


def made(dataset=None, workers=2, persistent=True, **options):
    return DataLoader(
        Scaled() if dataset is None else dataset,
        batch_size=None,
        num_workers=workers,
        persistent_workers=persistent,
        **options,
    )


@pytest.mark.parametrize("start", ["fork", "forkserver"])
def test_between_epochs_it_reaches_all_batches_of_the_next(start):
    loader = made(multiprocessing_context=start)
    for scale, before in ((10, 1), (100, 10)):
        list(loader)
        pids = [process.pid for process in loader._iterator._workers]
        answers = loader.call_workers(set_scale, scale)
        assert answers == [(worker, True, before, pids[worker]) for worker in range(2)]
        assert list(loader) == [scale * index for index in range(12)]
    assert loader.dataset.scale == 1, "the main process has another copy"


class RefusedError(Exception):
    """``weakref`` can point to it."""


def refuses(_dataset):
    raise RefusedError


@pytest.mark.parametrize("workers", ["multiprocessing", "thread"])
def test_an_error_that_is_dropped_is_gone(workers):
    loader = made(worker_method=workers)
    list(loader)
    gc.disable()
    try:
        with contextlib.suppress(RefusedError):
            try:
                loader.call_workers(refuses)
            except RefusedError as error:
                gone = weakref.ref(error)
                raise
        assert gone() is None
    finally:
        gc.enable()


def test_in_mid_epoch_it_runs_behind_what_was_asked_for_before():
    loader = made(persistent=False, prefetch_factor=2)
    iterator = iter(loader)
    assert next(iterator) == 0
    # Tasks 0 to 4 were sent: two for each worker, and one when a batch was returned.
    assert [worker for worker, *_ in loader.call_workers(set_scale, 100)] == [0, 1]
    assert list(iterator) == [1, 2, 3, 4, *(100 * index for index in range(5, 12))]


def test_of_several_iterators_all_workers_are_called():
    loader = made(persistent=False)
    first, second = iter(loader), iter(loader)
    assert len(loader.call_workers(set_scale, 2)) == 4
    del first
    assert len(loader.call_workers(set_scale, 2)) == 2
    assert next(second) == 0


def test_without_workers_it_is_called_here():
    loader = made(workers=0, persistent=False)
    assert loader.call_workers(lambda dataset, one: (dataset.count, one), 5) == [(12, 5)]


@pytest.mark.parametrize("epochs", [0, 1])
def test_where_no_worker_lives_it_says_so(epochs):
    loader = made(persistent=False)
    for _ in range(epochs):
        list(loader)
    with pytest.raises(RuntimeError, match="found no living worker"):
        loader.call_workers(set_scale, 2)


def test_workers_that_torch_starts_cannot_be_reached(monkeypatch):
    reason = select_path.Reason("the test wants it")
    monkeypatch.setattr(select_path, "reason_for_torch", lambda *_: reason)
    loader = made()
    list(loader)
    with pytest.raises(RuntimeError, match="cannot reach workers on torch's own path"):
        loader.call_workers(set_scale, 2)


def worker_id(_dataset):
    return get_worker_info().id


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_whose_iterable_dataset_has_ended(persistent):
    """Persistent workers live on; the others have been told to end."""
    loader = made(Streamed(), persistent=persistent)
    iterator = iter(loader)
    found = [next(iterator) for _ in range(7)]
    answers = loader.call_workers(worker_id)
    assert answers == ([0, 1] if persistent else [1])
    assert sorted([*found, *iterator]) == sorted([0, 1, *range(6)])


class OddError(Exception):
    def __init__(self, one, other):
        super().__init__(one, other)


def fails(_dataset, kind):
    info = get_worker_info()
    if info.id == 0:
        return "well"
    if kind == "local":

        class LocalError(Exception):
            pass

        raise LocalError("of a class that cannot be sent")
    raise OddError(1, 2) if kind == "odd" else LookupError(f"worker {info.id} has none")


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("lookup", LookupError, "Caught LookupError in DataLoader worker process 1.*worker 1 has none"),
        ("odd", RuntimeError, "Caught OddError in DataLoader worker process 1"),
        (
            "local",
            RuntimeError,
            "Caught .* in DataLoader worker process 1.*LocalError: of a class that cannot be",
        ),
    ],
)
def test_errors_are_torchs(kind, error, text):
    loader = made()
    list(loader)
    with pytest.raises(error, match=f"(?s){text}"):
        loader.call_workers(fails, kind)
    assert list(loader) == list(range(12)), "the workers live"


def unsendable(_dataset):
    return threading.Lock()


def large(_dataset, tensor):
    assert not tensor.is_shared()
    return tensor + get_worker_info().id, b"x" * 30_000_000


def test_what_cannot_be_pickled_and_what_is_large():
    loader = made()
    list(loader)
    with pytest.raises(Exception, match=r"(?s)in DataLoader worker process 0.*cannot pickle '_thread.lock'"):
        loader.call_workers(unsendable)
    inner = functools.partial(torch.add, 1)
    for function, *arguments in (
        (lambda _: None,),
        (functools.partial(lambda _: None),),
        (torch.add, (item for item in [])),
        (inner, threading.Lock()),
    ):
        words = f"call_workers() cannot send {function!r} and its arguments to worker processes: "
        with pytest.raises(pickle.PicklingError, match=f"^{re.escape(words)}.*no lambda") as caught:
            loader.call_workers(function, *arguments)
        assert str(caught.value.__cause__) in str(caught.value)
    with pytest.raises(TypeError, match="needs a callable, not 5"):
        loader.call_workers(5)
    answers = loader.call_workers(large, torch.arange(3_000_000))
    assert [(int(tensor[7]), len(rest)) for tensor, rest in answers] == [(7, 30_000_000), (8, 30_000_000)]


def ends(_dataset):
    if get_worker_info().id == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_ends_meanwhile():
    loader = made()
    list(loader)
    lost = loader._iterator._workers[1].pid
    # The second is torch's, from a handler of its own that it has where it schedules.
    text = rf"DataLoader worker \(pid(\(s\) {lost}\) exited unexpectedly| {lost}\) is killed by signal)"
    with pytest.raises(RuntimeError, match=text):
        loader.call_workers(ends)
    with pytest.raises(RuntimeError, match=text):
        loader.call_workers(worker_id)
    loader._iterator = None


def waits(dataset, seconds):
    if get_worker_info().id == 1:
        time.sleep(seconds)
    dataset.scale += 1
    return dataset.scale


def test_a_worker_that_takes_too_long():
    loader = made()
    list(loader)
    text = r"DataLoader timed out after 0.2 seconds: call_workers\(\) has no answer of worker\(s\) 1$"
    with pytest.raises(RuntimeError, match=text):
        loader.call_workers(waits, 1.0, timeout=0.2)
    # The function is called all the same, and what is asked next waits for it.
    assert loader.call_workers(waits, 0.0) == [3, 3]
    assert list(loader) == [3 * index for index in range(12)]
    with pytest.raises(ValueError, match="timeout must be positive, not 0"):
        loader.call_workers(waits, 0.0, timeout=0)
    for timeout in ("2", True, [1]):
        with pytest.raises(TypeError, match="timeout must be a number of seconds or None, not "):
            loader.call_workers(waits, 0.0, timeout=timeout)


def names_of_sockets(_dataset):
    """Returns what other processes could connect to of this worker's sockets, and of its parent's."""
    inodes = set()
    for pid in (os.getpid(), os.getppid()):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(entry.readlink())
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return inodes and [row[7:] for row in rows if row[6] in inodes and row[7:]]


def test_an_answer_comes_where_no_other_process_can_write():
    # The fork server that other tests have had listens.
    known = list(names_of_sockets(None))
    loader = made(workers=1)
    list(loader)
    (found,) = loader.call_workers(names_of_sockets)
    assert [name for name in found if name not in known] == []
    # The check can fail.
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")
        (found,) = loader.call_workers(names_of_sockets)
        assert len([name for name in found if name not in known]) == 1


def fills_its_table(_dataset):
    """In one of them no descriptor is left, until the answer has failed."""
    if get_worker_info().id > 0:
        return
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    threading.Timer(2.0, lambda: resource.setrlimit(resource.RLIMIT_NOFILE, before)).start()


def test_a_worker_without_room_for_a_descriptor_is_named():
    loader = made()
    list(loader)
    pid = loader._iterator._workers[0].pid
    text = rf"call_workers\(\) has no answer of worker 0 \(pid {pid}\).*too many files are open in it"
    with pytest.raises(RuntimeError, match=text):
        loader.call_workers(fills_its_table)
    time.sleep(2.2)
    assert loader.call_workers(worker_id) == [0, 1]
    assert list(loader) == list(range(12))


def test_many_calls_leave_nothing_behind():
    loader = made(workers=1)
    list(loader)
    loader.call_workers(worker_id)
    before = len(list(Path("/proc/self/fd").iterdir()))
    (theirs,) = loader.call_workers(open_fds)
    for _ in range(300):
        loader.call_workers(worker_id)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert loader.call_workers(open_fds) == [theirs]


def open_fds(_dataset):
    return len(list(Path("/proc/self/fd").iterdir()))


def test_calls_from_another_thread_while_the_epoch_goes_on():
    loader = made(Scaled(400))
    answers, stop = [], threading.Event()

    def call():
        while not stop.is_set():
            answers.append(loader.call_workers(worker_id))

    iterator = iter(loader)
    thread = threading.Thread(target=call)
    thread.start()
    try:
        assert list(iterator) == list(range(400))
        assert list(loader) == list(range(400))
    finally:
        stop.set()
        thread.join()
    assert answers and all(answer == [0, 1] for answer in answers)


class Large(Dataset):
    """Batches of which a worker's share holds one and no second."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full((1 << 18,), float(index))


class LargeStream(IterableDataset):
    """A stream in parts: that of the first worker ends soon."""

    def __iter__(self):
        info = get_worker_info()
        for number in range(3 if info.id == 0 else 12):
            yield torch.full((1 << 18,), float(info.id * 100 + number))


def first_of(batches):
    """The number of each batch, whose bytes must be those."""
    found = []
    for batch in batches:
        assert bool((batch == batch[0]).all())
        found.append(int(batch[0]))
    return found


@pytest.mark.parametrize("options", [{}, {"main_prefetch": 3}, {"in_order": False}, {"timeout": 30}])
@pytest.mark.parametrize("dataset", [Large(), LargeStream()], ids=["map", "iterable"])
def test_workers_that_wait_for_room_are_called_too(dataset, options):
    given = {"batch_size": None, "num_workers": 2, "prefetch_factor": 6}
    expected = first_of(torch.utils.data.DataLoader(dataset, **given))
    loader = DataLoader(dataset, max_shared_bytes=5 << 20, **given, **options)
    iterator = iter(loader)
    found = first_of([next(iterator), next(iterator)])
    for _ in range(2):
        started = time.monotonic()
        # Not for the loader's `timeout`, which is longer than this may take.
        assert loader.call_workers(worker_id) in ([0, 1], [1])
        assert time.monotonic() - started < 20
        found += first_of([next(iterator)])
    found += first_of(iterator)
    assert (sorted(found) if "in_order" in options else found) == (
        sorted(expected) if "in_order" in options else expected
    )


def test_errors_that_were_taken_early_come_in_their_turn():
    class Failing(Large):
        def __getitem__(self, index):
            if index % 5 == 4:
                raise LookupError(f"sample {index}")
            return super().__getitem__(index)

    loader = DataLoader(
        Failing(), batch_size=None, num_workers=2, prefetch_factor=6, max_shared_bytes=5 << 20
    )
    iterator = iter(loader)
    found = first_of([next(iterator)])
    loader.call_workers(worker_id)
    while len(found) < 24:
        try:
            found += first_of([next(iterator)])
        except LookupError as error:
            assert f"sample {len(found)}" in str(error)
            found.append(len(found))
    assert found == list(range(24))


def test_a_worker_whose_batches_were_taken_early_may_die():
    loader = DataLoader(Large(), batch_size=None, num_workers=2, prefetch_factor=6, max_shared_bytes=5 << 20)
    iterator = iter(loader)
    first_of([next(iterator)])
    loader.call_workers(worker_id)
    os.kill(iterator._workers[1].pid, signal.SIGKILL)
    # Batches that the worker had committed come first.
    found = []
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        while True:
            found += first_of([next(iterator)])
    assert found == list(range(1, len(found) + 1))


def test_in_a_forked_child_there_is_no_worker_to_call():
    loader = made(persistent=False)
    iterator = iter(loader)
    next(iterator)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = "nothing"
        try:
            loader.call_workers(worker_id)
        except RuntimeError as error:
            said = str(error)
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        assert "found no living worker" in answer.read()
    os.waitpid(pid, 0)
    assert loader.call_workers(worker_id) == [0, 1]
