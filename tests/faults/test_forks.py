"""A child that is forked while a batch is held has it for as long as it lives, to read and to write."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

import ringloader
from faults import proc
from faults.script import run_script
from parity.datasets import Filled, identity, value_of
from small_datasets import Made

KIBI, MEBI = 1 << 10, 1 << 20
# Copied to memory of the main process's own; over the slot; in a segment of its own, with `BUDGET`.
SIZES = {"small": 4 * KIBI, "slot": 200 * KIBI, "oversize": 3 * MEBI}
BUDGET = 8 * MEBI


@pytest.fixture(autouse=True)
def _no_child_left():
    yield
    for child in list(Child.left):
        child.end(signal.SIGKILL)


@pytest.fixture(params=["torch", "native"])
def make(request, loader_name):
    """Makes loaders of one kind: torch's, or ours."""
    if request.param == "torch":
        yield DataLoader
        return
    if loader_name == "torch":
        pytest.skip("says nothing about torch's own loader")

    def ours(*args, **kwargs):
        kwargs.setdefault("max_shared_bytes", BUDGET)
        return ringloader.DataLoader(*args, **kwargs)

    yield ours


def loader_of(make, size, *, length=40, workers=2, **options):
    return make(Filled(length, size), num_workers=workers, batch_size=None, collate_fn=identity, **options)


def is_full_of(batch, value):
    # By numpy: torch's threads are not there in a child that was forked.
    return bool((batch.numpy() == value).all())


def is_sample(batch, index):
    return is_full_of(batch, value_of(index))


def fill(batch, value):
    batch.numpy().fill(value)
    return True


def descriptors():
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


class Child:
    """A forked child that has what its parent has, and does what it is told."""

    left: ClassVar[set[Child]] = set()

    def __init__(self, **actions):
        """`actions` by name; each returns whether all is as it should be."""
        ours, theirs = multiprocessing.Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                ours.close()
                while (name := theirs.recv()) is not None:
                    theirs.send(bool(actions[name]()))
            finally:
                os._exit(0)
        theirs.close()
        self._pipe = ours
        self.left.add(self)

    def do(self, name):
        self._pipe.send(name)
        return self._pipe.recv()

    def end(self, how=None):
        if how is None:
            self._pipe.send(None)
        else:
            os.kill(self.pid, how)
        os.waitpid(self.pid, 0)
        self._pipe.close()
        self.left.remove(self)


def churn(make, size, loader=None, *, epochs=1, **options):
    """Lets many other batches come, and checks them."""
    loader = loader or loader_of(make, size, **options)
    for _ in range(epochs):
        for number, batch in enumerate(loader):
            assert is_sample(batch, number)
            del batch


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("persistent", [False, True])
def test_a_child_keeps_what_its_parent_drops(make, size, persistent):
    loader = loader_of(make, size, persistent_workers=persistent, length=24)
    iterator = iter(loader)
    batch = next(iterator)
    child = Child(check=lambda batch=batch: is_sample(batch, 0))
    del batch
    for number, later in enumerate(iterator, 1):
        assert is_sample(later, number)
        del later
    assert child.do("check")
    # Another epoch, perhaps over the same memory; and the end of the loader, which gives it back.
    del iterator
    churn(make, size, loader)
    assert child.do("check")
    del loader
    gc.collect()
    assert child.do("check")
    child.end()


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_what_a_child_writes_is_in_no_other_batch(make, size):
    loader = loader_of(make, size)
    for epoch in range(3):
        iterator = iter(loader)
        batch = next(iterator)
        child = Child(
            write=lambda batch=batch: fill(batch, 255),
            check=lambda batch=batch: is_full_of(batch, 255),
        )
        del batch
        for number, later in enumerate(iterator, 1):
            assert child.do("write")
            assert is_sample(later, number), epoch
            del later
        del iterator
        assert child.do("check")
        child.end()


@pytest.mark.rings_only
def test_small_tensors_are_each_processs_own():
    seen = {}
    for name, kind in (("torch", DataLoader), ("ringloader", ringloader.DataLoader)):
        for size in (SIZES["small"], SIZES["slot"]):
            batch = next(iter(loader_of(kind, size)))
            child = Child(write=lambda batch=batch: fill(batch, 255))
            assert child.do("write")
            child.end()
            seen[name, size] = is_full_of(batch, 255)
    both, small = SIZES["slot"], SIZES["small"]
    assert seen == {
        ("torch", both): True,
        ("torch", small): True,
        ("ringloader", both): True,
        ("ringloader", small): False,
    }


