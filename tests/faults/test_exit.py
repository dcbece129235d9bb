"""The end of the interpreter, and children that the user forks: silent, whatever is still alive."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from faults.failing_datasets import Numbers
from faults.script import run_script
from parity.harness import assert_path

BODIES = {
    "persistent iterator and batches alive": """
        loader = DataLoader(Numbers(30), num_workers=2, persistent_workers=True)
        iterator = iter(loader)
        kept = [next(iterator), next(iterator)]
        arrays = [batch.numpy() for batch in kept]
        assert float(kept[1].sum()) == 3000
    """,
    "ordinary iterator alive": """
        loader = DataLoader(Numbers(30), num_workers=2)
        iterator = iter(loader)
        batch = next(iterator)
    """,
    "batches alive, loader gone": """
        kept = list(DataLoader(Numbers(30), num_workers=2))
    """,
    "in a function of a module that is torn down": """
        class Holder:
            def __del__(self):
                assert float(self.batch.sum()) == 0
        holder = Holder()
        holder.iterator = iter(DataLoader(Numbers(30), num_workers=2))
        holder.batch = next(holder.iterator)
        holder.me = holder
        sys.modules["held"] = holder
    """,
    "kept until after the modules are torn down": """
        os.kept = iter(DataLoader(Numbers(30), num_workers=2))
        batch = next(os.kept)
    """,
    "sys.exit in the loop": """
        for batch in DataLoader(Numbers(30), num_workers=2):
            sys.exit(0)
    """,
    "autograd holds a batch": """
        weight = torch.ones(3000, requires_grad=True)
        losses = [(batch * weight).sum() for batch in DataLoader(Numbers(8), num_workers=1)]
    """,
    "backward threads": """
        weight = torch.ones(3000, requires_grad=True)
        for batch in DataLoader(Numbers(8), num_workers=1):
            (batch * weight).sum().backward()
            del batch
    """,
}


@pytest.mark.parametrize("name", BODIES)
def test_exit_is_silent(loader_name, tmp_path, name):
    ended = run_script(loader_name, BODIES[name], tmp_path)
    assert (ended.code, ended.err) == (0, "")


def test_exit_while_a_thread_iterates(loader_name, tmp_path):
    """multiprocessing ends the workers first; with torch too, the thread may live to say so."""
    body = """
        import threading
        def walk():
            for batch in DataLoader(Numbers(10**7), num_workers=1):
                pass
        threading.Thread(target=walk, daemon=True).start()
        time.sleep(1)
    """
    ended = run_script(loader_name, body, tmp_path)
    assert ended.code == 0


@pytest.mark.rings_only
def test_exit_while_a_thread_copies(loader_name, tmp_path):
    """A thread that comes back to an interpreter that ends is ended in the middle of native code."""
    body = """
        import threading, warnings
        # Python 3.12 warns of a fork beside a thread.
        warnings.simplefilter("ignore", DeprecationWarning)
        ready, go = threading.Event(), threading.Event()
        def walk():
            most = 512 << 20
            loader = DataLoader(Numbers(6, 12 << 20), num_workers=1, batch_size=None, max_shared_bytes=most)
            iterator = os.kept = iter(loader)
            kept = [next(iterator) for _ in range(2)]
            while iterator._transport.engine.committed() == 0:
                time.sleep(0.01)
            ready.set()
            go.wait()
            # The user holds all that he may, so it is copied out.
            next(iterator)
        threading.Thread(target=walk, daemon=True).start()
        ready.wait()
        go.set()
        time.sleep(0.01)
    """
    ended = run_script(loader_name, body, tmp_path)
    assert (ended.code, ended.err) == (0, "")


def test_uncaught_error_in_the_loop(loader_name, tmp_path):
    body = """
        for batch in DataLoader(Numbers(30), num_workers=2):
            raise ZeroDivisionError("the user's own")
    """
    ended = run_script(loader_name, body, tmp_path)
    assert ended.code == 1
    assert ended.err.count("Traceback (most recent call last)") == 1
    assert ended.err.rstrip().endswith("ZeroDivisionError: the user's own")


def test_spawned_workers_of_a_script(loader_name, tmp_path):
    body = """
        if __name__ == "__main__":
            loader = DataLoader(Numbers(8), num_workers=1, multiprocessing_context="spawn")
            iterator = iter(loader)
            kept = list(iterator)
            assert [int(batch[0, 0]) for batch in kept] == list(range(8))
    """
    ended = run_script(loader_name, body, tmp_path)
    assert (ended.code, ended.err) == (0, "")


def in_child(function):
    """Runs `function` in a fork of this process; returns its exit code and what it wrote to stderr."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.dup2(writing, 2)
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.alarm(20)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            function()
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), said


