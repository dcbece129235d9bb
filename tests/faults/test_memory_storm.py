"""Forks, drops, views, shares and writes at random, in parent and children: every byte stays what it is.

`STORM_SECONDS=600` makes each round longer; a round that fails names the `STORM_SEED` that begins with it.
"""

from __future__ import annotations

import contextlib
import gc
import io
import multiprocessing
import os
import random
import signal
import threading
import time
import traceback
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import ringloader
from parity.datasets import identity
from small_datasets import Made

KIBI = 1 << 10
SIZES = (3 * KIBI, 40 * KIBI, 200 * KIBI, 900 * KIBI)
SECONDS = float(os.environ.get("STORM_SECONDS", "4"))


def sized(index):
    """Sample `i` has a size and a byte by its number, never zero: that is memory that was given back."""
    return torch.full((SIZES[index % len(SIZES)],), index + 1, dtype=torch.uint8)


class Held:
    """One batch, by its tensor and by views of its memory, and the byte that all of it must be."""

    def __init__(self, tensor, value):
        self.tensor = tensor
        self.views = []
        self.value = value
        # True if its tensor lies in other memory than its views, as after sharing it.
        self.moved = False
        # Children that have it too.
        self.children = set()

    def add_view(self, kind):
        if self.tensor is not None and not self.moved:
            self.views.append(VIEWS[kind](self.tensor))

    def share(self, how):
        if self.tensor is not None:
            SHARES[how](self.tensor)
            self.moved = True

    def write(self, value):
        if self.tensor is not None and not self.moved:
            _bytes_of(self.tensor).fill(value)
            self.value = value

    def is_right(self):
        parts = [self.tensor, *self.views]
        return all(bool((_bytes_of(part) == self.value).all()) for part in parts if part is not None)


def _bytes_of(part):
    return part.numpy() if isinstance(part, torch.Tensor) else np.asarray(part)


VIEWS = {
    "array": lambda tensor: tensor.numpy(),
    "part of an array": lambda tensor: tensor.numpy()[7:],
    "memoryview": lambda tensor: memoryview(tensor.numpy()),
    "slice": lambda tensor: tensor[5:].numpy(),
    "dlpack": lambda tensor: np.from_dlpack(tensor),
    "tensor by dlpack": lambda tensor: torch.from_dlpack(tensor),
    "transposed": lambda tensor: tensor.view(2, -1).t().numpy(),
}
SHARES = {
    "share_memory_": lambda tensor: tensor.share_memory_(),
    "pickled": lambda tensor: ForkingPickler(io.BytesIO()).dump(tensor),
    "storage": lambda tensor: tensor.untyped_storage().share_memory_(),
}