def test_a_process_is_given_a_batch(make):
    """The everyday form: `Process(target=evaluate, args=(batch,))`."""
    context = multiprocessing.get_context("fork")
    going, told = context.Event(), context.SimpleQueue()

    def evaluate(batch, number):
        going.wait()
        told.put((number, is_sample(batch, number)))

    iterator = iter(loader_of(make, SIZES["slot"]))
    processes = []
    for number, batch in zip(range(4), iterator, strict=False):
        processes.append(context.Process(target=evaluate, args=(batch, number)))
        processes[-1].start()
        del batch
    for batch in iterator:
        del batch
    going.set()
    for process in processes:
        process.join()
        # The process refers to its arguments, which the next one would have too.
        process.close()
    assert sorted(told.get() for _ in range(4)) == [(number, True) for number in range(4)]


class Holding(Dataset):
    """A dataset whose samples are those of a batch that it holds, of another loader."""

    def __init__(self, batch):
        self.batch = batch

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return self.batch.clone()


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("size", [SIZES["slot"], SIZES["oversize"]], ids=["slot", "oversize"])
def test_a_dataset_holds_a_batch_of_another_loader(make, persistent, size):
    first = loader_of(make, size, persistent_workers=True)
    iterator = iter(first)
    dataset = Holding(next(iterator))
    second = make(dataset, num_workers=2, batch_size=None, collate_fn=identity, persistent_workers=persistent)
    epoch = iter(second)
    assert is_sample(next(epoch), 0)
    # The main process lets go of it; the workers have it still.
    dataset.batch = None
    for _ in range(3):
        churn(make, size, first)
        for batch in epoch:
            assert is_sample(batch, 0)
        if not persistent:
            break
        epoch = iter(second)


def test_validation_inside_of_the_training_loop(make):
    """Forks while a training batch is held; each loader's batches stay right, and nothing piles up."""
    train = loader_of(make, SIZES["slot"], length=30)
    validate = loader_of(make, SIZES["slot"], length=6)
    open_ones = []
    for _ in range(2):
        for number, batch in enumerate(train):
            if number % 10 == 3:
                churn(make, SIZES["slot"], validate)
            assert is_sample(batch, number)
        del batch
        gc.collect()
        open_ones.append(len(descriptors()))
    # torch has some for each batch.
    assert make is DataLoader or open_ones[1] <= open_ones[0] + 2


@pytest.mark.parametrize("size", [SIZES["slot"], SIZES["oversize"]], ids=["slot", "oversize"])
def test_a_child_that_is_forked_between_epochs(make, size):
    """The child's memory is of an epoch that is over."""
    loader = loader_of(make, size, length=12)
    kept = list(loader)[3]
    child = Child(
        check=lambda kept=kept: is_sample(kept, 3),
        write=lambda kept=kept: fill(kept, 200),
        check_written=lambda kept=kept: is_full_of(kept, 200),
    )
    del kept
    churn(make, size, loader, epochs=2)
    assert child.do("check") and child.do("write")
    churn(make, size, loader, epochs=2)
    assert child.do("check_written")
    child.end()


def test_a_grandchild_has_it_too(make):
    iterator = iter(loader_of(make, SIZES["slot"]))
    batch = next(iterator)
    reading, writing = os.pipe()
    grandchild = []

    def fork_on(batch=batch):
        pid = os.fork()
        if pid == 0:
            # The grandchild outlives its parent, and looks when the pipe's other end is closed.
            os.close(writing)
            os.read(reading, 1)
            os._exit(0 if is_sample(batch, 0) else 1)
        grandchild.append(pid)
        told.send(pid)
        return True

    ours, told = multiprocessing.Pipe()
    libc = ctypes.CDLL(None)
    libc.prctl(36, 1, 0, 0, 0)  # Orphans come to this process.
    try:
        child = Child(fork=fork_on)
        del batch, fork_on
        assert child.do("fork")
        pid = ours.recv()
        child.end()
        for later in iterator:
            del later
        os.close(writing)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        libc.prctl(36, 0, 0, 0, 0)
        os.close(reading)


@pytest.mark.parametrize("how", [None, signal.SIGKILL], ids=["exit", "killed"])
def test_the_memory_comes_back_when_the_child_has_gone(make, how):
    """However many children there were, the loader goes on without copies and in the same memory."""
    iterator = iter(loader_of(make, SIZES["slot"], length=600))
    open_ones = set()
    for number, batch in enumerate(iterator):
        assert is_sample(batch, number)
        if number % 20 == 0:
            child = Child(check=lambda batch=batch, number=number: is_sample(batch, number))
            del batch
            assert child.do("check")
            child.end(how)
            open_ones.add(len(descriptors()))
    if make is not DataLoader:
        assert max(open_ones) - min(open_ones) <= 4
        counters = ringloader.report(iterator).counters
        assert counters["batches"] == 600 and counters["oversize"] == 0
        # Batches that came while a child lived may have been copied out; they are few.
        assert counters["copied_out"] < 30


