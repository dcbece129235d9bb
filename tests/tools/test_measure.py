"""The benchmark makes the user's loader again with other workers, and measures it in a process of its own."""

from __future__ import annotations

import ast
import contextlib
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import types
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from bench_parts import OURS, THREADS, TORCH, Returning, Squares, write_demo
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset

import ringloader
from programs import client
from ringloader._features.stats.epoch import Verdict
from ringloader._tools import bench, measure
from ringloader._tools.bench import Configuration, Target

pytestmark = pytest.mark.rings_only


@pytest.fixture
def demo(tmp_path):
    return write_demo(tmp_path)


def test_the_function_gets_the_number_of_workers_if_it_takes_it(demo, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    assert Target(str(demo), "make").call(2).num_workers == 2
    assert sys.path[0] == str(demo.parent)
    assert sys.argv == [str(demo)]
    assert Target("tools.bench_parts", "Squares").call(3)[2] == 4
    with pytest.raises(AttributeError, match="'demo' has no attribute 'hidden'"):
        Target(str(demo), "hidden").call(1)


@pytest.mark.parametrize("make", [TorchLoader, ringloader.DataLoader], ids=["torchs", "ours"])
@pytest.mark.parametrize("wanted", [TORCH, OURS, THREADS], ids=["torch", "processes", "threads"])
def test_any_loader_runs_as_any_other(make, wanted):
    given = make(Squares(), batch_size=5, shuffle=True)
    loader = measure.make(Returning(lambda: given), wanted)
    assert loader is given and loader.prefetch_factor == 2
    iterator = iter(loader)
    module = type(iterator).__module__.split(".")[0]
    assert module == wanted.loader
    if wanted.loader == "ringloader":
        assert ringloader.report(loader).path == {"thread": "threads"}.get(wanted.worker_method, "native")
    assert sorted(torch.cat(list(iterator)).tolist()) == [number**2 for number in range(12)]


def test_arguments_that_need_workers_do_not_hinder_a_loader_without():
    asked = Returning(
        lambda: TorchLoader(
            Squares(),
            num_workers=1,
            persistent_workers=True,
            prefetch_factor=3,
            timeout=9,
            multiprocessing_context="spawn",
        )
    )
    for loader in ("torch", "ringloader"):
        assert len(list(measure.make(asked, Configuration(loader, 0)))) == 12
        # The function may make such a loader only with workers.
        assert asked.asked == 1


def test_what_the_program_has_installed_does_not_make_torchs_loader_ours():
    ringloader.install()
    try:
        loader = measure.make(Returning(lambda: TorchLoader(Squares())), Configuration("torch", 0))
        assert type(iter(loader)).__module__.startswith("torch.")
    finally:
        ringloader.uninstall()


def test_what_gives_no_batches_is_told():
    with pytest.raises(TypeError, match="make must return a DataLoader, not <class 'list'>"):
        measure.make(Returning(list), TORCH)
    with pytest.raises(ValueError, match="make returns a loader without batches"):
        measure.described(Returning(lambda: TorchLoader([])), Configuration("torch", 0))


Point = namedtuple("Point", "x y")


class Graph:
    def __init__(self, x):
        self.x = x
        self.edges = {"index": torch.zeros(2, 9)}


def described(value):
    return [measure._parts(part) for part in ([0], value)]


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (torch.tensor([1, 2]), torch.tensor([1, 3]), ("batch 1", "Tensor torch.int64 (2,) tensor([1, 2])")),
        (torch.zeros(20), -torch.zeros(20), ("batch 1", "Tensor torch.float32 (20,) ")),
        (torch.zeros(2, 3), torch.zeros(3, 2), ("batch 1", "Tensor torch.float32 (2, 3)")),
        (np.zeros(20, "f4"), np.zeros(20, "f8"), ("batch 1", "ndarray float32 (20,)")),
        ({"a": [1, "x"]}, {"a": [1, "y"]}, ("batch 1['a'][1]", "str 'x'")),
        ({"a": 1}, {"b": 1}, ("batch 1", "TreeSpec(dict, ['a'], [*])")),
        ([1, 2], [1], ("batch 1", "TreeSpec(list, None, [*, *])")),
        ([1, 2], (1, 2), ("batch 1", "TreeSpec(list, None")),
        (Point(0, 1), Point(0, 1.0), ("batch 1.y", "int 1")),
        (Graph(1), Graph(2), ("batch 1", "Graph <")),
        ({1, 2}, {1, 3}, ("batch 1", "set {1, 2}")),
        (np.array([Graph(1)]), np.array([Graph(2)]), ("batch 1", "ndarray object (1,)")),
        (
            torch.eye(2).to_sparse(),
            torch.zeros(2, 2).to_sparse(),
            ("batch 1", "Tensor torch.float32 (2, 2) "),
        ),
    ],
)
def test_the_first_difference_is_told(one, other, told):
    assert bench.difference(described(one), described(one)) is None
    place, expected, got = bench.difference(described(one), described(other))
    assert place == told[0]
    assert expected.startswith(told[1])
    assert got != expected


