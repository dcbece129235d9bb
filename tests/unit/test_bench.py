"""``python -m ringloader bench``: the user's loader as torch's and as ringloader's, compared and measured."""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import namedtuple
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset

import ringloader
from programs import client
from ringloader._bench import arguments, batches, child, command, measure, memory, results, target
from ringloader._bench.arguments import Configuration
from ringloader._bench.measure import Measurement
from ringloader._bench.target import RunError, Target, TargetError

pytestmark = pytest.mark.rings_only

TORCH, OURS = Configuration("torch", 2), Configuration("ringloader", 2)
THREADS = Configuration("ringloader", 2, "thread")
AUTO = Configuration("ringloader", "auto")


class Squares(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor(index**2)


class Once(IterableDataset):
    """Read once, as an open file."""

    def __init__(self):
        self.numbers = iter(range(6))

    def __iter__(self):
        return self.numbers


@dataclass
class Returning:
    """Stands for a target whose function was found."""

    make: Any
    asked: int | None = None

    def call(self, num_workers):
        self.asked = num_workers
        return self.make()


def rate_of(rate, *, step=0.0, memory=None):
    return Measurement(rate, 0.5, 1000, memory, step, "native", "", 2)


def error_of(words, capsys):
    with pytest.raises(SystemExit) as ended:
        arguments.parse(words)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture
def demo(tmp_path):
    """A file of the user's."""
    path = tmp_path / "demo.py"
    path.write_text(
        "import os, signal, sys, time\n"
        "import torch\n"
        "from torch.utils.data import DataLoader\n"
        "def make(num_workers=1):\n"
        "    return DataLoader(range(64), batch_size=4, shuffle=True, num_workers=num_workers)\n"
        "def fails():\n"
        "    raise ValueError('no data\\nat all')\n"
        "def ends():\n"
        "    sys.exit(3)\n"
        "def is_killed():\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "def waits():\n"
        "    print(os.getpid(), file=open('started', 'w'), flush=True)\n"
        "    time.sleep(60)\n"
        "number = 3\n"
        "if __name__ == '__main__':\n"
        "    hidden = make\n"
    )
    return path


# The command line.


def test_a_wrong_word_is_one_line(demo, tmp_path, capsys):
    good = f"{demo}:make"
    assert "can't open file 'nothing.py': no such file" in error_of(["nothing.py:make"], capsys)
    assert "'demo' is not FILE.py:NAME or module:NAME" in error_of(["demo"], capsys)
    assert "'1,x' is not a list of numbers" in error_of([good, "--workers", "1,x"], capsys)
    assert "'auto' has no number that auto can be compared with" in error_of(
        [good, "--workers", "auto"], capsys
    )
    assert "'fork' is not process, thread" in error_of([good, "--method", "fork"], capsys)
    assert "'0' is not a number from 1 on" in error_of([good, "--rounds", "0"], capsys)
    assert "'0' is not a number above 0" in error_of([good, "--seconds", "0"], capsys)
    for wrong in ("nan", "-1", "inf"):
        assert f"'{wrong}' is not a number from 0 on" in error_of([good, f"--step={wrong}"], capsys)
    for place in (tmp_path / "nowhere/out.json", tmp_path):
        assert f"cannot write a file '{place}'" in error_of([good, "--json", str(place)], capsys)
    assert "unrecognized arguments: --fast" in error_of([good, "--fast"], capsys)
    assert "the following arguments are required" in error_of([], capsys)


def test_the_defaults_are_those_of_the_issue(demo, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3))
    given = arguments.parse([f"{demo}:make"])
    assert (given.rounds, given.seconds, given.step, given.json, given.plot) == (3, 2, 0, None, None)
    assert [one.num_workers for one in given.configurations if one.loader == "torch"] == [0, 1, 2, 3]
    assert {one.worker_method for one in given.configurations} == {"multiprocessing"}
    assert arguments.parse([f"{demo}:make", "--step", "0"]).step == 0


def test_many_cores_are_not_tried_one_by_one():
    assert arguments._up_to(8) == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert arguments._up_to(48) == [*range(9), 16, 32, 48]