@pytest.mark.rings_only
def test_what_children_have_counts_as_held():
    """The user may hold half of a share; what is kept for children is part of that."""
    size = 200 * KIBI
    loader = ringloader.DataLoader(
        Filled(120, size), num_workers=1, batch_size=None, collate_fn=identity, max_shared_bytes=4 * MEBI
    )
    iterator = iter(loader)
    children = []
    for number, batch in enumerate(iterator):
        if number < 20:
            children.append(Child(check=lambda batch=batch, number=number: is_sample(batch, number)))
        assert is_sample(batch, number)
        del batch
        if number == 40:
            assert ringloader.report(iterator).counters["copied_out"] > 20
            assert all(child.do("check") for child in children)
            for child in children:
                child.end()
            before = None
        if number == 60:
            before = ringloader.report(iterator).counters["copied_out"]
    assert ringloader.report(iterator).counters["copied_out"] == before


def test_a_program_that_is_run_keeps_nothing(make):
    """A child that runs another program has the batch no longer: its pipe closes there."""
    iterator = iter(loader_of(make, SIZES["slot"], length=60))
    running = []
    for number, batch in enumerate(iterator):
        if number < 20:
            # A function to call in the child makes Python fork, with all that goes with it.
            running.append(subprocess.Popen(["sleep", "60"], preexec_fn=lambda: None))
        del batch
    if make is not DataLoader:
        assert ringloader.report(iterator).counters["copied_out"] == 0
    for process in running:
        process.kill()
        process.wait()


class ForkingCollate:
    """Collates, forks a child that has the batch, and lets it look several batches later."""

    def __init__(self):
        self.children = []
        self.wrong = 0

    def __call__(self, samples):
        batch = default_collate(samples)
        number = int(batch[0, 0]) - 1
        if number < 3:
            going, go = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.read(going, 1)
                os._exit(0 if is_sample(batch, number) else 1)
            os.close(going)
            self.children.append((pid, go))
        elif number == 50:
            for pid, go in self.children:
                os.write(go, b"x")
                self.wrong += os.waitpid(pid, 0)[1] != 0
                os.close(go)
        return batch, self.wrong


def test_a_worker_forks_while_it_has_a_batch(make):
    """A child of a worker has what the worker collated, also when the batch has come back to it."""
    loader = make(
        Filled(60, SIZES["slot"]),
        num_workers=1,
        batch_size=1,
        collate_fn=ForkingCollate(),
    )
    for number, (batch, wrong) in enumerate(loader):
        assert is_sample(batch, number) and wrong == 0
        del batch


def test_forks_in_one_thread_while_another_iterates(make):
    stop = threading.Event()
    wrong = []
    shared = {}

    def fork():
        while not stop.is_set():
            found = shared.get("batch")
            if found is None:
                continue
            batch, number = found
            del found
            child = Child(check=lambda batch=batch, number=number: is_sample(batch, number))
            shared.pop("batch", None)
            del batch
            time.sleep(0.002)
            if not child.do("check"):
                wrong.append(number)
            child.end()

    thread = threading.Thread(target=fork)
    thread.start()
    try:
        loader = loader_of(make, SIZES["slot"], length=100)
        for _ in range(3):
            for number, batch in enumerate(loader):
                assert is_sample(batch, number)
                shared["batch"] = (batch, number)
                del batch
    finally:
        stop.set()
        thread.join()
    assert not wrong


@pytest.mark.rings_only
def test_a_fork_while_nothing_is_held_leaves_nothing():
    iterator = iter(ringloader.DataLoader(Filled(10, SIZES["slot"]), num_workers=1, batch_size=None))
    ours, theirs = multiprocessing.Pipe()
    before = proc.descriptors()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            theirs.send(proc.descriptors())
        os._exit(0)
    in_child = ours.recv()
    os.waitpid(pid, 0)
    # The child may have closed some: the main process's socket to a spawn server is nothing to it.
    assert in_child.items() <= before.items()
    assert before == proc.descriptors()
    ours.close()
    theirs.close()
    del iterator


@pytest.mark.rings_only
def test_no_descriptor_left_for_the_pipe(tmp_path):
    """If the fork's pipe cannot be had, nothing tells the child's end: its memory is never used again."""
    body = """
        import resource
        loader = DataLoader(Numbers(300), num_workers=1, batch_size=None)
        iterator = iter(loader)
        batch = next(iterator)
        address = batch.data_ptr()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        going, go = os.pipe()
        told, tell = os.pipe()
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, hard))
        pid = os.fork()
        if pid == 0:
            os.read(going, 1)
            os._exit(0 if bool((batch == 0).all()) else 1)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        del batch
        seen = set()
        for number, batch in enumerate(iterator, 1):
            assert bool((batch == number).all())
            seen.add(batch.data_ptr())
            del batch
        assert address not in seen
        os.write(go, b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        print("done")
    """
    ended = run_script("ringloader", body, tmp_path)
    assert (ended.code, ended.out, ended.err) == (0, "done\n", "")


