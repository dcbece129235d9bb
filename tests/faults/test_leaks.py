"""Nothing is left: no process, descriptor, mapping or shared memory, however an iteration ends."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import resource
import sys
import time
import tracemalloc  # noqa: F401  (pytest imports it where it finds a warning, when no file can be opened)
import weakref

import pytest
import torch

from faults.failing_datasets import Numbers, Opaque, Raises, Unpicklable, init_raises
from faults.proc import (
    Snapshot,
    descriptors,
    mappings,
    names_in_dev_shm,
    shared_resident_kib,
    wait_until,
    wait_without_children,
)
from faults.script import run_script
from parity.harness import assert_path
from ringloader import DataLoader, Retry

MEBI = 1 << 20


@pytest.fixture
def snapshot(loader_class):
    """Taken after loaders have run, so that what a process starts once is already there."""
    for _ in range(2):
        assert len(list(loader_class(Numbers(4), num_workers=2))) == 4
    gc.collect()
    wait_without_children(10)
    return Snapshot.take()


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("taken", [0, 1, 5, 30])
def test_iterator_is_dropped(loader_class, loader_name, snapshot, taken, persistent):
    loader = loader_class(Numbers(30), num_workers=2, persistent_workers=persistent)
    iterator = iter(loader)
    if loader_name != "torch":
        assert_path(iterator, 2)
    for _ in range(taken):
        next(iterator)
    del iterator, loader
    snapshot.assert_nothing_left()


FIRST = {"max_errors": 0, "on_error": "skip"}

DROPPED = {
    "order": (lambda: Raises(30, 3), {}),
    "any order": (lambda: Raises(30, 3), {"in_order": False}),
    "ahead": (lambda: Raises(30, 3), {"main_prefetch": 2}),
    "threads": (lambda: Raises(30, 3), {"worker_method": "thread"}),
    "retried": (lambda: Raises(30, 3), {"on_error": Retry(1, 0.0)}),
    "retried, no workers": (lambda: Raises(30, 3), {"on_error": Retry(1, 0.0), "num_workers": 0}),
    "one too many": (lambda: Raises(30, 3), FIRST),
    "one too many, threads": (lambda: Raises(30, 3), {**FIRST, "worker_method": "thread"}),
    "one too many, no workers": (lambda: Raises(30, 3), {**FIRST, "num_workers": 0}),
    "nothing left": (lambda: Raises(1, 0), {"on_error": "skip"}),
    "nothing left, no workers": (lambda: Raises(1, 0), {"on_error": "skip", "num_workers": 0}),
    "timeout": (lambda: Sleeps(30), {"timeout": 0.5}),
    "lost worker": (lambda: Ends(30), {}),
    "lost worker, no more restarts": (lambda: Ends(30), {"restart_workers": 1}),
}


class Sleeps(Numbers):
    def __getitem__(self, index):
        time.sleep(2.0 if index == 3 else 0.0)
        return super().__getitem__(index)


class Ends(Numbers):
    def __getitem__(self, index):
        if index == 3:
            os._exit(3)
        return super().__getitem__(index)


@pytest.mark.rings_only
@pytest.mark.parametrize("case", DROPPED)
def test_an_error_that_is_dropped_takes_its_iterator_along(case, monkeypatch):
    """Workers and memory wait for the collector with torch alone, whose ``reraise`` leaves a cycle."""
    # pytest keeps what is logged, and the error with it.
    monkeypatch.setattr(logging.getLogger("ringloader"), "disabled", True)
    made, options = DROPPED[case]
    loader = DataLoader(made(), **{"num_workers": 2, **options})
    gc.disable()
    try:
        iterator = iter(loader)
        gone = weakref.ref(iterator)
        with contextlib.suppress(KeyError, RuntimeError):
            for _ in range(30):
                next(iterator)
            pytest.fail("nothing was raised")
        del iterator
        assert gone() is None
    finally:
        gc.enable()


def test_iterator_in_a_cycle(loader_class, snapshot):
    """Collected by the cyclic collector, in any order."""
    loader = loader_class(Numbers(30), num_workers=2)
    holder = {"iterator": iter(loader)}
    holder["holder"] = holder
    next(holder["iterator"])
    del holder, loader
    snapshot.assert_nothing_left(seconds=20)


def test_error_in_the_middle(loader_class, snapshot):
    with pytest.raises(KeyError):
        list(loader_class(Raises(20, 7), num_workers=2))
    snapshot.assert_nothing_left(seconds=20)


@pytest.mark.parametrize("persistent", [False, True])
def test_worker_init_fn_raises(loader_class, snapshot, persistent):
    loader = loader_class(
        Numbers(20), num_workers=2, worker_init_fn=init_raises, persistent_workers=persistent
    )
    with pytest.raises(ValueError, match="refuses"):
        next(iter(loader))
    del loader
    snapshot.assert_nothing_left(seconds=20)


@pytest.mark.limit(300)
@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_unpicklable_dataset(loader_class, method):
    """The start fails; what was made for it is gone, and the error is Python's own."""
    loader = loader_class(Unpicklable(4), num_workers=2, multiprocessing_context=method)
    # The type depends on the Python.
    errors = (AttributeError, TypeError, pickle.PicklingError)
    with (
        pytest.warns(UserWarning, match="pickle error"),
        pytest.raises(errors, match=r"pickle|local object"),
    ):
        iter(loader)
    gc.collect()
    snapshot = Snapshot.take()
    for _ in range(3):
        with pytest.warns(UserWarning, match="pickle error"), pytest.raises(errors):
            iter(loader)
    # With it goes the server for spawn.
    del loader
    snapshot.assert_nothing_left()


