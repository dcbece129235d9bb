"""RINGLOADER_INSTALL: what it reaches, and that nothing of it can hurt a Python that starts."""

from __future__ import annotations

import pkgutil
import shutil
import sys
from pathlib import Path

import pytest

from install.python import EXTRA, STATE, Python, make_python

pytestmark = pytest.mark.rings_only

# From 3.15 on, Python itself imports the small module.
SAYS_NOTHING = (
    "import sys; assert 'ringloader' not in sys.modules; "
    "assert sys.version_info >= (3, 15) or 'ringloader_autoinstall' not in sys.modules"
)


@pytest.mark.parametrize("value", [None, "", "0"])
def test_without_the_variable_nothing_is_imported(fake_torch: Python, value: str | None) -> None:
    done = fake_torch.run("-c", SAYS_NOTHING + STATE, install=value)
    assert (done.stdout, done.stderr, done.returncode) == ("torch\n", "", 0)


def test_a_missing_package_is_said_when_ringloader_is_imported(
    without_hook: Python, fake_torch: Python, tmp_path: Path
) -> None:
    said = "ringloader: RINGLOADER_INSTALL has no effect: the package ringloader-autoinstall is not installed"
    imports = "import ringloader\n"
    for value in ("1", "stats=True"):
        done = without_hook.run("-c", imports, install=value)
        assert done.stderr.startswith(said) and done.stderr.count("\n") == 1
    for value in (None, "", "0"):
        assert without_hook.run("-c", imports, install=value).stderr == ""
    assert fake_torch.run("-c", imports, install="1").stderr == ""
    # Neither the command nor a process of multiprocessing says it.
    (tmp_path / "program.py").write_text("import ringloader")
    assert without_hook.run("-m", "ringloader", "run", tmp_path / "program.py", install="1").stderr == ""
    assert without_hook.run("-m", "ringloader", "--version", install="1").stderr == ""
    (tmp_path / "spawns.py").write_text(SPAWNS)
    done = without_hook.run(tmp_path / "spawns.py", install="1")
    assert (done.stdout, done.stderr.count("\n")) == ("child\n", 1)


SPAWNS = """
import multiprocessing
import ringloader
def work():
    print("child", flush=True)
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
"""


def test_torch_is_not_imported_before_the_program_does(fake_torch: Python) -> None:
    text = """
import sys
before = list(sys.meta_path)
assert "ringloader" in sys.modules
assert not {"torch", "typing"} & set(sys.modules)
# From 3.15 on, site itself imports this one.
assert sys.version_info >= (3, 15) or "importlib.machinery" not in sys.modules
import torch.utils.data
assert sys.meta_path == before, "not the module that is waited for"
import torch.utils.data.dataloader as module
assert sys.meta_path == before[1:]
assert type(module.__loader__).__name__ == "SourceFileLoader" and module.__loader__ is module.__spec__.loader
assert "exec_module" not in vars(module.__loader__)
import inspect
assert "class DataLoader" in inspect.getsource(module)
"""
    done = fake_torch.run("-c", text + STATE, install="1")
    assert (done.stdout, done.stderr) == ("hooked\n", "")


def test_an_import_that_fails_can_be_tried_again(fake_torch: Python) -> None:
    text = """
import importlib, sys
module = sys.modules["torch"] = None
try:
    import torch.utils.data.dataloader
except ImportError:
    del sys.modules["torch"]
import importlib.util
importlib.util.find_spec("torch.utils.data.dataloader")
assert "torch.utils.data.dataloader" not in sys.modules
class Refusing:
    def find_spec(self, name, path, target=None):
        if name == "torch.utils.data.dataloader":
            sys.meta_path.remove(self)
            raise ImportError("not now")
sys.meta_path.insert(1, Refusing())
try:
    import torch.utils.data.dataloader
except ImportError as error:
    print(error)
"""
    done = fake_torch.run("-c", text + STATE, install="1")
    assert (done.stdout, done.stderr) == ("not now\nhooked\n", "")


