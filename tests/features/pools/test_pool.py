"""A pool of workers: its arguments, what its processes hold, and what an iterator leaves in them."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import os
import pickle
import signal
import sys
import threading
import warnings
import weakref
from pathlib import Path

import pytest
import torch

import ringloader
from faults.failing_datasets import Numbers
from ringloader import DataLoader, WorkerPool
from ringloader._core.make_transport import WorkerKind
from ringloader._features import table
from ringloader._features.pools.crew import Lent
from ringloader._features.pools.main import Held, ProcessState
from ringloader._features.pools.objects import LoaderObjects, PoolRecord
from ringloader._transport import budget
from ringloader._worker import collate

pytestmark = pytest.mark.rings_only


@pytest.mark.parametrize(
    ("args", "error", "text"),
    [
        ((0,), ValueError, "num_workers must be positive, not 0"),
        ((-1,), ValueError, "num_workers must be positive, not -1"),
        ((1.0,), TypeError, "num_workers must be an int, not 1.0"),
        ((True,), TypeError, "num_workers must be an int, not True"),
        ((1, "thread"), ValueError, "start_method must be one of .*'spawn'.*, not 'thread'"),
        ((1, 5), TypeError, "start_method must be one of .*, not 5"),
    ],
)
def test_wrong_arguments(args, error, text):
    with pytest.raises(error, match=text):
        WorkerPool(*args)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2, "worker_pool must be a ringloader.WorkerPool or None, not 2"),
        ("pool", "worker_pool must be a ringloader.WorkerPool or None, not 'pool': pass"),
        (WorkerPool, "worker_pool must be a ringloader.WorkerPool or None"),
    ],
)
@pytest.mark.parametrize("function", ["DataLoader", "install", "convert"])
def test_what_is_no_pool(value, text, function):
    loader = torch.utils.data.DataLoader(Numbers(2))
    with pytest.raises(TypeError, match=text):
        if function == "DataLoader":
            DataLoader(Numbers(2), worker_pool=value)
        elif function == "install":
            ringloader.install(worker_pool=value)
        else:
            ringloader.convert(loader, worker_pool=value)
    assert type(loader) is torch.utils.data.DataLoader


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_workers": 3}, "num_workers=3 is more than the 2 processes of worker_pool"),
        ({"num_workers": 1, "persistent_workers": True}, "persistent_workers=True .* worker_pool"),
        ({"num_workers": 1, "multiprocessing_context": "spawn"}, "multiprocessing_context=.* worker_pool"),
        ({"dataset": ringloader.Dispatch(range(2))}, "worker_pool=.* and a Dispatch as dataset"),
    ],
)
def test_what_does_not_go_together(arguments, text):
    arguments = {"dataset": Numbers(2), **arguments}
    with pytest.raises(ValueError, match=text):
        DataLoader(worker_pool=WorkerPool(2), **arguments)
    loader = torch.utils.data.DataLoader(**arguments)
    with pytest.raises(ValueError, match=text):
        ringloader.convert(loader, worker_pool=WorkerPool(2))
    assert type(loader) is torch.utils.data.DataLoader


@pytest.mark.parametrize("function", ["DataLoader", "install", "convert"])
def test_threads_are_no_pools(function):
    options = {"worker_pool": WorkerPool(2), "worker_method": "thread"}
    with pytest.raises(ValueError, match=r"worker_method='thread' and worker_pool=.*WorkerPool"):
        if function == "DataLoader":
            DataLoader(Numbers(2), **options)
        elif function == "install":
            ringloader.install(**options)
        else:
            ringloader.convert(torch.utils.data.DataLoader(Numbers(2)), **options)


@pytest.mark.parametrize("options", [{"prefetch_factor": 3}, {"main_prefetch": 2}])
def test_prefetching_with_the_number_that_the_pool_has(options):
    pool = WorkerPool(2)
    made = DataLoader(Numbers(2), worker_pool=pool, **options)
    assert (made.num_workers, made.prefetch_factor) == (2, options.get("prefetch_factor", 2))
    assert ringloader.convert(made, worker_pool=pool) is made


def test_how_many_workers():
    pool = WorkerPool(3)
    assert DataLoader(Numbers(2), worker_pool=pool).num_workers == 3
    assert DataLoader(Numbers(2), num_workers=0, worker_pool=pool).num_workers == 3
    assert DataLoader(Numbers(2), num_workers=2, worker_pool=pool).num_workers == 2
    assert DataLoader(Numbers(2), 1, False, None, None, 2, worker_pool=pool).num_workers == 2
    loader = DataLoader(Numbers(2), 1, False, None, None, worker_pool=pool, prefetch_factor=4)
    assert (loader.num_workers, loader.prefetch_factor) == (3, 4)
    converted = ringloader.convert(torch.utils.data.DataLoader(Numbers(2)), worker_pool=pool)
    assert (converted.num_workers, converted.prefetch_factor) == (3, 2)
    with pytest.raises(ValueError, match="num_workers option should be non-negative"):
        DataLoader(Numbers(2), num_workers=-1, worker_pool=pool)
    with pytest.raises(TypeError, match="unexpected keyword argument 'worker'"):
        DataLoader(Numbers(2), worker=1, worker_pool=pool)


def test_copies_share_the_pool_and_pickles_have_none():
    pool = WorkerPool(2)
    loader = DataLoader(Numbers(2), worker_pool=pool)
    for same in (copy.copy(loader), copy.deepcopy(loader)):
        assert table.options_of(same).worker_pool is pool
    other = pickle.loads(pickle.dumps(loader))
    assert table.options_of(other).worker_pool is None
    assert other.num_workers == 2
    assert copy.copy(pool) is copy.deepcopy(pool) is pool
    assert repr(WorkerPool(2, "spawn")) == "ringloader.WorkerPool(2, start_method='spawn')"


def test_a_pool_does_not_keep_its_loaders():
    pool = WorkerPool(1)
    dataset = Numbers(2)
    # A cycle through the pool, if it kept the dataset.
    dataset.loader = DataLoader(dataset, worker_pool=pool)
    gone = weakref.ref(dataset)
    del dataset
    gc.collect()
    assert gone() is None


def test_each_loader_has_a_number():
    objects = LoaderObjects(PoolRecord)
    dataset, function = Numbers(2), functools.partial(max, 1)
    one, other = DataLoader(dataset), DataLoader(dataset, collate_fn=function)
    first, second = (objects.record_of(loader, objects.add_gone) for loader in (one, other))
    assert objects.record_of(one, objects.add_gone) is first
    assert first.things() == {"dataset": dataset, "collate_fn": one.collate_fn}
    assert second.things() == {"dataset": dataset, "collate_fn": function}
    assert objects.numbers() == {first.number, second.number}
    del one
    objects.tidy()
    assert objects.numbers() == {second.number}
    del other
    objects.tidy()
    assert objects.numbers() == set()


def test_another_dataset_has_another_number():
    objects = LoaderObjects(PoolRecord)
    loader = DataLoader([1, 2, 3])
    before = objects.record_of(loader, objects.add_gone)
    # Ultralytics does this.
    object.__setattr__(loader, "dataset", [4, 5, 6])
    after = objects.record_of(loader, objects.add_gone)
    assert after.number != before.number
    assert objects.numbers() == {after.number}
    # An iterator of before needs the dataset of then.
    again = objects.renewed(loader, before)
    assert again.things()["dataset"] == [1, 2, 3]
    assert objects.record_of(loader, objects.add_gone) is after


def test_attributes_are_as_they_came():
    held = Held()
    dataset, inner = Numbers(2), Numbers(3)
    inner.deep = {}
    many = torch.utils.data.ConcatDataset([inner, torch.utils.data.Subset(Numbers(9), [0])])
    held.put(1, {"dataset": dataset})
    held.put(2, {"dataset": many, "collate_fn": functools.partial(print, inner), "worker_init_fn": [1]})
    dataset.length, dataset.new = 1, 2
    del dataset.elements
    inner.length = 1
    inner.deep["opened"] = 1
    many.datasets[1].dataset.length = 1
    held.restore()
    assert vars(dataset) == {"length": 2, "elements": 3000}
    assert (inner.length, many.datasets[1].dataset.length) == (3, 9)
    assert inner.deep == {"opened": 1}
    assert held.get((1, "dataset")) is dataset
    held.drop([1, 7])
    with pytest.raises(KeyError):
        held.get((1, "dataset"))


def test_the_process_is_as_it_was(tmp_path):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _change_and_restore(tmp_path)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _change_and_restore(folder):
    def told():
        return (
            dict(os.environ),
            Path.cwd(),
            list(sys.path),
            signal.getsignal(signal.SIGUSR1),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.utils.data._utils.collate.collate,
            inspect.getattr_static(torch.UntypedStorage, "_new_shared"),
            signal.getitimer(signal.ITIMER_REAL)[0],
        )

    signal.setitimer(signal.ITIMER_REAL, 0)
    before, state = told(), ProcessState()
    os.environ["NEW"] = "1"
    os.environ.pop("HOME", None)
    os.chdir(folder)
    sys.path.insert(0, "new")
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 1000)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    engine = ringloader._native.Engine(1, 2, 1 << 20)
    port = ringloader._native.Port.inherit(engine, 0)
    collate.allocate_in_slots(port)
    collate.replace_collate(port)
    changed = told()
    assert [one == other for one, other in zip(before, changed, strict=True)] == [False] * len(before)
    state.restore()
    assert told() == before


def test_two_threads_make_iterators_at_once():
    # A child that is forked while another thread runs has the locks of torch's libraries as they are then.
    with WorkerPool(2, "forkserver") as pool:
        loaders = [DataLoader(Numbers(12, 10), worker_pool=pool) for _ in range(3)]
        failed = []

        def work(loader):
            try:
                for _ in range(4):
                    assert [int(batch[0, 0]) for batch in loader] == list(range(12))
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(loader,)) for loader in loaders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []
        processes = pool._crew._processes
        assert all(not process.is_lent for process in processes)
        # No more stay than twice the pool's number.
        list(loaders[0])
        assert 2 <= len(processes) <= 4


def test_the_process_object():
    """The stand-in for a process at an iterator ends with the iterator; the process does not."""
    with WorkerPool(1) as pool:
        loader = DataLoader(Numbers(4), worker_pool=pool)
        iterator = iter(loader)
        (worker,) = iterator._workers
        (process,) = pool._crew._processes
        assert worker.pid == worker.ident == process.process.pid
        assert (worker.is_alive(), worker.exitcode, worker.daemon) == (True, None, True)
        assert worker.name == process.process.name
        assert worker.sentinel == process.process.sentinel
        worker.join(0.01)
        assert worker.is_alive()
        list(iterator)
        assert (worker.is_alive(), worker.exitcode) == (False, 0)
        # The processes are the next iterator's business now.
        worker.terminate()
        worker.kill()
        worker.close()
        worker.join()
        assert [int(batch[0, 0]) for batch in loader] == [0, 1, 2, 3]
        assert pool._crew._processes == [process]


class Elsewhere(WorkerPool):
    """A pool of other machines, while this one has no shared memory left."""

    _is_remote = True

    def _kind(self):
        return LentElsewhere(self, None)


class LentElsewhere(Lent):
    are_here = False

    def transport(self, *_arguments):
        raise budget.RefusedError("shared memory is not available")


@pytest.mark.parametrize("way", ["constructor", "convert"])
def test_a_loader_of_workers_elsewhere_is_made_without_a_look_at_the_cores_of_this_machine(way):
    with Elsewhere(len(os.sched_getaffinity(0)) + 1) as pool, warnings.catch_warnings():
        warnings.simplefilter("error")
        if way == "constructor":
            loader = DataLoader(Numbers(4), worker_pool=pool)
        else:
            loader = ringloader.convert(torch.utils.data.DataLoader(Numbers(4)), worker_pool=pool)
        loader.check_worker_number_rationality()
        assert loader.num_workers == pool.num_workers


def test_workers_elsewhere_are_never_replaced_by_workers_here():
    with Elsewhere(2) as pool:
        loader = DataLoader(Numbers(4), worker_pool=pool)
        with pytest.raises(RuntimeError, match=r"cannot be used: shared memory .*; leave worker_pool out"):
            iter(loader)


@pytest.mark.parametrize("are_here", [False, True])
@pytest.mark.parametrize("way", ["convert", "install"])
def test_workers_of_other_machines_are_not_compared_with_the_cores_of_this_one(monkeypatch, way, are_here):
    monkeypatch.setattr(WorkerKind, "are_here", are_here)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # Newer Pythons warn of each fork beside threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        loader = torch.utils.data.DataLoader(Numbers(2), num_workers=len(os.sched_getaffinity(0)) + 1)
        assert "This DataLoader will create" in str(caught.pop().message)
        if way == "convert":
            list(ringloader.convert(loader))
        with ringloader.installed():
            list(loader)
    assert ["This DataLoader will create" in str(one.message) for one in caught] == [True] * len(caught)
    assert bool(caught) is are_here
