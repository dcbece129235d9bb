"""``python -m ringloader run``: as python itself would, with ringloader installed."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest

from install.python import STATE, Python
from install.test_environment import CHILDREN
from ringloader._features.table import TABLE
from ringloader._patch import by_name

pytestmark = pytest.mark.rings_only

PROGRAM = """\
import json, sys
import __main__
def known(value):
    return value if isinstance(value, (str, type(None))) else getattr(value, "name", type(value).__name__)
print(json.dumps({
    "argv": sys.argv,
    "path": sys.path,
    "names": {name: known(value) for name, value in sorted(globals().items()) if name != "__annotations__"},
    "main": vars(__main__) is globals() and sys.modules["__main__"] is __main__,
    "torch": "torch" in sys.modules,
    "file": sys._getframe().f_code.co_filename,
}))
"""

WAYS = {
    "file": ["sub/program.py"],
    "file in this folder": ["program.py"],
    "link": ["link.py"],
    "folder": ["sub"],
    "zip": ["program.zip"],
    "module": ["-m", "program"],
    "module in a package": ["-m", "package.module"],
    "package": ["-m", "package"],
}
ARGUMENTS = ["first", "-h", "--max-shared-bytes", "-m", "--", "last"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the program, in every shape."""
    made = tmp_path_factory.mktemp("programs")
    (made / "sub").mkdir()
    (made / "package").mkdir()
    (made / "package/__init__.py").touch()
    for place in (
        "program.py",
        "sub/program.py",
        "sub/__main__.py",
        "package/__main__.py",
        "package/module.py",
    ):
        (made / place).write_text(PROGRAM)
    (made / "link.py").symlink_to("sub/program.py")
    with zipfile.ZipFile(made / "program.zip", "w") as archive:
        archive.writestr("__main__.py", PROGRAM)
    return made


def seen(output: str, folder: Path) -> dict[str, Any]:
    """Returns what the program printed, but for what runpy gives it in another way."""
    found: dict[str, Any] = json.loads(output)
    found["argv"][0] = str(folder / found["argv"][0])
    for name in ("__builtins__", "__cached__", "__loader__", "__package__"):
        del found["names"][name]
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_program_sees_what_it_sees_under_python(fake_torch: Python, folder: Path, way: str) -> None:
    expected = fake_torch.run(*WAYS[way], *ARGUMENTS, cwd=folder)
    actual = fake_torch.run("-m", "ringloader", "run", *WAYS[way], *ARGUMENTS, cwd=folder)
    assert json.loads(expected.stdout)["argv"][1:] == ARGUMENTS, "the program ran"
    assert seen(actual.stdout, folder) == seen(expected.stdout, folder)
    assert (actual.stderr, actual.returncode) == ("", 0)


@pytest.mark.parametrize("program", ["sub/program.py", "sub"])
def test_safe_path(fake_torch: Python, folder: Path, program: str) -> None:
    expected = fake_torch.run("-P", program, cwd=folder)
    actual = fake_torch.run("-P", "-m", "ringloader", "run", program, cwd=folder)
    assert seen(actual.stdout, folder) == seen(expected.stdout, folder)


@pytest.mark.parametrize(
    "text",
    ["import sys; sys.exit(7)", "import sys; sys.exit('text')", "1 / 0", "def (", "import nowhere"],
)
def test_its_end_is_the_programs(fake_torch: Python, tmp_path: Path, text: str) -> None:
    (tmp_path / "program.py").write_text(text)
    for way in (["program.py"], ["-m", "program"]):
        expected = fake_torch.run(*way, cwd=tmp_path)
        actual = fake_torch.run("-m", "ringloader", "run", *way, cwd=tmp_path)
        assert actual.returncode == expected.returncode != 0
        assert actual.stderr.splitlines()[-1:] == expected.stderr.splitlines()[-1:]


@pytest.mark.parametrize(
    "way", [["nowhere.py"], ["-m", "nowhere"], ["-m", "package.nowhere"], ["-m", "empty"]]
)
def test_what_is_not_there(fake_torch: Python, folder: Path, way: list[str]) -> None:
    (folder / "empty").mkdir(exist_ok=True)
    expected = fake_torch.run(*way, cwd=folder)
    actual = fake_torch.run("-m", "ringloader", "run", *way, cwd=folder)
    assert actual.returncode == expected.returncode == (1 if way[0] == "-m" else 2)
    assert way[-1].removeprefix("package.") in actual.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run"], "the following arguments are required: program "),
        (["run", "--max-shared-bytes", "lots", "program.py"], "must be an int or None, not 'lots'"),
        (["run", "--max-shared-bytes=0", "program.py"], "max_shared_bytes must be positive, not 0"),
        (["run", "--device=cuda", "--device-prefetch=-1", "program.py"], "device_prefetch must be 0 or more"),
        (["run", "--device-transform=f", "program.py"], "device_transform must be"),
        (["run", "--device=-1", "program.py"], "device must be an index of 0 or more, not -1"),
        (["run", "--max", "1", "program.py"], "unrecognized arguments: --max"),
        (["walk"], "invalid choice: 'walk'"),
    ],
)
def test_wrong_command_lines(fake_torch: Python, folder: Path, arguments: list[str], text: str) -> None:
    done = fake_torch.run("-m", "ringloader", *arguments, cwd=folder)
    assert (done.stdout, done.returncode) == ("", 2)
    assert text in done.stderr.replace("\n", " ")
    assert "usage: python -m ringloader" in done.stderr


