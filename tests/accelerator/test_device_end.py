"""The end of a loader, of a fork's child and of the interpreter while copies to a device are under way."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from accelerator import pretend
from accelerator.copies import SIZES, drain
from accelerator.moved import (
    LARGE,
    LATE_US,
    Numbered,
    assert_numbered,
    loader_on,
    path,
    registrar,
)
from faults.proc import wait_until
from ringloader._features.device import device

pytestmark = [pytest.mark.rings_only, pytest.mark.usefixtures("registrar")]

__all__ = ["path", "registrar"]


class Held:
    """A transform that says when it runs and waits; `then` is called before it returns."""

    def __init__(self, then=lambda: None):
        self.begun, self.released, self.then = threading.Event(), threading.Event(), then
        self.calls = 0

    def __call__(self, batch):
        self.calls += 1
        self.begun.set()
        self.released.wait(30)
        self.then()
        return batch


def with_registered_slots(loader):
    """An iterator whose slots have been used so often that batches are copied out of them."""
    iterator = iter(loader)
    for number in range(16):
        assert_numbered(next(iterator), number)
    assert pretend.counters()["registered_bytes"] > 0
    return iterator


def ended_by(loader, iterator):
    """Returns the outcome in another thread, which runs a transform when the loader is shut down."""
    got = []
    before = pretend.counters()["registered_bytes"]

    def take():
        try:
            got.append(next(iterator))
        except Exception as error:
            got.append(str(error))

    taking = threading.Thread(target=take)
    taking.start()
    yield
    ending = threading.Thread(target=loader.shutdown)
    ending.start()
    # The shutdown has to wait for the transform.
    ending.join(0.3)
    assert pretend.counters()["registered_bytes"] >= before > 0
    yield
    ending.join(20)
    taking.join(20)
    assert not ending.is_alive() and not taking.is_alive()
    yield got


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_shutdown_in_another_thread_waits_for_the_transform_and_the_copies(prefetch):
    pretend.set_poison(True)
    transform = Held()
    transform.released.set()
    loader = loader_on(
        "native",
        Numbered(40, (LARGE,)),
        num_workers=2,
        device_transform=transform,
        device_prefetch=prefetch,
    )
    iterator = with_registered_slots(loader)
    # Behind the batches ahead, whose transform has run, come the others of the four that are asked for.
    ahead = transform.calls - 16
    assert wait_until(lambda: ahead + iterator._transport.engine.committed() == 4, 20)
    transform.begun.clear()
    transform.released.clear()
    pretend.set_delay(LATE_US)
    steps = ended_by(loader, iterator)
    next(steps)
    assert transform.begun.wait(20)
    next(steps)
    transform.released.set()
    (got,) = next(steps)
    assert "ended by DataLoader.shutdown" in got
    pretend.set_delay(0)
    pretend.synchronize()
    assert pretend.violations() == []
    assert pretend.counters()["registered_bytes"] == 0


def test_a_transform_that_shuts_its_loader_down():
    """Below its own call nothing can wait for it: the copies are waited for nevertheless, and noted."""
    pretend.set_poison(True)
    calls = []

    def shut_down():
        calls.append(None)
        if len(calls) == 23:
            # The copies of the next batch, and no others.
            pretend.set_delay(5 * LATE_US)
        if len(calls) == 24:
            pretend.set_delay(0)
            loader.shutdown()
            assert pretend.violations() == []
            assert pretend.counters()["registered_bytes"] == 0

    transform = Held(shut_down)
    transform.released.set()
    loader = loader_on(
        "native", Numbered(40, (LARGE,)), num_workers=2, device_transform=transform, device_prefetch=2
    )
    iterator = with_registered_slots(loader)
    with pytest.raises(RuntimeError, match=r"ended by DataLoader\.shutdown"):
        for _ in range(10):
            next(iterator)
    pretend.synchronize()
    assert pretend.violations() == []


@pytest.mark.parametrize("method", ["abandon", "close"])
def test_an_interrupt_of_the_end_does_not_skip_its_wait(method, monkeypatch):
    pretend.set_poison(True)
    loader = loader_on("native", Numbered(40, (LARGE,)), num_workers=2, prefetch_factor=4, device_prefetch=4)
    iterator = with_registered_slots(loader)
    found, calls = getattr(device.Moving, method), []

    def interrupted(moving):
        calls.append(None)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return found(moving)

    monkeypatch.setattr(device.Moving, method, interrupted)
    time.sleep(0.1)
    with pretend.delayed(LATE_US):
        next(iterator)
        with pytest.raises(KeyboardInterrupt):
            loader.shutdown()
    assert len(calls) == 2
    pretend.synchronize()
    assert pretend.violations() == []
    assert pretend.counters()["registered_bytes"] == 0


def test_a_forked_child_touches_nothing():
    iterator = iter(loader_on("native", Numbered(12, SIZES), num_workers=2, prefetch_factor=4))
    assert_numbered(next(iterator), 0)
    time.sleep(0.2)
    assert_numbered(next(iterator), 1)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with contextlib.suppress(AssertionError):
                next(iterator)
                os._exit(2)
            del iterator
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert drain(iterator, 2) == 12
    assert pretend.violations() == []


@pytest.mark.parametrize(
    "ending", ["", pytest.param("del loader", marks=pytest.mark.slow), "keep = [iterator, loader]"]
)
@pytest.mark.parametrize("persistent", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_interpreter_that_exits_with_batches_under_way(ending, persistent):
    script = f"""
        import sys
        from accelerator import pretend
        pretend.load()
        from accelerator.moved import Numbered, Registrar, loader_on
        from ringloader._features.device import registration
        registration.registrars[pretend.NAME] = Registrar()
        options = dict(num_workers=2, persistent_workers={persistent})
        loader = loader_on("native", Numbered(40, (100, 300000)), **options)
        list(loader)
        iterator = iter(loader)
        pretend.set_delay(50000)
        first, second = next(iterator), next(iterator)
        {ending}
    """
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": tests},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