def test_threads_are_added_where_there_are_workers(demo):
    given = arguments.parse([f"{demo}:make", "--workers", "0,2", "--method", "process,thread", "--step", "5"])
    assert given.configurations == (
        Configuration("torch", 0),
        Configuration("ringloader", 0),
        TORCH,
        OURS,
        THREADS,
    )
    assert given.step == 0.005
    assert arguments.configurations([0], ["thread"])[1] == Configuration("ringloader", 0)


def test_a_loader_that_finds_its_number_is_measured_beside_the_others(demo):
    found = arguments.parse([f"{demo}:make", "--workers", "auto,1"]).configurations
    assert found == (Configuration("torch", 1), Configuration("ringloader", 1), AUTO)
    assert str(AUTO) == "ringloader with num_workers='auto'"
    measured = {AUTO: {0: rate_of(50)}, Configuration("ringloader", 1): {0: rate_of(10)}}
    rows = results.rows(measured)
    assert results.best(rows).configuration.number == 1
    assert results.recommended(rows)[0].configuration.number == 1
    assert "auto" in results.table(rows)


@pytest.mark.parametrize("is_auto", [False, True])
def test_the_number_of_such_a_loader_is_told(is_auto):
    def make():
        return ringloader.DataLoader(Squares(), num_workers="auto" if is_auto else 0)

    assert measure.measure(Returning(make), AUTO, 0.2, 0).num_workers >= 1
    if is_auto:
        loader = measure.make(Returning(make), Configuration("ringloader", 2))
        assert (loader.num_workers, loader.auto_workers, loader.seeding) == (2, False, "sample")


def test_a_plot_is_refused_before_anything_is_measured(monkeypatch, demo, capsys):
    monkeypatch.setattr(arguments.importlib.util, "find_spec", lambda _: None)
    assert "pip install 'ringloader[bench]'" in error_of([f"{demo}:make", "--plot", "a.png"], capsys)


# The target.