def test_children_that_have_gone_leave_no_descriptor(make):
    """However many there were while one batch was held."""
    iterator = iter(loader_of(make, SIZES["slot"]))
    batch = next(iterator)
    before = len(descriptors())
    for _ in range(100):
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    assert len(descriptors()) <= before + 1
    assert is_sample(batch, 0)


def runs_programs(_index):
    """Runs a program, and returns how many descriptors the worker has."""
    # A function to call in the child makes Python fork.
    subprocess.run(["true"], preexec_fn=lambda: None, check=True)
    return torch.tensor(len(descriptors()))


def test_workers_that_fork_have_no_more_descriptors(make):
    numbers = [int(number) for number in make(Made(runs_programs, 30), num_workers=1, batch_size=None)]
    # Not one for each program.
    assert max(numbers) <= numbers[0] + 10


class ForksAndComesBack(Dataset):
    """At some samples the worker forks, and the child comes back into the worker loop."""

    def __init__(self, how):
        self.how = how

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index % 7 == 3 and os.fork() == 0 and self.how == "raise":
            raise ValueError("of the child")
        return torch.full((SIZES["slot"],), value_of(index), dtype=torch.uint8)


@pytest.mark.rings_only
@pytest.mark.parametrize("how", ["return", "raise"])
def test_a_workers_child_comes_back_into_the_loop(how):
    """With torch's queues it may answer too; here the rings are the worker's alone."""
    kept = []
    loader = ringloader.DataLoader(ForksAndComesBack(how), num_workers=2, batch_size=None)
    for number, batch in enumerate(loader):
        assert is_sample(batch, number)
        kept.append(batch)
    assert len(kept) == 40
    assert all(is_sample(batch, number) for number, batch in enumerate(kept))


def test_a_child_that_is_forked_while_the_interpreter_exits(loader_name, tmp_path):
    body = """
        import atexit, threading
        loader = DataLoader(Numbers(6), num_workers=1)
        list(loader)
        going, forked = threading.Event(), threading.Event()

        def fork():
            going.wait()
            pid = os.fork()
            if pid == 0:
                print(len(list(DataLoader(Numbers(6), num_workers=1))))
                sys.stdout.flush()
                os._exit(0)
            os.waitpid(pid, 0)
            forked.set()

        threading.Thread(target=fork, daemon=True).start()
        # Functions that were registered first come last: by then the exit is known.
        atexit._run_exitfuncs()
        going.set()
        forked.wait(40)
        os._exit(0)
    """
    ended = run_script(loader_name, body, tmp_path)
    assert (ended.code, ended.out) == (0, "6\n")


def _can_make_pid_namespaces():
    pid = os.fork()
    if pid == 0:
        os._exit(ctypes.CDLL(None).unshare(_CLONE_NEWPID) != 0)
    return os.waitpid(pid, 0)[1] == 0


_CLONE_NEWPID = 0x20000000


@pytest.mark.rings_only
@pytest.mark.skipif(not _can_make_pid_namespaces(), reason="needs the right to make pid namespaces")
def test_a_child_with_the_process_id_of_its_parent(tmp_path):
    """The first process of a pid namespace has the id 1, and so has that of the namespace within."""
    body = f"""
        import ctypes
        def first_of_a_namespace(function):
            assert ctypes.CDLL(None).unshare({_CLONE_NEWPID}) == 0
            pid = os.fork()
            if pid == 0:
                assert os.getpid() == 1
                try:
                    function()
                finally:
                    sys.stdout.flush()
                    os._exit(0)
            os.waitpid(pid, 0)

        def main():
            iterator = iter(DataLoader(Numbers(60), num_workers=1, batch_size=None))
            batch = next(iterator)
            def child():
                nonlocal batch
                try:
                    next(iterator)
                except AssertionError as error:
                    print(str(error)[:31])
                batch = None
                gc.collect()
            first_of_a_namespace(child)
            for number, later in enumerate(iterator, 1):
                assert bool((batch == 0).all()), "the child has given the parent's batch back"
                assert bool((later == number).all())
                del later
            print("done")

        first_of_a_namespace(main)
    """
    ended = run_script("ringloader", body, tmp_path)
    assert (ended.code, ended.out, ended.err) == (0, "can only test a child process: \ndone\n", "")