@pytest.mark.rings_only
@pytest.mark.limit(120)
def test_unpicklable_index(loader_class, snapshot):
    """With torch the task is lost in the feeder thread and the parent waits forever."""
    loader = loader_class(Numbers(4), sampler=[0, Opaque(1), 2], batch_size=None, num_workers=1)
    with pytest.raises(TypeError, match="opaque index"):
        list(loader)
    del loader
    snapshot.assert_nothing_left()


@contextlib.contextmanager
def room_for_descriptors(count):
    """Exactly `count` more can be opened, also where numbers below the highest one are free."""
    fillers = []
    spare = []
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        taken = descriptors()
        while len(fillers) + len(taken) <= max(taken):
            fillers.append(os.open("/dev/null", os.O_RDONLY))
        spare = [os.open("/dev/null", os.O_RDONLY) for _ in range(count + 1)]
        # A process can open descriptors below the limit, and one number more than `count` gives that limit.
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare[-1], limit[1]))
        while spare:
            os.close(spare.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        for fd in fillers + spare:
            os.close(fd)


@pytest.fixture
def pipes_of_popen(monkeypatch):
    """Closes what CPython loses: `Popen._launch` drops its first pipe where the second fails."""
    pipe = os.pipe

    def guarded():
        try:
            return pipe()
        except OSError:
            caller = sys._getframe(1)
            if caller.f_code.co_name == "_launch":
                for name in ("parent_r", "child_w"):
                    if name in caller.f_locals:
                        os.close(caller.f_locals[name])
            raise

    monkeypatch.setattr(os, "pipe", guarded)


@pytest.mark.parametrize("headroom", [*range(16), 18, 20, 24])
@pytest.mark.usefixtures("pipes_of_popen")
@pytest.mark.limit(120)
def test_too_few_descriptors(loader_class, snapshot, headroom):
    """An error, or success: never a hang, and nothing is left."""
    with room_for_descriptors(headroom), contextlib.suppress(OSError, RuntimeError):
        got = [int(batch[0, 0]) for batch in loader_class(Numbers(6), num_workers=2)]
        assert got == list(range(6))
    snapshot.assert_nothing_left(seconds=20)


@pytest.mark.rings_only
def test_descriptors_do_not_grow_with_batches(loader_class):
    """torch needs a descriptor for all tensors that are held; here their number is fixed."""
    iterator = iter(loader_class(Numbers(200), num_workers=2))
    kept = [next(iterator)]
    before = len(descriptors())
    kept.extend(iterator)
    assert len(kept) == 200
    assert len(descriptors()) <= before


@pytest.mark.limit(300)
@pytest.mark.parametrize("persistent", [False, True])
def test_many_epochs(loader_class, loader_name, snapshot, persistent):
    loader = loader_class(Numbers(6), num_workers=1, persistent_workers=persistent)
    list(loader)
    before = Snapshot.take()
    for _ in range(30):
        assert len(list(loader)) == 6
    after = Snapshot.take()
    assert len(after.descriptors) <= len(before.descriptors)
    if loader_name != "torch":
        # Counted in lines, and the allocator's own arenas come and go.
        assert after.mappings <= before.mappings + 10
    del loader
    snapshot.assert_nothing_left()


@pytest.mark.limit(300)
def test_fifty_loaders(loader_class, snapshot):
    for number in range(50):
        iterator = iter(loader_class(Numbers(4), num_workers=1))
        next(iterator)
        if number % 2:
            list(iterator)
        del iterator
    gc.collect()
    assert len(mappings()) <= snapshot.mappings + 12
    snapshot.assert_nothing_left()


@pytest.mark.rings_only
@pytest.mark.limit(300)
def test_mapping_goes_with_the_last_batch(loader_class, snapshot):
    """A batch that is kept keeps its loader's segment mapped, and nothing else does."""
    kept = []
    for _ in range(20):
        loader = loader_class(Numbers(4, 100_000), num_workers=1, batch_size=None)
        kept.append(list(loader))
    del loader
    # Read in full, so that every page is mapped here.
    assert all(bool((batch == number).all()) for batches in kept for number, batch in enumerate(batches))
    assert shared_resident_kib() > snapshot.shared_kib + 20 * 100_000 * 8 // 1024
    kept.clear()
    gc.collect()
    assert wait_until(lambda: len(mappings()) <= snapshot.mappings + 12, 5)
    snapshot.assert_nothing_left()


@pytest.mark.parametrize("persistent", [False, True])
def test_shut_down_twice(loader_class, snapshot, persistent):
    loader = loader_class(Numbers(20), num_workers=2, persistent_workers=persistent)
    iterator = iter(loader)
    batch = next(iterator)
    iterator.__del__()
    iterator.__del__()
    iterator._shutdown_workers()
    assert bool((batch == 0).all())
    del iterator, loader
    gc.collect()
    assert bool((batch == 0).all())
    del batch
    snapshot.assert_nothing_left()


@pytest.mark.limit(120)
@pytest.mark.parametrize("persistent", [False, True])
def test_next_after_shutdown(loader_class, persistent):
    """The end is that of torch, whose words these are, and no hang."""

    def outcomes(cls):
        iterator = iter(cls(Numbers(40), num_workers=1, persistent_workers=persistent))
        next(iterator)
        iterator._shutdown_workers()
        found = []
        for _ in range(8):
            try:
                found.append(int(next(iterator)[0, 0]))
            except (StopIteration, AssertionError) as error:
                found.append(repr(error))
        return found

    assert outcomes(loader_class) == outcomes(torch.utils.data.DataLoader)


@pytest.fixture
def file_system_strategy():
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(before)


@pytest.mark.rings_only
@pytest.mark.usefixtures("file_system_strategy")
def test_no_names_in_dev_shm(loader_class):
    """Also with this strategy, by which torch's batches have names there for as long as they live."""
    before = names_in_dev_shm()
    iterator = iter(loader_class(Numbers(8, 100_000), num_workers=2))
    processes = {os.getpid(), *(worker.pid for worker in iterator._workers)}
    kept = []
    for batch in iterator:
        kept.append(batch)
        names = names_in_dev_shm() - before
        assert not {name for name in names if any(f"_{pid}_" in name for pid in processes)}
    assert len(kept) == 8


@pytest.mark.rings_only
def test_segment_is_close_on_exec(loader_class):
    """A program that the user starts inherits neither memory nor bells."""
    # torch's manager of shared memory has a socket that programs inherit.
    before = descriptors()
    iterator = iter(loader_class(Numbers(10), num_workers=1))
    next(iterator)
    found = {fd: target for fd, target in descriptors().items() if before.get(fd) != target}
    assert found
    for fd, target in found.items():
        if any(kind in target for kind in ("memfd", "eventfd", "eventpoll", "pidfd", "socket")):
            assert not os.get_inheritable(fd), target


def test_memory_of_small_batches_is_given_back(loader_class, snapshot):
    kept = list(loader_class(Numbers(200, 10), num_workers=2))
    assert len(kept) == 200 and torch.is_tensor(kept[0])
    del kept
    snapshot.assert_nothing_left()


# A table of torch's C functions whose `to_object` fails when told to, before it calls the deleter or after.
FAILING_EXCHANGE = """
    import ctypes
    api = ctypes.pythonapi
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_New.restype = ctypes.py_object
    api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    NAME = b"dlpack_exchange_api"
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        print("no table")
        sys.exit()
    ToObject = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    table = (ctypes.c_void_p * 8)()
    ctypes.memmove(table, api.PyCapsule_GetPointer(capsule, NAME), ctypes.sizeof(table))
    torchs = ToObject(table[4])
    how = None
    failed = 0
    def to_object(managed, out):
        global failed
        if how is None:
            return torchs(managed, out)
        failed += 1
        if how == "after the deleter":
            # Behind the version, of two words, and the manager.
            deleter = ctypes.c_void_p.from_address(managed + 16).value
            Deleter(deleter)(managed)
        return -1
    ours = ToObject(to_object)
    table[4] = ctypes.cast(ours, ctypes.c_void_p).value
    torch.Tensor.__dlpack_c_exchange_api__ = api.PyCapsule_New(ctypes.addressof(table), NAME, None)
"""


@pytest.mark.rings_only
@pytest.mark.parametrize("how", ["before the deleter", "after the deleter"])
def test_torch_does_not_take_a_tensor(loader_name, tmp_path, how):
    """Nothing says whether the deleter has run: the slot comes back, once."""
    body = f"""
    import ringloader
    loader = DataLoader(Numbers(400), num_workers=1, batch_size=None, max_shared_bytes=1 << 20)
    iterator = iter(loader)
    assert int(next(iterator)[0]) == 0
    how = {how!r}
    for _ in range(200):
        try:
            next(iterator)
        except RuntimeError as error:
            assert "torch took no tensor" in str(error)
    how = None
    kept = [next(iterator) for _ in range(6)]
    assert [int(batch[0]) for batch in kept] == list(range(201, 207))
    print(failed, ringloader.report(iterator).counters["copied_out"])
    """
    ended = run_script(loader_name, FAILING_EXCHANGE + body, tmp_path)
    assert (ended.code, ended.err) == (0, "")
    if ended.out == "no table\n":
        pytest.skip("this torch has no C functions for exchange")
    assert ended.out == "200 0\n"