@pytest.fixture
def as_new(monkeypatch):
    """Puts back what a target changes in its process."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "modules", sys.modules.copy())


@pytest.mark.usefixtures("as_new")
def test_the_function_gets_the_number_of_workers_if_it_takes_it(demo, tmp_path):
    assert arguments.parse([f"{demo}:make"]).target.call(2).num_workers == 2
    assert sys.path[0] == str(tmp_path)
    assert sys.argv == [str(demo)]
    assert Target("unit.test_bench", "Squares").call(3)[2] == 4


@pytest.mark.parametrize(
    ("name", "line", "users"),
    [
        ("nothing", "demo.py has no 'nothing' (nothing under", ""),
        ("hidden", "demo.py has no 'hidden' (nothing under", ""),
        ("number", "demo.py:number is no function that returns a loader, but of <class 'int'>", ""),
        ("fails", "demo.py:fails fails: ValueError: no data", "in fails\n"),
        ("ends", "demo.py:ends fails: SystemExit: 3", "in ends\n"),
    ],
)
@pytest.mark.usefixtures("as_new")
def test_a_target_that_gives_no_loader_is_told(demo, name, line, users):
    with pytest.raises(TargetError) as raised:
        Target(str(demo), name).call(1)
    assert line in raised.value.text and "\n" not in raised.value.text
    assert users in raised.value.users and "_bench" not in raised.value.users


@pytest.mark.usefixtures("as_new")
def test_a_module_that_cannot_be_imported_is_told(tmp_path):
    with pytest.raises(TargetError, match="no_such cannot be imported: ModuleNotFoundError: No module named"):
        Target("no_such", "make").call(1)
    (tmp_path / "torch.py").touch()
    with pytest.raises(TargetError, match="'torch' is the name of another module; rename the file"):
        Target(str(tmp_path / "torch.py"), "make").call(1)


def test_an_error_of_a_worker_is_told_by_its_last_line():
    try:
        list(ringloader.DataLoader([None], num_workers=1))
    except TypeError as error:
        # pytest would keep its frames, and with them the worker.
        line, users = target.line_of(error), target.users_traceback(error)
    assert line.startswith("TypeError: default_collate: batch must contain")
    assert "Original Traceback" in users


# The loader.


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


def test_what_is_no_loader_is_told():
    with pytest.raises(TargetError, match="returns no DataLoader, but an object of <class 'list'>"):
        measure.make(Returning(list), TORCH)


# A measurement.


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
    before = memory.of_tree()
    with memory_file(64 << 20) as file, subprocess.Popen(["sleep", "60"]) as process:
        assert process.pid in memory.tree(os.getpid())
        assert memory.of_tree() - before > 60 << 20
        # A file that is mapped counts by its pages.
        mapped = torch.from_file(f"/proc/self/fd/{file}", shared=True, size=64 << 20, dtype=torch.uint8)
        assert memory.of_tree() - before < 60 << 20
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


@pytest.mark.parametrize(("step", "kind"), [(0, "dataset"), (0.02, "caller")])
def test_the_verdict_is_that_of_the_loader_with_its_step(step, kind):
    loader = TorchLoader(Asleep(), sampler=[0] * 100)
    started = time.perf_counter()
    found = measure.verdict(Returning(lambda: loader), Configuration("ringloader", 1), 0.3, step)
    assert time.perf_counter() - started < 5
    assert (found["kind"], set(found)) == (kind, {"kind", "text", "gain", "change"})


def test_the_verdict_on_short_epochs_is_that_of_the_last():
    kept = {"num_workers": 1, "persistent_workers": True}
    found = measure.verdict(
        Returning(lambda: TorchLoader(Asleep(), **kept)), Configuration("ringloader", 1), 0.5, 0
    )
    assert found["kind"] == "dataset"
    once = TorchLoader(Once())
    assert measure.verdict(Returning(lambda: once), Configuration("ringloader", 0), 30, 0)["text"]


# The comparison.

Point = namedtuple("Point", "x y")


class Graph:
    def __init__(self, x):
        self.x = x
        self.edges = {"index": torch.zeros(2, 9)}


class Textless(Graph):
    def __repr__(self):
        raise RuntimeError("it has no text")


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (torch.tensor([1, 2]), torch.tensor([1, 3]), ("batch 1", "Tensor torch.int64 (2,) [1, 2]")),
        (torch.zeros(20), -torch.zeros(20), ("batch 1", "Tensor torch.float32 (20,) ")),
        (torch.zeros(2, 3), torch.zeros(3, 2), ("batch 1", "Tensor torch.float32 (2, 3)")),
        (np.zeros(20, "f4"), np.zeros(20, "f8"), ("batch 1", "ndarray float32 (20,)")),
        ({"a": [1, "x"]}, {"a": [1, "y"]}, ("batch 1['a'][1]", "str 'x'")),
        ({"a": 1}, {"b": 1}, ("batch 1", "dict ['a']")),
        ([1, 2], [1], ("batch 1", "list of 2")),
        ([1, 2], (1, 2), ("batch 1", "list of 2")),
        (Point(0, 1), Point(0, 1.0), ("batch 1[1]", "int 1")),
        (Graph(1), Graph(2), ("batch 1.x", "int 1")),
        ({1, 2}, {1, 3}, ("batch 1", "set ['1', '2']")),
        (range(3), range(4), ("batch 1", "range range(0, 3)")),
        (bytearray(b"a"), bytearray(b"b"), ("batch 1", "bytearray bytearray(b'a')")),
        (Path("a"), Path("b"), ("batch 1", "PosixPath PosixPath('a')")),
        (np.array([Graph(1)]), np.array([Graph(2)]), ("batch 1[0].x", "int 1")),
        (Textless(1), Textless(2), ("batch 1.x", "int 1")),
        ({Textless(1): 1}, {Textless(1): 2}, ("batch 1[Textless]", "int 1")),
        (
            torch.eye(2).to_sparse(),
            torch.zeros(2, 2).to_sparse(),
            ("batch 1", "Tensor torch.float32 (2, 2) "),
        ),
    ],
)
def test_the_first_difference_is_told(one, other, told):
    def described(value):
        return [list(batches._parts(part, "")) for part in ([0], value)]

    assert batches.difference(described(one), described(one)) is None
    place, expected, got = batches.difference(described(one), described(other))
    assert place == told[0]
    assert expected.startswith(told[1])
    assert got != expected


def test_objects_with_their_addresses_are_equal_all_the_same():
    for kind in (lambda: {Graph(1)}, lambda: np.array([Graph(1)]), lambda: {Graph(1): 1}):
        first, second = ([list(batches._parts(kind(), ""))] for _ in range(2))
        assert batches.difference(first, second) is None


def test_what_has_no_elements_or_lacks_a_field_is_described():
    @dataclass
    class Lacking:
        there: int = 1
        missing: int = field(init=False)

    assert list(batches._parts([torch.empty(20, device="meta"), Lacking()], ""))[-1] == (
        "[1].missing",
        "NoneType None",
    )


def test_parts_that_lead_back_or_out_end_there():
    inside = Graph(1)
    inside.itself, inside.kind = [inside], Graph
    assert list(batches._parts(inside, "")) == [
        ("", "Graph"),
        (".x", "int 1"),
        (".edges", "dict ['index']"),
        (".edges['index']", next(batches._parts(torch.zeros(2, 9), ""))[1]),
        (".itself", "list of 1"),
        (".itself[0]", "the Graph that it is a part of"),
        (".kind", "Graph"),
    ]


def test_an_epoch_that_ends_early_is_a_difference():
    def described(length):
        loader = TorchLoader(range(length))
        return batches.described(Returning(lambda: loader), Configuration("torch", 0))

    assert len(described(30)) == 20
    assert batches.difference(described(3), described(3)) is None
    assert batches.difference(described(4), described(3))[::2] == ("batch 3", "nothing")


def test_a_slow_loader_is_compared_by_what_it_gives_in_time(monkeypatch):
    monkeypatch.setattr(batches, "_SECONDS", 0)
    loader = TorchLoader(range(9))
    found = batches.described(Returning(lambda: loader), Configuration("torch", 0))
    assert found == [[("", "Tensor torch.int64 (1,) [0]")]]


# The results.


def test_a_ratio_is_taken_inside_a_round_and_figures_are_medians():
    measured = {
        TORCH: {0: rate_of(10), 1: rate_of(100), 2: rate_of(1000)},
        OURS: {0: rate_of(20, memory=1), 1: rate_of(200, memory=3), 2: rate_of(1000)},
    }
    theirs, ours = results.rows(measured)
    assert (theirs.batches_per_second, ours.batches_per_second, ours.ratio) == (100, 200, 2)
    assert (theirs.memory_mb, ours.memory_mb) == (None, 2)
    assert ours.to_dict() == {
        "loader": "ringloader",
        "num_workers": 2,
        "worker_method": "multiprocessing",
        "batches_per_second": 200,
        "first_batch_seconds": 0.5,
        "main_cpu_us": 1000,
        "memory_mb": 2,
    }
    assert results.table([theirs, ours]).splitlines() == [
        "loader      workers  batches/s  ratio  first batch  main CPU/batch  memory",
        "torch             2        100      -       500 ms            1 ms       -",
        "ringloader        2        200   2.00       500 ms            1 ms    2 MB",
    ]


def recommended(rates, step=0.0):
    """Recommends for rates by the number of workers."""
    measured = {Configuration("ringloader", n): {0: rate_of(rate, step=step)} for n, rate in rates.items()}
    measured[Configuration("torch", 0)] = {0: rate_of(1e6)}
    row, reason = results.recommended(results.rows(measured))
    return row.configuration.num_workers, reason


def test_the_fewest_workers_near_the_best_rate_are_recommended():
    assert recommended({4: 100, 2: 96, 1: 90, 0: 20}) == (
        2,
        "the fewest workers within 5 % of the best rate: 96% of that with num_workers=4",
    )
    assert recommended({0: 20, 1: 90}) == (1, "the best rate")
    assert results.recommended([]) is None


def test_the_fewest_workers_that_hide_behind_the_step_are_recommended():
    # 10 ms are at most 100 batches a second.
    assert recommended({0: 50, 1: 95.5, 2: 99}, 0.01) == (
        1,
        "the fewest workers whose work the step hides; it took 10.0 ms",
    )
    assert recommended({0: 50, 1: 80}, 0.01) == (1, "the step never fills 95% of the time; the best rate")


# The command.


@pytest.fixture
def here(monkeypatch):
    """Has the command call its functions in this process."""
    monkeypatch.setattr(child, "call", lambda function, *given: function(*given))


def bench(make, *words, configurations=(TORCH, OURS)):
    given = arguments.parse(["unit.test_bench:Squares", "--rounds", "1", "--seconds", "0.05", *words])
    given = SimpleNamespace(**vars(given) | {"target": Returning(make), "configurations": configurations})
    return command.run(given)


@pytest.mark.usefixtures("here")
def test_equal_batches_are_said(capsys, tmp_path):
    assert bench(lambda: TorchLoader(Squares(), shuffle=True), "--json", str(tmp_path / "out.json")) == 0
    out, err = capsys.readouterr()
    assert "Batches: the first 12 of both loaders are equal, with num_workers=2." in out
    assert err == ""
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["same_batches"] is True
    assert [row["loader"] for row in found["rows"]] == ["torch", "ringloader"]
    assert found["recommended"] == {"num_workers": 2}
    assert f"Verdict with num_workers=2: {found['verdict']['text']}\n" in out
    assert "Recommended: num_workers=2: the best rate." in out


class Unlike(Squares):
    """Other samples with each loader that is made; the comparison makes torch's, ours, torch's."""

    made = 0

    def __init__(self, ours_from, torchs_from):
        number = Unlike.made
        Unlike.made += 1
        self.begins = ours_from if number == 1 else torchs_from if number > 1 else 99

    def __getitem__(self, index):
        return index + (100 if index >= self.begins else 0)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("torchs_from", [99, 5], ids=["torchs agree", "torchs differ later"])
def test_different_batches_are_exit_status_1(capsys, monkeypatch, tmp_path, torchs_from):
    monkeypatch.setattr(Unlike, "made", 0)
    assert bench(lambda: TorchLoader(Unlike(2, torchs_from)), "--json", str(tmp_path / "out.json")) == 1
    assert (
        "Batches: DIFFERENT with num_workers=2: at batch 2 torch has Tensor torch.int64 (1,) [2], "
        "ringloader Tensor torch.int64 (1,) [102]."
    ) in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["same_batches"] is False


@pytest.mark.usefixtures("here")
def test_batches_that_differ_with_torch_alone_are_not_comparable(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(Unlike, "made", 0)
    assert bench(lambda: TorchLoader(Unlike(5, 3)), "--json", str(tmp_path / "out.json")) == 0
    assert (
        "not comparable with num_workers=2: two runs of torch's own loader differ, at batch 3."
        in capsys.readouterr().out
    )
    assert json.loads((tmp_path / "out.json").read_text())["same_batches"] is None


def test_a_configuration_that_fails_is_named_and_the_others_are_measured(monkeypatch, capsys):
    def call(function, where, configuration, *given):
        if configuration.loader == "torch":
            raise RunError("its process was killed by SIGKILL")
        return function(where, configuration, *given)

    monkeypatch.setattr(child, "call", call)
    assert bench(lambda: TorchLoader(Squares())) == 0
    out = capsys.readouterr().out
    assert "Batches: not compared with num_workers=2, because one of the loaders failed." in out
    assert "torch with num_workers=2 failed: its process was killed by SIGKILL" in out


def test_if_nothing_is_measured_the_first_reason_is_the_error(monkeypatch, capsys):
    def call(*_):
        raise RunError("ValueError: bad sample", "traceback\n")

    monkeypatch.setattr(child, "call", call)
    assert bench(lambda: None) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "traceback",
        "python -m ringloader bench: error: ringloader with num_workers=2 failed: ValueError: bad sample",
    ]


@pytest.mark.usefixtures("here")
def test_a_loader_of_ours_that_ran_torchs_is_named(capsys, monkeypatch):
    monkeypatch.setenv("RINGLOADER", "off")
    assert bench(lambda: TorchLoader(Squares())) == 0
    assert "ringloader with num_workers=2 ran torch's own loader: RINGLOADER=off" in capsys.readouterr().out


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "rates.svg"
    assert arguments._picture(str(path)) == str(path)
    with pytest.raises(argparse.ArgumentTypeError, match="has no format of a picture"):
        arguments._picture("rates.txt")
    numbers = {0: 20, 2: 90}
    rows = [{Configuration("torch", n): {0: rate_of(rate)} for n, rate in numbers.items()}]
    rows += [{Configuration("ringloader", 0): {0: rate_of(30)}, THREADS: {0: rate_of(99)}}]
    results.draw(str(path), results.rows(rows[0] | rows[1]), "demo.py:make")
    assert "ringloader, threads" in path.read_text()


def test_progress_is_shown_on_a_terminal_only(monkeypatch, capsys):
    with command._progress(3) as begin:
        begin("torch")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda _: None)
    with command._progress(3) as begin:
        begin("torch")
    assert capsys.readouterr().err == "3 runs; with a progress bar: pip install 'ringloader[bench]'\n"


# Processes.

PROGRAM = """
import calls
from ringloader._bench import arguments, child, command

