"""The table of options: what is written elsewhere agrees with it, or is generated from it."""

import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ringloader
from ringloader._features import rules
from ringloader._features.table import TABLE, Options

ROOT = Path(__file__).parents[2]
# The files that `make generate` writes, each with a word of what is generated, and another one.
GENERATED = {
    "python/ringloader/dataloader.py": (
        "Number from which ``seeding``",
        "The number from which ``seeding``",
    ),
    "python/ringloader/stateful_dataloader.py": ("device_prefetch: int = 2", "device_prefetch: int = 3"),
    "python/ringloader/_patch/install.py": ("- ``restart_workers`` with", "- ``restart_workers`` without"),
    "python/ringloader/_patch/by_name.py": ("restart_workers: int", "restart_workers: str"),
    "docs/options.md": ("| `stats` | works |", "| `stats` | works well |"),
}
# A row for the table, and a program that looks for the option wherever options are.
UMASK = """\
    worker_umask: int = option(
        0,
        check=rules.integer(0),
        in_threads=Never("a thread has no umask of its own"),
        in_worker="is left out by install",
        on_torchs="is an error",
    )
"""
UMASKS_TEXTS = """\
[worker_umask]
topic = "Memory"
values = "an int, 0 or more"
without = "0, the umask stays"
line = "Permissions that files of workers lack."
details = "A number."
example = "loader = DataLoader(dataset, worker_umask=3)"
page = "tuning.md"

"""
PROGRAM = """\
import inspect
import os

import torch

import ringloader
import ringloader._features.all as features
from ringloader._features.table import Options
from ringloader._patch import by_name


def error_of(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refuses(text, call, *args, **kwargs):
    found = error_of(call, *args, **kwargs)
    assert text in found, found


for cls in (ringloader.DataLoader, ringloader.StatefulDataLoader):
    parameter = inspect.signature(cls).parameters["worker_umask"]
    assert parameter.default == 0 and str(parameter.annotation) == "int"
    assert cls([1], worker_umask=3).worker_umask == 3
    with_threads = {"worker_umask": 3, "worker_method": "thread"}
    text = "ValueError: worker_method='thread' and worker_umask=3 do not go together: a thread has no umask"
    refuses(text, cls, [1], **with_threads)
    refuses("TypeError: worker_umask must be an int, not 'x'", cls, [1], worker_umask="x")
loader = torch.utils.data.DataLoader([1])
refuses(text, ringloader.convert, loader, **with_threads)
refuses(text, ringloader.install, **with_threads)
refuses(text, by_name.from_text, "worker_umask=3,worker_method=thread")
refuses("restart_workers, worker_umask, on_error", ringloader.install, umask=3)
assert by_name.from_text("worker_umask=3")[0] == Options(worker_umask=3)
assert ringloader.convert(loader, worker_umask=3).worker_umask == 3
refuses("AttributeError: worker_umask of a loader cannot be set", setattr, loader, "worker_umask", 4)
assert features.in_worker(Options(worker_umask=3)) == Options(worker_umask=3)
assert features.in_worker(Options(worker_umask=3), is_installed=True) == Options()
os.environ["RINGLOADER"] = "off"
refuses("RuntimeError: worker_umask cannot take effect where torch's own loader runs", iter, loader)
print("all there")
"""

pytestmark = pytest.mark.rings_only