def test_a_finder_of_old_is_passed_over(fake_torch: Python) -> None:
    text = """
import sys
class Old:
    def find_module(self, name, path=None):
        return None
sys.meta_path.insert(1, Old())
"""
    done = fake_torch.run("-c", text + STATE, install="1")
    assert (done.stdout, done.stderr) == ("hooked\n", "")


# The flags are about variables of Python's own, the user's own site-packages, and the current folder.
@pytest.mark.parametrize("flag", ["-E", "-I", "-s", "-P"])
def test_flags_of_the_interpreter(fake_torch: Python, flag: str) -> None:
    done = fake_torch.run(flag, "-c", STATE, install="1")
    assert (done.stdout, done.stderr) == ("hooked\n", "")


def test_without_site_there_is_no_hook(fake_torch: Python) -> None:
    text = f"import sys; sys.path.append({str(fake_torch.packages)!r})"
    done = fake_torch.run("-S", "-c", text + STATE, install="1")
    assert (done.stdout, done.stderr) == ("torch\n", "")


def test_without_torch_nothing_happens(fake_torch: Python) -> None:
    text = """
import sys
sys.path[:] = [folder for folder in sys.path if "site-packages" not in folder]
try:
    import torch
except ModuleNotFoundError as error:
    print(error)
"""
    done = fake_torch.run("-c", text, install="1")
    assert (done.stdout, done.stderr) == ("No module named 'torch'\n", "")