def told(function, *given):
    try:
        return child.call(function, *given)
    except Exception as error:
        return type(error).__name__, error.text, error.users

if __name__ == "__main__":
    words = ["demo.py:make", "--workers", "1", "--rounds", "1", "--seconds", "0.05", "--json", "out.json"]
    raise SystemExit(command.run(arguments.parse(words)) or print([told(*call) for call in calls.CALLS]))
"""
CALLS = """
import multiprocessing, os, signal, sys
from ringloader._bench.target import TargetError

def add(one, other):
    print("not shown")
    return one + other, multiprocessing.get_start_method()

def stop():
    raise TargetError("no loader", "traceback")

def fail():
    raise ValueError("bad", "sample")

def die():
    os.write(2, b"Aborted")
    os.kill(os.getpid(), signal.SIGKILL)

def leave():
    os._exit(4)

CALLS = [(add, 1, 2), (stop,), (fail,), (die,), (leave,)]
"""


@pytest.mark.slow
@pytest.mark.usefixtures("demo")
def test_each_measurement_has_a_process_which_returns_or_says_how_it_ended(tmp_path):
    (tmp_path / "calls.py").write_text(CALLS)
    (tmp_path / "program.py").write_text(PROGRAM)
    done = client.run(
        ["program.py"], timeout=50, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert (done.stderr, done.returncode) == ("", 0)
    assert "Batches: the first 16 of both loaders are equal, with num_workers=1." in done.stdout
    assert json.loads((tmp_path / "out.json").read_text())["recommended"] == {"num_workers": 1}
    added, stopped, failed, killed, left = ast.literal_eval(done.stdout.splitlines()[-1])
    assert added == (3, multiprocessing.get_context().get_start_method())
    assert stopped == ("TargetError", "no loader", "traceback")
    assert failed[:2] == ("RunError", "ValueError: ('bad', 'sample')") and "in fail\n" in failed[2]
    assert killed == ("RunError", "its process was killed by SIGKILL", "Aborted")
    assert left == ("RunError", "its process ended with exit code 4", "")


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
    assert not Path(f"/proc/{int(started.read_text())}").exists()


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.default_int_handler])
def test_an_interrupt_waits_for_a_start_unless_it_is_ignored(handler):
    before = signal.signal(signal.SIGINT, handler)
    steps = []
    try:
        raised = contextlib.nullcontext() if handler == signal.SIG_IGN else pytest.raises(KeyboardInterrupt)
        with raised, child._interrupts_wait():
            os.kill(os.getpid(), signal.SIGINT)
            steps.append("started")
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert steps == ["started"]


# A signal comes when the process runs and `start` has not read its number.
INTERRUPTED_START = """
import os, signal, sys, time
from multiprocessing import forkserver
from pathlib import Path
from ringloader._bench import arguments, command

read_signed = forkserver.read_signed

def interrupted(descriptor):
    forkserver.read_signed = read_signed
    while not Path("started").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), int(sys.argv[1]))
    return read_signed(descriptor)

if __name__ == "__main__":
    forkserver.read_signed = interrupted
    raise SystemExit(command.run(arguments.parse(["demo.py:waits"])))
"""


@pytest.mark.usefixtures("demo")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_process_starts_ends_it(tmp_path, number):
    (tmp_path / "program.py").write_text(INTERRUPTED_START)
    done = client.run(
        ["program.py", str(int(number))],
        timeout=50,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("", "python -m ringloader bench: interrupted\n")
    assert done.returncode == 130
    assert not Path(f"/proc/{int((tmp_path / 'started').read_text())}").exists()