def test_the_help_has_a_sentence_the_values_and_the_default_of_each_option(fake_torch: Python) -> None:
    text = " ".join(fake_torch.run("-m", "ringloader", "run", "-h").stdout.split())
    assert "--watchdog VALUE Seconds that next waits before the log names" in text
    assert "Values: a number of seconds, more than 0, or None. Default: None (never)." in text
    assert "--stateful VALUE Replaces torchdata's loader by StatefulDataLoader" in text
    assert text.count(". Default: ") == text.count(" VALUE ")
    assert "`" not in text


def test_without_a_command_the_usage_is_printed(fake_torch: Python, without_hook: Python) -> None:
    done = fake_torch.run("-m", "ringloader")
    assert done.stdout.startswith("usage: python -m ringloader")
    assert done.returncode == 0
    for python, answer in (
        (fake_torch, "which is installed here;"),
        (without_hook, "which is not installed here;"),
    ):
        assert answer in " ".join(python.run("-m", "ringloader", "run", "-h").stdout.split())


@pytest.mark.parametrize("words", [["-h"], ["run", "program.py"], ["doctor", "-h"], ["--version"]])
def test_without_docstrings(fake_torch: Python, folder: Path, words: list[str]) -> None:
    done = fake_torch.run("-OO", "-m", "ringloader", *words, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")


def test_only_options_that_a_text_can_give_are_offered(fake_torch: Python) -> None:
    offered = set(re.findall(r"--([a-z-]+) VALUE", fake_torch.run("-m", "ringloader", "run", "-h").stdout))
    hidden = {name for name in TABLE if name.replace("_", "-") not in offered}
    assert hidden == {
        *("device_transform", "worker_pool", "worker_reset_fn", "last_batch"),
        "snapshot_every_n_steps",
    }
    for name in ("last_batch", "snapshot_every_n_steps"):
        done = fake_torch.run("-m", "ringloader", "run", f"--{name.replace('_', '-')}=4", "program.py")
        assert done.returncode == 2
        assert f"cannot take {name}" in done.stderr and "pass it to DataLoader" in done.stderr
    for name, instead in by_name.REMOVED.items():
        assert name.replace("_", "-") not in offered
        done = fake_torch.run("-m", "ringloader", "run", f"--{name.replace('_', '-')}", "4", "program.py")
        assert done.returncode == 2
        assert f"has no option {name!r} any more: {instead}" in " ".join(done.stderr.split())


@pytest.mark.parametrize("install", [None, "0", "max_shared_bytes=5"])
def test_it_is_installed_with_torch(
    without_hook: Python, fake_torch: Python, tmp_path: Path, install: str | None
) -> None:
    (tmp_path / "program.py").write_text(STATE + "import os; print(os.environ['RINGLOADER_INSTALL'])")
    done = without_hook.run("-m", "ringloader", "run", "program.py", cwd=tmp_path, install=install)
    assert done.stdout.splitlines() == ["hooked", "max_shared_bytes=5" if install and install != "0" else "1"]
    arguments = ["run", "--max-shared-bytes", "6", "-m", "program"]
    for python in (without_hook, fake_torch):
        done = python.run("-m", "ringloader", *arguments, cwd=tmp_path, install=install)
        assert done.stdout.splitlines() == ["hooked", "max_shared_bytes=6"]
        assert done.stderr == ""


@pytest.mark.parametrize("way", [["child.py"], ["-m", "child"]], ids=["file", "module"])
def test_children_are_reached_by_the_hook_of_the_environment(
    fake_torch: Python, without_hook: Python, tmp_path: Path, way: list[str]
) -> None:
    """Children that are spawned also find the program's own functions again."""
    (tmp_path / "child.py").write_text(CHILDREN)
    for python, others in ((fake_torch, "hooked"), (without_hook, "torch")):
        done = python.run("-m", "ringloader", "run", *way, cwd=tmp_path)
        assert done.stderr == ""
        assert done.stdout.splitlines() == [
            "fork hooked",
            f"spawn {others}",
            f"forkserver {others}",
            f"subprocess {others}",
        ]


RETURNING = """
import multiprocessing

class Here: pass

def make(): return Here()

if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(type(pool.apply(make)) is Here)
"""


@pytest.mark.parametrize("options", [[], ["--report"]], ids=str)
def test_objects_of_the_programs_classes_come_back_from_its_children(
    fake_torch: Python, tmp_path: Path, options: list[str]
) -> None:
    """Also where multiprocessing was imported before the program."""
    (tmp_path / "program.py").write_text(RETURNING)
    done = fake_torch.run("-m", "ringloader", "run", *options, "program.py", cwd=tmp_path)
    assert done.stdout == "True\nTrue\n"


TRAINING = """
import sys, torch
from torch.utils.data import DataLoader, Dataset

class Here(Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return torch.tensor(index)

if __name__ == "__main__":
    import ringloader
    loader = DataLoader(Here(), batch_size=2, num_workers=1, multiprocessing_context="spawn")
    print([batch.tolist() for batch in loader], ringloader.report(loader).path)
"""


@pytest.mark.slow
def test_a_training_whose_workers_are_spawned(real_torch: Python, tmp_path: Path) -> None:
    (tmp_path / "training.py").write_text(TRAINING)
    done = real_torch.run("-m", "ringloader", "run", "training.py", cwd=tmp_path)
    assert done.stderr == ""
    assert done.stdout == "[[0, 1], [2, 3]] native\n"
