"""``python -m ringloader bench``: its words, its figures, what it prints and how it ends."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest
from bench_parts import AUTO, OURS, THREADS, TORCH, Returning, Squares, rate_of, write_demo
from torch.utils.data import DataLoader as TorchLoader

import ringloader
from ringloader._features.stats.epoch import Verdict
from ringloader._tools import bench, measure
from ringloader._tools.bench import BenchError, Configuration

pytestmark = pytest.mark.rings_only


def parse(words):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(words)


def error_of(words, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.fixture
def demo(tmp_path):
    return write_demo(tmp_path)


def test_a_wrong_word_is_one_line(demo, tmp_path, capsys):
    good = f"{demo}:make"
    assert "can't open file 'nothing.py': no such file" in error_of(["nothing.py:make"], capsys)
    assert "'demo' is not FILE.py:NAME or module:NAME" in error_of(["demo"], capsys)
    for wrong in ("1,x", "auto", "", "-1"):
        assert f"'{wrong}' is not a list of numbers" in error_of([good, f"--workers={wrong}"], capsys)
    for wrong in ("0", "1,x", ""):
        assert f"'{wrong}' is not a list of numbers" in error_of([good, f"--concurrency={wrong}"], capsys)
    for place in (tmp_path / "nowhere/out.json", tmp_path):
        assert f"cannot write a file '{place}'" in error_of([good, "--json", str(place)], capsys)
    assert "invalid choice: 'fork'" in error_of([good, "--method", "fork"], capsys)
    assert "'0' is not a number from 1 on" in error_of([good, "--rounds", "0"], capsys)
    assert "invalid number value: 'x'" in error_of([good, "--seconds", "x"], capsys)
    for wrong in ("nan", "-1"):
        assert f"'{wrong}' is not a number from 0 on" in error_of([good, f"--step={wrong}"], capsys)
    assert "unrecognized arguments: --fast" in error_of([good, "--fast"], capsys)
    assert "the following arguments are required" in error_of([], capsys)


def test_the_defaults(demo, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3))
    given = parse([f"{demo}:make"])
    assert (given.rounds, given.seconds, given.step) == (3, 2, 0)
    assert (given.workers, given.method) == ([0, 1, 2, 3], "process")


def test_many_cores_are_not_tried_one_by_one():
    assert bench._up_to(8) == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert bench._up_to(48) == [*range(9), 16, 32, 48]


def test_threads_are_added_where_there_are_workers():
    assert bench.configurations([0, 2], ["multiprocessing", "thread"]) == [
        Configuration("torch", 0),
        Configuration("ringloader", 0),
        TORCH,
        OURS,
        THREADS,
    ]
    assert bench.configurations([0], ["thread"])[1] == Configuration("ringloader", 0)


@pytest.mark.usefixtures("here")
def test_samples_at_once_are_measured_beside_torch(capsys, tmp_path):
    path = tmp_path / "out.json"
    make = partial(TorchLoader, Store(), batch_size=16)
    assert run(make, workers=[1], seconds=0.3, concurrency=[1, 16], json=path) == 0
    printed = capsys.readouterr().out
    assert "1, 16 at once" in printed
    assert "Recommended: num_workers=1, worker_concurrency=16: the best rate." in printed
    found = json.loads(path.read_text())
    assert [row["worker_concurrency"] for row in found["rows"]] == [None, 1, 16]
    assert found["recommended"] == {"num_workers": 1, "worker_concurrency": 16}


def test_a_loader_that_finds_its_number_is_measured_beside_the_others(demo):
    found = bench.configurations(parse([f"{demo}:make", "--workers", "auto,1"]).workers, ["multiprocessing"])
    assert found == [Configuration("torch", 1), Configuration("ringloader", 1), AUTO]
    assert str(AUTO) == "ringloader with num_workers='auto'"
    measured = {AUTO: [rate_of(50)], Configuration("ringloader", 1): [rate_of(10)]}
    rows = bench.rows_of(measured)
    assert bench.fastest_of(rows) is rows[1]
    assert bench.recommended_of(rows, rows[1])[0] is rows[1]
    assert "auto" in bench.table(rows)


@pytest.mark.parametrize("is_auto", [False, True])
def test_the_number_of_such_a_loader_is_told(is_auto):
    def make():
        return ringloader.DataLoader(Squares(), num_workers="auto" if is_auto else 0)

    assert measure.measure(Returning(make), AUTO, 0.2, 0).num_workers >= 1
    if is_auto:
        loader = measure.make(Returning(make), Configuration("ringloader", 2))
        assert (type(loader.num_workers), loader.num_workers, loader.seeding) == (int, 2, "sample")


def test_a_ratio_is_taken_inside_a_round_and_figures_are_medians():
    measured = {
        TORCH: [rate_of(10), rate_of(100), rate_of(1000)],
        OURS: [rate_of(20, memory=1), rate_of(200, memory=3)],
    }
    theirs, ours = bench.rows_of(measured)
    assert (theirs.figures.batches_per_second, ours.figures.batches_per_second, ours.ratio) == (100, 110, 2)
    assert (theirs.to_dict()["memory_mb"], ours.figures.memory_mb) == (None, 2)
    assert ours.to_dict() == {
        "loader": "ringloader",
        "num_workers": 2,
        "worker_method": "multiprocessing",
        "worker_concurrency": None,
        "batches_per_second": 110,
        "first_batch_seconds": 0.5,
        "main_cpu_us": 1000,
        "memory_mb": 2,
    }
    assert bench.table([theirs, ours]).splitlines() == [
        "loader      workers  batches/s  ratio  first batch  main CPU/batch  memory",
        "torch             2        100      -       500 ms            1 ms       -",
        "ringloader        2        110   2.00       500 ms            1 ms    2 MB",
    ]


def recommended(rates, step=0.0):
    """Recommends for rates by the number of workers."""
    measured = {Configuration("ringloader", n): [rate_of(rate, step=step)] for n, rate in rates.items()}
    measured[Configuration("torch", 0)] = [rate_of(1e6)]
    rows = bench.rows_of(measured)
    row, reason = bench.recommended_of(rows, bench.fastest_of(rows))
    return row.configuration.num_workers, reason


def test_the_fewest_workers_near_the_best_rate_are_recommended():
    assert recommended({4: 100, 2: 96, 1: 90, 0: 20}) == (
        2,
        "the fewest workers within 5 % of the best rate: 96% of that with num_workers=4",
    )
    assert recommended({0: 20, 1: 90}) == (1, "the best rate")
    assert bench.fastest_of([]) is None


def test_the_fewest_workers_that_hide_behind_the_step_are_recommended():
    # 10 ms are at most 100 batches a second.
    assert recommended({0: 50, 1: 95.5, 2: 99}, 0.01) == (
        1,
        "the fewest workers whose work the step hides; it took 10.0 ms",
    )
    assert recommended({0: 50, 1: 80}, 0.01) == (1, "the step never fills 95% of the time; the best rate")


@pytest.fixture
def here(monkeypatch):
    """Has the command call its functions in this process."""
    monkeypatch.setattr(measure, "call", lambda function, *given: function(*given))


class Store:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.005)
        return float(index)


def run(make, **given):
    given = {
        "workers": [2],
        "method": "process",
        "concurrency": [None],
        "seconds": 0.05,
        "json": None,
    } | given
    return bench.run(SimpleNamespace(target=Returning(make), rounds=1, step=0, **given), measure.run)


@pytest.mark.usefixtures("here")
def test_equal_batches_are_said(capsys, tmp_path):
    assert run(lambda: TorchLoader(Squares(), shuffle=True), json=tmp_path / "out.json") == 0
    out, err = capsys.readouterr()
    assert "Batches: the first 12 of both loaders are equal, with num_workers=2." in out
    assert err == ""
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["same_batches"] is True
    assert [row["loader"] for row in found["rows"]] == ["torch", "ringloader"]
    assert found["recommended"] == {"num_workers": 2}
    assert f"\nVerdict with num_workers=2: {found['verdict']['text']}\n" in out
    assert set(found["verdict"]) == {"kind", "text", "gain", "change"}
    assert "Recommended: num_workers=2: the best rate." in out


@pytest.mark.usefixtures("here")
def test_one_number_is_recommended(capsys, monkeypatch):
    text = (
        "The dataset is the limit: 3.0 ms a batch, 99% of it. Use more workers: num_workers=7 makes it fast."
    )
    monkeypatch.setattr(measure, "verdict", lambda *_: Verdict("dataset", text, 3.0, {"num_workers": 7}))
    assert run(lambda: TorchLoader(Squares())) == 0
    out = capsys.readouterr().out
    assert "Verdict with num_workers=2: The dataset is the limit: 3.0 ms a batch, 99% of it.\n" in out
    assert "num_workers=7" not in out and out.count("Recommended: num_workers=2") == 1
    monkeypatch.setattr(measure, "verdict", lambda *_: Verdict("dataset", text, None, {"in_order": False}))
    assert run(lambda: TorchLoader(Squares())) == 0
    assert text in capsys.readouterr().out, "another option that bench does not measure"


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
def test_different_batches_are_exit_status_1(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(Unlike, "made", 0)
    assert run(lambda: TorchLoader(Unlike(2, 99)), json=tmp_path / "out.json") == 1
    assert json.loads((tmp_path / "out.json").read_text())["same_batches"] is False
    assert (
        "Batches: DIFFERENT with num_workers=2: at batch 2 torch has Tensor torch.int64 (1,) tensor([2]), "
        "ringloader Tensor torch.int64 (1,) tensor([102])."
    ) in capsys.readouterr().out


@pytest.mark.usefixtures("here")
def test_batches_that_differ_with_torch_alone_are_not_comparable(capsys, monkeypatch):
    monkeypatch.setattr(Unlike, "made", 0)
    assert run(lambda: TorchLoader(Unlike(5, 3))) == 0
    assert (
        "not comparable with num_workers=2: two runs of torch's own loader differ, at batch 3."
        in capsys.readouterr().out
    )


def test_a_configuration_that_fails_is_named_and_the_others_are_measured(monkeypatch, capsys):
    def call(function, where, configuration, *given):
        if configuration.loader == "torch":
            raise BenchError("its process was killed by SIGKILL")
        return function(where, configuration, *given)

    monkeypatch.setattr(measure, "call", call)
    assert run(lambda: TorchLoader(Squares())) == 0
    out = capsys.readouterr().out
    assert "Batches: not compared with num_workers=2, because one of the loaders failed." in out
    assert "torch with num_workers=2 failed: its process was killed by SIGKILL" in out


def test_if_nothing_is_measured_the_first_reason_is_the_error(monkeypatch, capsys):
    def call(*_):
        raise BenchError("ValueError: bad sample", "traceback\n")

    monkeypatch.setattr(measure, "call", call)
    assert run(lambda: None) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "traceback",
        "python -m ringloader bench: error: ringloader with num_workers=2 failed: ValueError: bad sample",
    ]


@pytest.mark.usefixtures("here")
def test_a_loader_of_ours_that_ran_torchs_is_named(capsys, monkeypatch):
    monkeypatch.setenv("RINGLOADER", "off")
    assert run(lambda: TorchLoader(Squares())) == 0
    assert "ringloader with num_workers=2 ran torch's own loader: RINGLOADER=off" in capsys.readouterr().out


def test_progress_is_shown_on_a_terminal_only(demo, monkeypatch, capsys):
    monkeypatch.setattr(measure, "call", lambda *_: None)
    running = bench._Bench(parse([f"{demo}:make"]), measure.run)
    running._call("measure", TORCH)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    running._call("measure", TORCH)
    assert capsys.readouterr().err == "running torch with num_workers=2: measure\n"