def test_parts_are_equal_whatever_holds_them():
    name = "".join(["na", "me"])
    base = torch.arange(40.0).reshape(8, 5)
    for one, other in (
        (Graph(1), Graph(1)),
        ([name, name], [name, "name"]),
        (base.T, base.T.contiguous()),
        (base[:2], base[:2].clone()),
        (base.numpy()[:, :2], base.numpy()[:, :2].copy(order="F")),
        (torch.empty(20, device="meta"), torch.empty(20, device="meta")),
        (lambda: 1, lambda: 2),
    ):
        assert bench.difference(described(one), described(other)) is None


def test_an_epoch_that_ends_early_is_a_difference():
    def of(length):
        loader = TorchLoader(range(length))
        return measure.described(Returning(lambda: loader), Configuration("torch", 0))

    assert len(of(30)) == 20
    assert bench.difference(of(3), of(3)) is None
    assert bench.difference(of(4), of(3))[::2] == ("batch 3", "nothing")


def test_a_slow_loader_is_compared_by_what_it_gives_in_time(monkeypatch):
    monkeypatch.setattr(measure, "_SECONDS", 0)
    loader = TorchLoader(range(9))
    found = measure.described(Returning(lambda: loader), Configuration("torch", 0))
    assert len(found) == 1


class Once(IterableDataset):
    """Read once, as an open file."""

    def __init__(self):
        self.numbers = iter(range(6))

    def __iter__(self):
        return self.numbers


def test_a_short_dataset_is_read_again_for_as_long_as_it_takes():
    made = TorchLoader(Squares(), batch_size=3, persistent_workers=True, num_workers=1)
    started = time.perf_counter()
    figures, workers, torchs = measure.measure(
        Returning(lambda: made), Configuration("ringloader", 1), 0.2, 0.01
    )
    assert time.perf_counter() - started > 0.2
    assert 4 < figures.batches_per_second <= 100
    assert figures.step >= 0.01
    assert 0 < figures.main_cpu_us < 200_000
    assert figures.memory_mb > 50
    assert (workers, torchs, made._iterator) == (1, None, None)


def test_a_source_that_is_read_once_counts_once():
    for size in (2, 6):
        started = time.perf_counter()
        loader = TorchLoader(Once(), batch_size=size)
        found = measure.measure(Returning(lambda loader=loader: loader), Configuration("torch", 0), 30, 0)
        assert time.perf_counter() - started < 20
        assert found.figures.batches_per_second > 1


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
    assert found.kind == kind