@pytest.mark.rings_only
@pytest.mark.parametrize("persistent", [False, True])
def test_forked_child_drops_the_iterator(loader_class, persistent):
    """Torch prints "can only test a child process" there."""
    loader = loader_class(Numbers(40), num_workers=2, persistent_workers=persistent)
    held = {"loader": loader, "iterator": iter(loader)}
    assert_path(held["iterator"], 2)
    batch = next(held["iterator"])

    def drop():
        held["iterator"].__del__()
        held.clear()
        import gc

        gc.collect()

    del loader
    assert in_child(drop) == (0, "")
    rest = [int(later[0, 0]) for later in held["iterator"]]
    assert rest == list(range(1, 40))
    assert bool((batch == 0).all())


@pytest.mark.rings_only
@pytest.mark.parametrize("persistent", [False, True])
def test_forked_child_takes_nothing(loader_class, persistent):
    """torch's loader takes from the parent, and waits forever or raises this after five seconds."""
    loader = loader_class(Numbers(40), num_workers=2, persistent_workers=persistent)
    iterator = iter(loader)
    assert_path(iterator, 2)
    assert int(next(iterator)[0, 0]) == 0

    def take():
        for use in (lambda: next(iterator), lambda: iter(loader) if persistent else next(iterator)):
            with pytest.raises(AssertionError, match="can only test a child process"):
                use()

    assert in_child(take) == (0, "")
    assert [int(later[0, 0]) for later in iterator] == list(range(1, 40))


@pytest.mark.rings_only
def test_forked_child_drops_batches(loader_class):
    """A release in the child must give nothing back: the parent still holds the batch."""
    iterator = iter(loader_class(Numbers(60), num_workers=1))
    kept = [next(iterator) for _ in range(4)]

    def drop():
        assert all(bool((batch == number).all()) for number, batch in enumerate(kept))
        kept.clear()

    assert in_child(drop) == (0, "")
    rest = list(iterator)
    for number, batch in enumerate(kept + rest):
        assert bool((batch == number).all())


def test_forked_child_has_its_own_loader(loader_class):
    """A child made while the parent iterates starts workers of its own."""
    iterator = iter(loader_class(Numbers(30), num_workers=1))
    next(iterator)

    def own():
        torch.set_num_threads(1)
        values = [int(batch[0, 0]) for batch in loader_class(Numbers(5), num_workers=1)]
        assert values == list(range(5))

    code, _ = in_child(own)
    assert code == 0
    assert len(list(iterator)) == 29


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_what_a_process_was_sent_is_finalised_where_it_ends(tmp_path, method):
    """Torch's workers do so from 2.14 on; a forked one still has what its parent's loader holds."""
    body = f"""
        class Finalised(Numbers):
            def __iter__(self):
                return iter(range(4))
            def __del__(self):
                if multiprocessing.parent_process():
                    os.write(1, b"finalised ")

        if __name__ == "__main__":
            from ringloader import Dispatch, WorkerPool
            def run(dataset, **options):
                assert len(list(DataLoader(dataset, num_workers=2, **options))) == 4
                os.write(1, b"\\n")
            run(Finalised(4), multiprocessing_context="{method}")
            run(Dispatch(Finalised(4)), multiprocessing_context="{method}")
            with WorkerPool(2, "{method}") as pool:
                run(Finalised(4), worker_pool=pool)
    """
    ended = run_script("ringloader", body, tmp_path)
    assert ended.err == ""
    # A pool's process drops its dataset with the loader, or when it ends.
    of_loader, of_dispatch, *of_pool = [len(line.split()) for line in ended.out.split("\n")]
    assert (of_loader, of_dispatch, sum(of_pool)) == (2, 1, 2)
