"""The benchmark measures rates, memory and the verdict on a loader."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import time
import types

import pytest
import torch
from bench_parts import Returning, Squares
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset

from ringloader._features.stats.epoch import Verdict
from ringloader._tools.bench import child, measure
from ringloader._tools.bench.arguments import Configuration, TargetError

pytestmark = pytest.mark.rings_only


class Once(IterableDataset):
    """Read once, as an open file."""

    def __init__(self):
        self.numbers = iter(range(6))

    def __iter__(self):
        return self.numbers


def test_a_short_dataset_is_read_again_for_as_long_as_it_takes():
    made = TorchLoader(Squares(), batch_size=3, persistent_workers=True, num_workers=1)
    started = time.perf_counter()
    found = measure.measure(Returning(lambda: made), Configuration("ringloader", 1), 0.2, 0.01)
    assert time.perf_counter() - started > 0.2
    assert 4 < found.batches_per_second <= 100
    assert found.step >= 0.01
    assert 0 < found.main_cpu_us < 200_000
    assert found.path == "native"
    assert found.memory_mb > 50
    assert made._iterator is None


def test_a_source_that_is_read_once_counts_once():
    for size in (2, 6):
        started = time.perf_counter()
        loader = TorchLoader(Once(), batch_size=size)
        found = measure.measure(Returning(lambda loader=loader: loader), Configuration("torch", 0), 30, 0)
        assert time.perf_counter() - started < 20
        assert found.batches_per_second > 1
        assert found.path is None


def test_a_loader_without_batches_is_told():
    with pytest.raises(TargetError, match="a loader without batches"):
        measure.measure(Returning(lambda: TorchLoader([])), Configuration("torch", 0), 1, 0)


def test_memory_counts_the_processes_below_and_files_on_their_way():
    before = child.memory_of_tree()
    with memory_file(64 << 20) as file, subprocess.Popen(["sleep", "60"]) as process:
        assert process.pid in child.tree(os.getpid())
        assert child.memory_of_tree() - before > 60 << 20
        # A file that is mapped counts by its pages.
        mapped = torch.from_file(f"/proc/self/fd/{file}", shared=True, size=64 << 20, dtype=torch.uint8)
        assert child.memory_of_tree() - before < 60 << 20
        del mapped
        process.kill()


@contextlib.contextmanager
def memory_file(size):
    file = os.memfd_create("on its way")
    os.posix_fallocate(file, 0, size)
    yield file
    os.close(file)


class Asleep(Squares):
    def __getitem__(self, index):
        time.sleep(0.004)
        return index


# The verdict depends on how fast the machine is.
@pytest.mark.slow
@pytest.mark.parametrize(("step", "kind"), [(0, "dataset"), (0.02, "caller")])
def test_the_verdict_is_that_of_the_loader_with_its_step(step, kind):
    loader = TorchLoader(Asleep(), sampler=[0] * 100)
    started = time.perf_counter()
    found = measure.verdict(Returning(lambda: loader), Configuration("ringloader", 1), 0.3, step)
    assert time.perf_counter() - started < 5
    assert (found["kind"], set(found)) == (kind, {"kind", "text", "gain", "change"})


def test_the_verdict_on_short_epochs_is_that_of_the_last(monkeypatch):
    """In a time that each look at the clock makes 10 ms longer."""
    now = itertools.count()
    monkeypatch.setattr(measure, "time", types.SimpleNamespace(perf_counter=lambda: next(now) / 100))
    epochs = []

    def epoch_stats(loader):
        epochs.append(loader)
        return types.SimpleNamespace(verdict=Verdict("dataset", f"of epoch {len(epochs)}"))

    with monkeypatch.context() as patched:
        patched.setattr(measure, "epoch_stats", epoch_stats)
        found = measure.verdict(
            Returning(lambda: TorchLoader(Asleep(), sampler=[0] * 2)), Configuration("ringloader", 0), 0.05, 0
        )
    assert found["text"] == f"of epoch {len(epochs)}" and len(epochs) > 2
    once = TorchLoader(Once())
    assert measure.verdict(Returning(lambda: once), Configuration("ringloader", 0), 30, 0)["text"]