def test_the_verdict_on_short_epochs_is_that_of_the_last(monkeypatch):
    """In a time that each look at the clock makes 10 ms longer."""
    now = itertools.count()
    clock = types.SimpleNamespace(perf_counter=lambda: next(now) / 100, sleep=lambda _: None)
    monkeypatch.setattr(measure, "time", clock)
    epochs = []

    def epoch_stats(loader):
        epochs.append(loader)
        return types.SimpleNamespace(verdict=Verdict("dataset", f"of epoch {len(epochs)}"))

    with monkeypatch.context() as patched:
        patched.setattr(measure, "epoch_stats", epoch_stats)
        found = measure.verdict(
            Returning(lambda: TorchLoader(Asleep(), sampler=[0] * 2)), Configuration("ringloader", 0), 0.05, 0
        )
    assert found.text == f"of epoch {len(epochs)}" and len(epochs) > 2
    once = TorchLoader(Once())
    assert measure.verdict(Returning(lambda: once), Configuration("ringloader", 0), 30, 0).text


PROGRAM = """
import calls
from ringloader._tools import measure

def told(function, *given):
    try:
        return measure.call(function, *given)
    except Exception as error:
        return type(error).__name__, error.text, error.more

if __name__ == "__main__":
    print([told(*call) for call in calls.CALLS])
"""
CALLS = """
import multiprocessing, os, signal, subprocess, sys
from ringloader._tools import measure

def add(one, other):
    print("not shown")
    return one + other, multiprocessing.get_start_method()

def fail():
    raise ValueError("bad\\nsample")

def leave():
    sys.exit(3)

def die():
    os.write(2, b"Aborted")
    os.kill(os.getpid(), signal.SIGKILL)

def end():
    os._exit(4)

def begin():
    before = measure.memory()
    child = subprocess.Popen(["sleep", "60"])
    return measure.memory() > before, child.pid

CALLS = [(add, 1, 2), (fail,), (leave,), (die,), (end,), (begin,)]
"""


@pytest.mark.slow
def test_each_measurement_has_a_process_which_returns_or_says_how_it_ended(tmp_path):
    (tmp_path / "calls.py").write_text(CALLS)
    (tmp_path / "program.py").write_text(PROGRAM)
    done = client.run(
        ["program.py"], timeout=150, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert (done.stderr, done.returncode) == ("", 0)
    added, failed, left, killed, ended, (has_grown, pid) = ast.literal_eval(done.stdout)
    assert added == (3, multiprocessing.get_context().get_start_method())
    assert failed[:2] == ("BenchError", "ValueError: bad") and "in fail\n" in failed[2]
    assert left[:2] == ("BenchError", "SystemExit: 3")
    assert killed == ("BenchError", "its process ended with signal 9 (Killed)", "Aborted")
    assert ended == ("BenchError", "its process ended with exit code 4", "")
    assert has_grown, "the memory of its children counts"
    assert is_gone(pid), "none of them is left"


def is_gone(pid):
    """True once a process has ended. Nobody may wait for it but the system."""
    for _ in range(400):
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX":
                time.sleep(0.05)
                continue
        return True
    return False


@pytest.mark.slow
def test_the_command(demo):
    words = ["-m", "ringloader", "bench", "demo.py:make", "--workers", "1", "--rounds", "1", "--seconds", "0"]
    done = client.run(
        words, timeout=150, cwd=demo.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert (done.stderr, done.returncode) == ("", 0)
    assert "Batches: the first 16 of both loaders are equal, with num_workers=1." in done.stdout
    assert "Recommended: num_workers=1: the best rate." in done.stdout
    words[3] = "demo.py:fails"
    done = client.run(
        words, timeout=150, cwd=demo.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert (done.stdout, done.returncode) == ("", 2)
    *_, last = done.stderr.splitlines()
    assert last == f"{bench.NAME}: error: ringloader with num_workers=1 failed: ValueError: no data"
    assert "in fails\n" in done.stderr


@pytest.mark.usefixtures("demo")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_of_its_processes(tmp_path, number):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    words = ["-m", "ringloader", "bench", "demo.py:waits"]
    process = client.start(words, env=dict(os.environ), cwd=tmp_path, **pipes)
    started = tmp_path / "started"
    for _ in range(400):
        if started.exists() and started.read_text():
            break
        time.sleep(0.1)
    os.kill(process.pid, number)
    assert process.communicate(timeout=20) == ("", "python -m ringloader bench: interrupted\n")
    assert process.returncode == 130
    assert is_gone(int(started.read_text()))
