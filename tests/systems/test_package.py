"""The package: what is imported, the data that workers are sent, the ways in, and what needs Linux."""

import copy
import pickle
import runpy
import sys
import textwrap
import types
from pathlib import Path

import numpy
import pytest
import torch
from torch.utils.data import TensorDataset

import ringloader
import ringloader._native as _native
from docs import blocks
from parity import harness
from ringloader import (
    CachedDataset,
    DataLoader,
    SharedArray,
    SharedList,
    StatefulDataLoader,
    WorkerPool,
    report,
)
from ringloader._torch import select_path
from systems import lacking, parts


@pytest.fixture
def run(monkeypatch, capfd, tmp_path):
    """Runs a program in this process, which has torch already. Returns its exit code and what it prints."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run_program(text, *words):
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(text))
        monkeypatch.setattr(sys, "argv", ["", *(word.replace("PROGRAM", str(path)) for word in words)])
        capfd.readouterr()
        try:
            if words:
                runpy.run_module("ringloader", run_name="__main__")
            else:
                runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            return end.code, "".join(capfd.readouterr())
        return 0, "".join(capfd.readouterr())

    return run_program


def test_the_wheel_is_what_is_tested(system):
    assert Path(ringloader.__file__).is_relative_to(sys.prefix)
    assert [name for name in vars(_native) if not name.startswith("__")] == ["SUPPORTED"]
    assert system in lacking.SYSTEMS


def test_what_the_system_lacks_is_refused_to_ringloader(system):
    module = types.ModuleType("ringloader.another")
    for text in (
        "import fcntl; fcntl.F_ADD_SEALS",
        "import os; os.memfd_create",
        "from os import pidfd_open",
        "open('/proc/self/stat')",
        "from pathlib import Path; Path('/proc/self/stat').read_text()",
        *(["import resource", "import multiprocessing.popen_fork"] if system == "win32" else []),
        *(["from multiprocessing import forkserver", "import os; os.register_at_fork"] * (system == "win32")),
    ):
        with pytest.raises((AttributeError, ImportError, FileNotFoundError)):
            exec(text, vars(module))
    exec("import os, sys; from multiprocessing import reduction; os.getpid()", vars(module))
    assert module.sys.platform == system
    assert Path("/proc/self/stat").exists()


def test_every_name_of_the_package_is_there():
    assert all(getattr(ringloader, name) is not None for name in ringloader.__all__)


def test_the_first_program_of_the_readme_runs(run):
    """Workers are spawned, and import the program."""
    page = blocks.read(blocks.ROOT / "README.md")
    printed = run("\n".join(page.program) + "\n")
    assert printed == (0, "torch: this platform has no memfd; shared-memory rings need Linux\n")


CASES = [
    lambda: {"batch_size": 3},
    lambda: {"batch_size": 4, "shuffle": True, "generator": torch.Generator().manual_seed(3)},
    lambda: {"batch_size": None},
    lambda: {"batch_size": 4, "drop_last": True},
    lambda: {"sampler": [3, 1, 2], "batch_size": 2},
    lambda: {"batch_sampler": [[3, 1], [], [2]]},
    lambda: {"batch_size": 2, "prefetch_factor": 3},
    lambda: {"sampler": [1, 99]},
]


def test_without_workers_it_is_torchs_loader():
    dataset = TensorDataset(torch.arange(10), torch.rand(10))
    for arguments in CASES:
        case = harness.Case(lambda arguments=arguments: {"dataset": dataset, **arguments()}, epochs=2, take=2)
        harness.compare(DataLoader, case)


def test_a_shared_list_is_a_list():
    plain = ["a", b"b", None, 2.5, [1, {"c": (2,)}], torch.tensor(3)]
    made = SharedList(plain)
    assert (len(made), made[0], made[-2], made[1:4]) == (6, "a", [1, {"c": (2,)}], [b"b", None, 2.5])
    assert list(reversed(made[:2])) == [b"b", "a"] and made.index(None) == 2 and "a" in made
    assert type(made[::2]) is SharedList and made[::2] == SharedList(["a", None, [1, {"c": (2,)}]])
    made[4].append(5)
    assert made[4] == [1, {"c": (2,)}]
    assert copy.deepcopy(made) is made and SharedList(made).is_same(made)
    again = pickle.loads(pickle.dumps(made))
    assert again[:5] == plain[:5] and again.nbytes == made.nbytes
    with pytest.raises(IndexError):
        made[6]
    with pytest.raises(ValueError, match="'x' is not in list"):
        made.index("x")
    with pytest.raises(pickle.PicklingError, match="item 1, of type function, cannot be pickled"):
        SharedList([1, lambda: 0])
    assert len(SharedList()) == 0 and not SharedList()
    linux = b"cringloader._data.lists\n_of_bytes\n(cringloader\nSharedList\nS'x'\ntR."
    with pytest.raises(pickle.UnpicklingError, match="pickled on Linux cannot be read on this system"):
        pickle.loads(linux)


def test_a_shared_array_is_an_array():
    made = SharedArray((2, 3), "int16")
    made[1] = 7
    assert made.tolist() == [[0, 0, 0], [7, 7, 7]] and type(made[0]) is numpy.ndarray
    assert type(pickle.loads(pickle.dumps(made))) is SharedArray
    assert numpy.array_equal(pickle.loads(pickle.dumps(made[:, ::2])), made[:, ::2])
    assert SharedArray.from_rows(iter([[1.5], [2]])).tolist() == [[1.5], [2.0]]
    assert SharedArray.from_rows([]).shape == (0,) and SharedArray((0, 4)).nbytes == 0
    assert SharedArray.from_rows([[], []]).shape == (2, 0)
    assert (SharedArray(numpy.arange(3)) + 1).tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="row 1 has the shape"):
        SharedArray.from_rows([[1], [1, 2]])
    with pytest.raises(TypeError, match="use SharedList"):
        SharedArray([object()])
    with pytest.raises(ValueError, match="a dimension is negative"):
        SharedArray((-1,))


def test_a_cached_dataset_keeps_samples_in_its_process():
    calls = []

    class Counted(parts.Numbers):
        def __getitem__(self, index):
            calls.append(index)
            if index == 2:
                raise KeyError(index)
            return {"sample": super().__getitem__(index), "name": str(index)}

    cached = CachedDataset(Counted(4))
    first = cached[0]
    first["sample"].fill_(9)
    assert [int(cached[0]["sample"]) for _ in range(3)] == [0, 0, 0]
    for _ in range(2):
        with pytest.raises(KeyError):
            cached[2]
    assert calls == [0, 2, 2]
    stats = cached.stats()
    assert (stats["items"], stats["hits"], stats["misses"], stats["full"]) == (1, 3, 1, False)
    assert copy.copy(cached).stats() == stats
    cached.clear()
    assert cached.stats()["items"] == 0 and int(cached[0]["sample"]) == 0
    small = CachedDataset(Counted(4), max_bytes=10)
    assert int(small[1]["sample"]) == int(small[1]["sample"]) == 1
    assert small.stats()["items"] == 0
    with pytest.raises(IndexError):
        cached[4]


def test_a_file_of_cached_samples_needs_linux(tmp_path):
    with pytest.raises(
        ValueError, match=r"CachedDataset keeps samples in a file only on Linux, and got path="
    ):
        CachedDataset(parts.Numbers(), path=tmp_path / "samples")
    assert not (tmp_path / "samples").exists()


def test_a_loader_with_states_needs_linux():
    with pytest.raises(RuntimeError, match=r"StatefulDataLoader needs Linux: on this system use torchdata's"):
        StatefulDataLoader(parts.Numbers())


def test_iterators_pause_and_loaders_shut_down():
    loader = DataLoader(parts.Numbers(), batch_size=3)
    iterator = iter(loader)
    iterator.limit(1)
    assert [batch.tolist() for batch in iterator] == [[0, 1, 2]]
    iterator.resume()
    assert next(iterator).tolist() == [3, 4, 5]
    assert loader.call_workers(len) == [10]
    loader.shutdown()
    with pytest.raises(RuntimeError, match="was ended by"):
        next(iterator)
    loader.set_epoch(3)
    assert len(list(loader)) == 4
    assert (
        repr(loader)
        == "<DataLoader of Numbers (10 samples): batch_size=3, num_workers=0, path single-process>"
    )


def test_on_linux_the_log_says_that_another_wheel_is_wanted(monkeypatch):
    monkeypatch.setattr(select_path, "sys", types.SimpleNamespace(platform="linux"))
    reason = select_path._without_rings()
    assert (
        reason.text == "this is ringloader's wheel for other systems than Linux, without shared-memory rings"
    )
    assert reason.warning is not None and "pip install --no-binary ringloader ringloader" in reason.warning


def test_a_pool_takes_what_it_takes_on_linux(system):
    assert (WorkerPool(3).num_workers, repr(WorkerPool(2))) == (3, "ringloader.WorkerPool(2)")
    if system == "win32":
        with pytest.raises(ValueError, match=r"start_method must be one of .*spawn.*, not 'fork'"):
            WorkerPool(1, start_method="fork")
    with pytest.raises(ValueError, match="num_workers must be positive"):
        WorkerPool(0)
    with WorkerPool(2) as pool:
        loader = ringloader.convert(torch.utils.data.DataLoader(parts.Numbers()), worker_pool=pool)
    assert loader.num_workers == 2


def test_install_takes_its_place_and_leaves_it():
    loader = torch.utils.data.DataLoader(parts.Numbers(), batch_size=3)
    with ringloader.installed(on_error="skip"):
        assert len(list(loader)) == 4
        assert report(loader).path == "single-process"
    ringloader.install(on_error="skip")
    try:
        loader = torch.utils.data.DataLoader(parts.Numbers(), num_workers=1)
        with pytest.raises(
            RuntimeError, match=r"on_error cannot take effect .*shared-memory rings need Linux"
        ):
            iter(loader)
    finally:
        ringloader.uninstall()


def test_installing_a_loader_with_states_needs_linux():
    with pytest.raises(RuntimeError, match=r"install\(\) got stateful=True, which needs Linux"):
        ringloader.install(stateful=True)


def test_a_program_is_run(run, monkeypatch):
    text = """
        import torch, ringloader
        loader = torch.utils.data.DataLoader(range(4), batch_size=2)
        print([batch.tolist() for batch in loader], ringloader.report(loader).path)
    """
    # Each is set, and so put back.
    monkeypatch.setenv("RINGLOADER_INSTALL", "0")
    try:
        assert run(text, "run", "PROGRAM") == (0, "[[0, 1], [2, 3]] single-process\n")
    finally:
        ringloader.uninstall()
    code, printed = run(text, "run", "--stateful", "True", "PROGRAM")
    assert code == 2 and "ringloader run got stateful=True, which needs Linux" in printed


def test_the_doctor_says_what_there_is():
    found = ringloader.doctor(rate=False)
    assert not found.problems
    (path,) = (one for one in found.findings if one.subject == "path")
    assert (path.value, path.verdict) == ("torch", "note") and "need Linux" in path.meaning


def test_bench_needs_linux(run):
    code, printed = run("from torch.utils.data import DataLoader", "bench", "PROGRAM:loader")
    assert code == 2 and "bench compares torch's loader with ringloader's, which needs Linux" in printed
