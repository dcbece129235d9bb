"""`pin_memory=True` where processes fork, end and are interrupted, with batches and copies under way."""

from __future__ import annotations

import textwrap

import pytest
import torch

from accelerator import pretend
from accelerator.pinned import IS_NAMED
from faults.script import run_script

# A script is a process of its own: the accelerator has to be made that of it too.
PROLOGUE = f"""
import warnings
from accelerator import pretend
from accelerator.pinned import PIN, Sized, told
from parity.datasets import identity
pretend.load()
# Said by torch 2.6, in its pinning thread.
warnings.filterwarnings("ignore", "The argument 'device' of Tensor")
MIB = 1 << 20
options = dict(PIN, batch_size=None, collate_fn=identity)
def check(batch, index):
    assert batch.is_pinned()
    assert torch.equal(batch, told(index, batch.numel())), index
NAME = {pretend.NAME!r}
"""

SIZES = {"small": "[10] * 40", "large": "[MIB] * 40", "mixed": "[10, MIB] * 20"}


def run(loader_name, body, tmp_path):
    """Runs it to its end, which must be a silent one."""
    ended = run_script(loader_name, PROLOGUE + textwrap.dedent(body), tmp_path)
    assert not ended.err, ended.err
    assert ended.code == 0


ENDS = {
    "live iterator": """
        iterator = iter(DataLoader(Sized(SIZES), num_workers=2, **options))
        check(next(iterator), 0)
    """,
    "live iterator, all that can be ahead is": """
        iterator = iter(DataLoader(Sized(SIZES), num_workers=2, **options))
        check(next(iterator), 0)
        time.sleep(0.3)
        check(next(iterator), 1)
    """,
    "persistent workers": """
        loader = DataLoader(Sized(SIZES), num_workers=2, persistent_workers=True, **options)
        for epoch in range(2):
            for index, batch in enumerate(loader):
                check(batch, index)
                if index == 5:
                    break
    """,
    "batches alive, loader gone": """
        kept = list(DataLoader(Sized(SIZES), num_workers=2, **options))
        for index, batch in enumerate(kept):
            check(batch, index)
    """,
    "kept until after the modules are torn down": """
        os.kept = iter(DataLoader(Sized(SIZES), num_workers=2, **options))
        os.batch = next(os.kept)
    """,
    "sys.exit in the loop": """
        for batch in DataLoader(Sized(SIZES), num_workers=2, **options):
            sys.exit(0)
    """,
    "copies to the device under way": """
        pretend.set_delay(300_000)
        loader = DataLoader(Sized(SIZES), num_workers=2, **options)
        os.copies = [batch.to(NAME, non_blocking=True) for batch in loader]
    """,
    "several iterators": """
        iterators = [iter(DataLoader(Sized(SIZES), num_workers=1, **options)) for _ in range(3)]
        for iterator in iterators:
            check(next(iterator), 0)
    """,
}


@pytest.mark.parametrize("sizes", ["mixed"])
@pytest.mark.parametrize("name", ENDS)
def test_exit_is_silent(loader_name, tmp_path, name, sizes):
    run(loader_name, ENDS[name].replace("SIZES", SIZES[sizes]), tmp_path)


def test_exit_while_a_thread_iterates(loader_name, tmp_path):
    body = """
        import threading
        def walk():
            for batch in DataLoader(Sized([10, MIB] * 10**5), num_workers=1, **options):
                pass
        threading.Thread(target=walk, daemon=True).start()
        time.sleep(1)
    """
    # With torch too, the thread may live to say that its workers have ended.
    assert run_script(loader_name, PROLOGUE + textwrap.dedent(body), tmp_path).code == 0


FORK = """
    loader = DataLoader(Sized(SIZES), num_workers=2, PERSISTENT **options)
    iterator = iter(loader)
    kept = next(iterator)
    time.sleep(0.2)
    def in_child(function):
        child = os.fork()
        if child == 0:
            function()
            # Past the exit handlers of multiprocessing, which would end the parent's workers.
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    def looks():
        check(kept, 0)
        assert torch.ones(3).sum() == 3
    def drops():
        global iterator, kept, loader
        del iterator, kept, loader
        gc.collect()
    def loads():
        global iterator, loader
        del iterator, loader
        assert len(list(DataLoader(Sized([10] * 4), num_workers=1, batch_size=None))) == 4
    for function in (looks, drops, loads):
        in_child(function)
    for index, batch in enumerate(iterator, 1):
        check(batch, index)
    assert index == 39
    PERSISTENT_AGAIN
    assert not pretend.violations()
"""


@pytest.mark.parametrize(("sizes", "persistent"), [("small", False), ("large", False), ("mixed", True)])
def test_fork_with_a_live_iterator(loader_name, tmp_path, sizes, persistent):
    """A child may use the batches that it inherits, drop what it inherits, and load without pinning."""
    body = FORK.replace("SIZES", SIZES[sizes])
    body = body.replace("PERSISTENT_AGAIN", "assert len(list(loader)) == 40" if persistent else "")
    body = body.replace("PERSISTENT ", "persistent_workers=True, " if persistent else "")
    run(loader_name, body, tmp_path)


@pytest.mark.parametrize("sizes", ["small", "large"])
def test_control_c(loader_name, tmp_path, sizes):
    """An interrupt ends the loop, and the next epoch has nothing of it."""
    body = """
        import threading
        loader = DataLoader(Sized(SIZES * 50), num_workers=2, **options)
        ended = 0
        for turn in range(5):
            interrupt = threading.Timer(0.02 * turn, lambda: os.kill(os.getpid(), signal.SIGINT))
            try:
                for index, batch in enumerate(loader):
                    if index == 0:
                        # Not before: Python's own handlers of forks do not stand it.
                        interrupt.start()
                    check(batch, index)
                time.sleep(5)
            except KeyboardInterrupt:
                ended += 1
            # What the interrupted call leaves hangs in the traceback.
            gc.collect()
        assert ended == 5
        for index, batch in enumerate(DataLoader(Sized(SIZES), num_workers=2, **options)):
            check(batch, index)
    """.replace("SIZES", SIZES[sizes])
    run(loader_name, body, tmp_path)


@pytest.mark.rings_only
@pytest.mark.skipif(IS_NAMED, reason="torch's own thread pins")
def test_the_device_stays_untouched_until_it_is_needed(loader_name, tmp_path):
    """A program that only makes loaders can still fork and use the device there, as with torch's loader."""
    body = """
        assert not torch.pretend.is_initialized()
        loader = DataLoader(Sized([10] * 4), num_workers=2, **options)
        assert not torch.pretend.is_initialized()
    """
    run(loader_name, body, tmp_path)


# The copier's thread begins with the first large tensor: what it could race with is made likely.
@pytest.mark.parametrize("turns", [6, pytest.param(30, marks=pytest.mark.slow)])
def test_iterators_that_are_dropped_in_the_middle(loader_class, turns):
    from accelerator.pinned import PIN, Sized, told
    from parity.datasets import identity

    pretend.set_poison(True)
    loader = loader_class(
        Sized([300 << 10, 2 << 20, 10] * 6), num_workers=2, batch_size=None, collate_fn=identity, **PIN
    )
    kept = []
    for turn in range(turns):
        for index, batch in enumerate(loader):
            kept.append((index, batch))
            if index == turn % 7:
                break
    for index, batch in kept:
        assert torch.equal(batch, told(index, batch.numel()))