def generate(root, *arguments):
    return subprocess.run(
        [sys.executable, ROOT / "ci/generate.py", "--root", root, *arguments],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


@pytest.fixture
def tree(tmp_path):
    """A copy of what `make generate` reads and writes."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "python", tmp_path / "python", ignore=ignored)
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs/options.md", tmp_path / "docs")
    return tmp_path


def test_the_constructor_has_the_options_of_the_table():
    """Names, order, defaults and types, behind torch's arguments."""
    parameters = list(inspect.signature(ringloader.StatefulDataLoader.__init__).parameters.values())
    names = [name for name, row in TABLE.items() if not row.is_torchs]
    ours = parameters[-len(names) :]
    assert [one.name for one in ours] == names
    stateless = [one for one in parameters if one.name != "snapshot_every_n_steps"]
    assert list(inspect.signature(ringloader.DataLoader.__init__).parameters.values()) == stateless
    assert all(one.kind is inspect.Parameter.KEYWORD_ONLY for one in ours)
    assert [one.default for one in ours] == [getattr(Options, name) for name in names]
    for one in ours:
        annotation = TABLE[one.name].annotation or Options.__annotations__[one.name]
        assert one.annotation == annotation.replace("bad_samples.", "")


def test_each_option_is_described_in_the_docstring():
    documented = re.findall(r"^            (\w+): ", inspect.getdoc(ringloader.DataLoader) or "", re.M)
    documented = documented or re.findall(r"^    (\w+): ", inspect.getdoc(ringloader.DataLoader) or "", re.M)
    of_states = [name for name, row in TABLE.items() if row.is_of_states]
    torchs = [name for name, row in TABLE.items() if row.is_torchs]
    others = [name for name in TABLE if name not in (*of_states, *torchs)]
    # By topic.
    assert sorted(name for name in documented if name in TABLE) == sorted(torchs + others)
    documented = re.findall(r"^    (\w+): ", inspect.getdoc(ringloader.StatefulDataLoader) or "", re.M)
    assert [name for name in documented if name in TABLE] == of_states


def test_each_option_has_an_example_and_a_page():
    found = rules.texts(TABLE)
    assert [name for name, texts in found.items() if name not in texts.example or texts.page is None] == []


def test_the_help_of_a_loader_fits_a_reader():
    lines = (inspect.getdoc(ringloader.DataLoader) or "").splitlines()
    assert len(lines) <= 110
    # An example comes first, and each of torch's arguments has one line.
    assert lines[2] == "Example:"
    torchs = inspect.signature(torch.utils.data.DataLoader).parameters
    named = {line.strip().partition(": torch's: ")[0] for line in lines if ": torch's: " in line}
    assert named == {*torchs} & {*inspect.signature(ringloader.DataLoader).parameters} - {*TABLE}


def test_what_is_generated_is_up_to_date():
    found = generate(ROOT, "--check")
    assert (found.returncode, found.stdout + found.stderr) == (0, "")


@pytest.mark.parametrize("name", GENERATED)
def test_what_is_stale_is_found_and_written_again(tree, name):
    file = tree / name
    before = file.read_text()
    word, another = GENERATED[name]
    assert word in before
    file.write_text(before.replace(word, another))
    found = generate(tree, "--check")
    assert found.returncode != 0
    assert found.stderr == f"stale, run `make generate`: {name}\n"
    assert generate(tree).returncode == 0
    assert file.read_text() == before


def test_a_row_of_the_table_makes_an_option(tree):
    """It is in signatures, docstrings and the page, in every error, and wherever options come from."""
    table = tree / "python/ringloader/_features/table.py"
    row, before = "    on_error: ", table.read_text()
    assert before.count(row) == 1
    table.write_text(before.replace(row, UMASK + row))
    found = generate(tree, "--check")
    assert found.stderr == "generate: no texts.toml has 'worker_umask'\n"
    texts = tree / "python/ringloader/_features/texts.toml"
    texts.write_text(texts.read_text() + "\n" + UMASKS_TEXTS)
    names = {line.split(": ")[1] for line in [generate(tree, "--check").stderr.strip()]}
    assert names == {
        "python/ringloader/dataloader.py, python/ringloader/stateful_dataloader.py, "
        "python/ringloader/_patch/install.py, python/ringloader/_patch/by_name.py, docs/options.md"
    }
    assert generate(tree).returncode == 0
    texts = {name: " ".join((tree / name).read_text().split()) for name in GENERATED}
    docstring = (
        "worker_umask: Permissions that files of workers lack. Default: 0, the umask stays. "
        "More: tuning.md. Args: devices"
    )
    assert docstring in texts["python/ringloader/dataloader.py"]
    assert "``seeding``, ``seed`` and ``worker_umask``, which" in texts["python/ringloader/_patch/install.py"]
    page = (
        "### `worker_umask` Permissions that files of workers lack. A number. [More](tuning.md). "
        "```python loader = DataLoader(dataset, worker_umask=3) ``` "
        "- **Values:** an int, 0 or more - **Default:** 0, the umask stays "
        '- **Cannot be combined with:** - `worker_method="thread"`'
    )
    assert page in texts["docs/options.md"]
    assert "- `restart_workers` - `worker_umask` - " in texts["docs/options.md"]
    assert "| `worker_umask` | raises: a thread has no umask of its own |" in texts["docs/options.md"]
    for file in (Path(ringloader.__file__).parent).glob("*.so"):
        (tree / "python/ringloader" / file.name).symlink_to(file)
    environment = {"PYTHONPATH": str(tree / "python"), "PATH": ""}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (ran.stdout, ran.returncode) == ("all there\n", 0), ran.stderr
    command = [sys.executable, "-m", "ringloader", "run", "--help"]
    offered = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=150, check=True
    )
    assert "--worker-umask VALUE" in offered.stdout
