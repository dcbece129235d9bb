"""The benchmark finds the user's loader, and makes it again with other workers."""

from __future__ import annotations

import sys

import pytest
import torch
from bench_parts import OURS, THREADS, TORCH, Returning, Squares, write_demo
from torch.utils.data import DataLoader as TorchLoader

import ringloader
from ringloader._tools.bench import arguments, measure
from ringloader._tools.bench.arguments import Configuration, Target, TargetError

pytestmark = pytest.mark.rings_only


@pytest.fixture
def demo(tmp_path):
    return write_demo(tmp_path)


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
    assert Target("tools.bench_parts", "Squares").call(3)[2] == 4


@pytest.mark.parametrize(
    ("name", "line", "users"),
    [
        ("nothing", "demo.py has no 'nothing' (nothing under", ""),
        ("hidden", "demo.py has no 'hidden' (nothing under", ""),
        ("number", "demo.py:number must be a function that returns a loader, not <class 'int'>", ""),
        ("fails", "demo.py:fails fails: ValueError: no data", "in fails\n"),
        ("ends", "demo.py:ends fails: SystemExit: 3", "in ends\n"),
    ],
)
@pytest.mark.usefixtures("as_new")
def test_a_target_that_gives_no_loader_is_told(demo, name, line, users):
    with pytest.raises(TargetError) as raised:
        Target(str(demo), name).call(1)
    assert line in raised.value.text and "\n" not in raised.value.text
    assert users in raised.value.users and "_tools" not in raised.value.users


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
        line, users = arguments.line_of(error), arguments.users_traceback(error)
    assert line.startswith("TypeError: default_collate: batch must contain")
    assert "Original Traceback" in users


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
    with pytest.raises(TargetError, match="must return a DataLoader, not <class 'list'>"):
        measure.make(Returning(list), TORCH)