class Child:
    """A child with all that is held at the fork."""

    def __init__(self, held):
        self._pipe, theirs = multiprocessing.Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            with contextlib.suppress(BaseException):
                self._serve(theirs, list(held))
            os._exit(1)
        theirs.close()

    def _serve(self, pipe, held):
        while True:
            task, number, value = pipe.recv()
            if task == "write":
                held[number].write(value)
            elif task == "drop":
                held[number] = Held(None, 1)
                gc.collect()
            pipe.send(all(one.is_right() for one in held))

    def ask(self, task, number=0, value=0):
        self._pipe.send((task, number, value))
        return self._pipe.recv()

    def end(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._pipe.close()


class Storm:
    def __init__(self, make, seed):
        self.random = random.Random(seed)
        self.make = make
        self.loaders = [self._loader(), self._loader()]
        self.iterators = [iter(loader) for loader in self.loaders]
        self.numbers = [0, 0]
        self.held = []
        # Each with what it has, in the order in which it has it.
        self.children = []
        self.steps = 0

    def _loader(self):
        return self.make(
            Made(sized, 60),
            num_workers=self.random.choice((1, 2)),
            batch_size=None,
            collate_fn=identity,
            persistent_workers=self.random.random() < 0.5,
        )

    def step(self):
        self.steps += 1
        actions = (
            (self.take, 12),
            (self.view, 5),
            (self.drop, 6),
            (self.share, 2),
            (self.write, 2),
            (self.fork, 1),
            (self.let_child_write, 2),
            (self.let_child_drop, 1),
            (self.end_child, 0.6),
            (self.drop_in_thread, 1),
        )
        self.random.choices([action for action, _ in actions], [weight for _, weight in actions])[0]()
        if self.steps % 5 == 0:
            self.check()

    def take(self):
        which = self.random.randrange(2)
        batch = next(self.iterators[which], None)
        if batch is None or self.random.random() < 0.01:
            self.iterators[which] = None
            if self.random.random() < 0.3:
                self.loaders[which] = self._loader()
            self.iterators[which] = iter(self.loaders[which])
            self.numbers[which] = 0
            return
        self.numbers[which] += 1
        assert batch.numel() == SIZES[(self.numbers[which] - 1) % len(SIZES)]
        held = Held(batch, self.numbers[which])
        assert held.is_right(), "a batch arrived changed"
        if self.random.random() < 0.6:
            self.held.append(held)
        while len(self.held) > 12:
            self.drop()

    def _one(self):
        return self.random.choice(self.held) if self.held else None

    def view(self):
        held = self._one()
        if held is not None:
            held.add_view(self.random.choice(list(VIEWS)))

    def drop(self):
        """The tensor, a view, or all."""
        held = self._one()
        if held is None:
            return
        kind = self.random.random()
        if kind < 0.4:
            held.tensor = None
        elif kind < 0.6 and held.views:
            held.views.pop(self.random.randrange(len(held.views)))
        if kind >= 0.6 or (held.tensor is None and not held.views):
            self.held.remove(held)
            held.tensor, held.views = None, []

    def drop_in_thread(self):
        if self.held:
            gone = [self.held.pop(self.random.randrange(len(self.held)))]

            def drop():
                one = gone.pop()
                one.tensor, one.views = None, []

            thread = threading.Thread(target=drop)
            thread.start()
            thread.join()

    def share(self):
        held = self._one()
        if held is not None:
            held.share(self.random.choice(list(SHARES)))

    def write(self):
        held = self._one()
        # A tensor that a child has too is one memory, or two: that depends on the size.
        if held is not None and not held.children:
            held.write(self.random.randrange(1, 255))

    def fork(self):
        if len(self.children) < 3:
            child = Child(self.held)
            self.children.append((child, list(self.held)))
            for held in self.held:
                held.children.add(child)

    def _ask(self, task, may):
        """Of something that its child alone has."""
        if self.children:
            child, had = self.random.choice(self.children)
            numbers = [number for number, held in enumerate(had) if may(held)]
            if numbers:
                number = self.random.choice(numbers)
                assert child.ask(task, number, self.random.randrange(1, 255)), "a child found a batch changed"

    def let_child_write(self):
        self._ask("write", lambda held: held not in self.held and len(held.children) == 1)

    def let_child_drop(self):
        self._ask("drop", lambda held: len(held.children) == 1)

    def end_child(self):
        if self.children:
            child, had = self.children.pop(self.random.randrange(len(self.children)))
            assert child.ask("check"), "a child found a batch changed"
            child.end()
            for held in had:
                held.children.discard(child)

    def check(self):
        for held in self.held:
            assert held.is_right(), "the parent found a batch changed"
        for child, _ in self.children:
            assert child.ask("check"), "a child found a batch changed"

    def end(self):
        for child, _ in self.children:
            child.end()


@pytest.mark.limit(60 + 4 * SECONDS)
@pytest.mark.parametrize("path", [pytest.param("torch", marks=pytest.mark.slow), "native"])
def test_every_byte_stays_what_it_is(path, loader_name):
    if path != "torch" and loader_name == "torch":
        pytest.skip("says nothing about torch's own loader")
    seed = int(os.environ.get("STORM_SEED", time.time_ns() % 1_000_000))

    def ours(*args, **kwargs):
        return ringloader.DataLoader(*args, max_shared_bytes=4 << 20, **kwargs)

    # In a process of its own: torch's loader loses descriptors where an epoch is abandoned.
    pid = os.fork()
    if pid == 0:
        code = 1
        # The threads of OpenMP do not survive a fork: a copy by more than one thread would wait for them.
        torch.set_num_threads(1)
        try:
            rage(DataLoader if path == "torch" else ours, seed)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def rage(make, seed):
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        storm = Storm(make, seed)
        try:
            while storm.steps < 600 and time.monotonic() < end:
                storm.step()
            storm.check()
        except AssertionError as error:
            error.add_note(f"STORM_SEED={seed}, step {storm.steps}")
            raise
        finally:
            storm.end()
        seed += 1