@pytest.mark.parametrize("value", ["nonsense", "max_shared_bytes=lots", "max_shared_bytes=-1", "other=1"])
def test_wrong_options_are_said_in_one_line_with_torch(fake_torch: Python, value: str) -> None:
    assert fake_torch.run("-c", "", install=value).stderr == ""
    done = fake_torch.run("-c", STATE, install=value)
    assert (done.stdout, done.returncode) == ("torch\n", 0)
    assert done.stderr.startswith("ringloader: RINGLOADER_INSTALL has no effect: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_device_that_is_not_there_leaves_torchs_own(real_torch: Python) -> None:
    text = """
from torch.utils.data import DataLoader
loaders = DataLoader([1, 2], num_workers=1, multiprocessing_context="fork"), DataLoader([1, 2])
print([type(iter(loader)).__module__ for loader in loaders])
"""
    done = real_torch.run("-c", text + STATE, install="device=xpu:9")
    assert done.stdout == "['torch.utils.data.dataloader', 'torch.utils.data.dataloader']\ntorch\n"
    assert done.stderr.startswith(
        "ringloader: RINGLOADER_INSTALL has no effect: ValueError: device 'xpu:9' is"
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("broken", ["missing", "raises", "no Python"])
def test_a_broken_ringloader_is_said_in_one_line(tmp_path: Path, broken: str) -> None:
    python = make_python(tmp_path / "venv")
    (python.packages / "ringloader").unlink()
    if broken != "missing":
        (python.packages / "ringloader").mkdir()
        text = "raise OSError('two\\nlines')" if broken == "raises" else "def ("
        (python.packages / "ringloader/__init__.py").write_text(text)
    done = python.run("-c", STATE, install="1")
    assert (done.stdout, done.returncode) == ("torch\n", 0)
    assert done.stderr.startswith("ringloader: RINGLOADER_INSTALL has no effect: ")
    assert done.stderr.count("\n") == 1


def test_what_breaks_at_the_first_iterator_leaves_torchs_own(fake_torch: Python) -> None:
    # ringloader's loader cannot be imported over a torch that is none.
    text = "import torch.utils.data.dataloader as m; print([m.DataLoader()._get_iterator() for _ in 'ab'])"
    done = fake_torch.run("-c", text + STATE, install="1")
    assert done.stdout == """["torch's own", "torch's own"]\ntorch\n"""
    assert done.stderr.startswith("ringloader: RINGLOADER_INSTALL has no effect: ")
    assert done.stderr.count("\n") == 1


def test_without_a_standard_error_too(fake_torch: Python) -> None:
    text = "import sys; sys.stderr = None" + STATE
    assert fake_torch.run("-c", text, install="nonsense").stdout == "torch\n"


CHILDREN = """
import multiprocessing, subprocess, sys
def state(_=None):
    from torch.utils.data.dataloader import DataLoader
    return "hooked" if hasattr(DataLoader._get_iterator, "__wrapped__") else "torch"
if __name__ == "__main__":
    for start in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(start).Pool(1) as pool:
            print(start, pool.apply(state), flush=True)
    text = "import child; print('subprocess', child.state())"
    subprocess.run([sys.executable, "-c", text], check=True)
"""


def test_children_of_every_kind_are_reached(fake_torch: Python, tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(CHILDREN)
    done = fake_torch.run("child.py", install="1", cwd=tmp_path)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "fork hooked",
        "spawn hooked",
        "forkserver hooked",
        "subprocess hooked",
    ]


REAL = """
import sys
assert "torch" not in sys.modules
import torch
from torch.utils.data import DataLoader
if __name__ == "__main__":
    import ringloader, ringloader._core.make_transport
    kind = ringloader._core.make_transport.WorkerKind
    make, budgets = kind.transport, []
    def transport(own, loader, options, *rest):
        budgets.append(options.max_shared_bytes)
        return make(own, loader, options, *rest)
    kind.transport = transport
    loader = DataLoader(list(range(8)), batch_size=4, num_workers=1)
    print([batch.tolist() for batch in loader], ringloader.report(loader).path, budgets)
    ringloader.uninstall()
    print(type(iter(loader)).__name__)
"""


def test_with_torch_itself(real_torch: Python) -> None:
    done = real_torch.run("-c", REAL, install="max_shared_bytes=1000000")
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "[[0, 1, 2, 3], [4, 5, 6, 7]] native [1000000]",
        "_MultiProcessingDataLoaderIter",
    ]


REPLACED_BEFORE = """
import torch.utils.data.dataloader as module
class Theirs(module._MultiProcessingDataLoaderIter):
    pass
module._MultiProcessingDataLoaderIter = Theirs
import ringloader
loader = ringloader.convert(module.DataLoader(list(range(4)), num_workers=1))
print(iter(loader).__class__.__name__, ringloader.report(loader).path)
"""


def test_what_was_replaced_before_ringloader_came_takes_effect(real_torch: Python) -> None:
    done = real_torch.run("-c", REPLACED_BEFORE, install="1")
    assert done.stdout == "Theirs torch\n", done.stderr


def test_the_two_files_name_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.15 and later take the .start file in place of the import line of the .pth of the same name."""
    monkeypatch.syspath_prepend(EXTRA)
    (line,) = (EXTRA / "ringloader_autoinstall.pth").read_text().splitlines()
    (entry,) = (EXTRA / "ringloader_autoinstall.start").read_text().splitlines()
    found = pkgutil.resolve_name(entry)
    assert found is sys.modules["ringloader_autoinstall"].start
    monkeypatch.delenv("RINGLOADER_INSTALL", raising=False)
    before = list(sys.meta_path)
    found()
    assert sys.meta_path == before
    called = []
    monkeypatch.setattr(sys.modules["ringloader_autoinstall"], "start", lambda: called.append(1))
    for value, calls in (("", 0), ("0", 0), ("1", 1)):
        monkeypatch.setenv("RINGLOADER_INSTALL", value)
        called.clear()
        exec(line)
        assert len(called) == calls
    del sys.modules["ringloader_autoinstall"]
    shutil.rmtree(EXTRA / "__pycache__", ignore_errors=True)


def test_a_number_of_samples_at_once(real_torch: Python, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("""
import asyncio, torch
class Counting(torch.utils.data.Dataset):
    under_way = 0
    def __len__(self):
        return 16
    async def __getitem__(self, index):
        self.under_way += 1
        found = self.under_way
        await asyncio.sleep(0.1)
        self.under_way -= 1
        return found
print(max(int(batch.max()) for batch in torch.utils.data.DataLoader(Counting(), batch_size=8)))
""")
    done = real_torch.run("program.py", install="worker_concurrency=4", cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("4\n", "")
