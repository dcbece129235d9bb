"""install(stateful=True): ringloader's class in the place of torchdata's, and out of it again."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data

import ringloader
from install.python import Python
from ringloader._patch import stateful

pytestmark = pytest.mark.rings_only

# The shape of torchdata: the class in a module of its own, and its name in the package.
TORCHDATA = {
    "__init__.py": "",
    "stateful_dataloader/__init__.py": "from .stateful_dataloader import StatefulDataLoader\n",
    "stateful_dataloader/stateful_dataloader.py": """
import torch.utils.data

class StatefulDataLoader(torch.utils.data.DataLoader):
    pass
""",
}
USER = "from torchdata.stateful_dataloader import StatefulDataLoader\nMine = StatefulDataLoader\n"


def write_torchdata(folder: Path) -> None:
    for name, text in TORCHDATA.items():
        file = folder / "torchdata" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to import from, with a torchdata that nobody has imported yet."""
    write_torchdata(tmp_path)
    for name in ("before", "later"):
        (tmp_path / f"{name}.py").write_text(USER)
    monkeypatch.syspath_prepend(tmp_path)
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "torchdata"}
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] in ("torchdata", "before", "later")]:
        del sys.modules[name]
    sys.modules.update(kept)


def torchdata() -> Any:
    return importlib.import_module("torchdata.stateful_dataloader")


@pytest.mark.parametrize("comes", ["before", "later"])
def test_every_module_has_our_class_by_torchdatas_name(modules: Path, comes: str) -> None:  # noqa: ARG001
    theirs = torchdata().StatefulDataLoader if comes == "before" else None
    before = importlib.import_module("before") if comes == "before" else None
    with ringloader.installed(stateful=True):
        later = importlib.import_module("later")
        inner = importlib.import_module("torchdata.stateful_dataloader.stateful_dataloader")
        for module in filter(None, (before, later, torchdata(), inner)):
            assert module.StatefulDataLoader is ringloader.StatefulDataLoader
        assert later.Mine is ringloader.StatefulDataLoader
        assert before is None or before.Mine is ringloader.StatefulDataLoader
    theirs = theirs or inner.StatefulDataLoader
    assert theirs is not ringloader.StatefulDataLoader
    for module in filter(None, (before, torchdata(), inner)):
        assert module.StatefulDataLoader is theirs
    assert before is None or before.Mine is theirs
    assert later.StatefulDataLoader is ringloader.StatefulDataLoader, "imported meanwhile"


def test_only_stateful_asks_for_it(modules: Path) -> None:  # noqa: ARG001
    theirs = torchdata().StatefulDataLoader
    ringloader.install()
    assert torchdata().StatefulDataLoader is theirs
    ringloader.install(stateful=True)
    assert torchdata().StatefulDataLoader is ringloader.StatefulDataLoader
    with ringloader.installed():
        assert torchdata().StatefulDataLoader is theirs
    assert torchdata().StatefulDataLoader is ringloader.StatefulDataLoader
    with ringloader.installed(stateful=True):
        pass
    assert torchdata().StatefulDataLoader is ringloader.StatefulDataLoader
    ringloader.install()
    assert torchdata().StatefulDataLoader is theirs
    ringloader.install(stateful=True)
    ringloader.uninstall()
    ringloader.uninstall()
    assert torchdata().StatefulDataLoader is theirs


def test_uninstall_before_the_import_leaves_torchdatas(modules: Path) -> None:  # noqa: ARG001
    before = list(sys.meta_path)
    ringloader.install(stateful=True)
    assert stateful.is_put and "torchdata" not in sys.modules
    ringloader.uninstall()
    assert sys.meta_path == before
    assert torchdata().StatefulDataLoader is not ringloader.StatefulDataLoader


def test_torchs_class_gets_no_new_method(modules: Path) -> None:  # noqa: ARG001
    names = set(vars(torch.utils.data.DataLoader))
    with ringloader.installed(stateful=True):
        torchdata()
        # Python calls this one, for subclasses that the log is to name.
        assert set(vars(torch.utils.data.DataLoader)) - {"__init_subclass__"} == names
        assert not hasattr(torch.utils.data.DataLoader([1]), "state_dict")


def test_modules_that_load_late_stay_unloaded(
    modules: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = importlib.util.spec_from_file_location("lazy", modules / "before.py")
    assert spec is not None and spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    spec.loader.exec_module(lazy)
    torchdata()
    with ringloader.installed(stateful=True):
        assert "Mine" not in object.__getattribute__(lazy, "__dict__")
        assert lazy.Mine is ringloader.StatefulDataLoader


def test_subclasses_that_exist_stay_and_are_named(
    modules: Path,  # noqa: ARG001
    caplog: pytest.LogCaptureFixture,
) -> None:
    theirs = torchdata().StatefulDataLoader

    class Parallel(theirs):  # type: ignore[misc, valid-type]
        pass

    with caplog.at_level(logging.WARNING, "ringloader"), ringloader.installed(stateful=True):
        assert not issubclass(Parallel, ringloader.StatefulDataLoader)
        assert issubclass(type("Later", (torchdata().StatefulDataLoader,), {}), ringloader.StatefulDataLoader)
    (record,) = caplog.records
    assert "test_stateful.test_subclasses_that_exist_stay_and_are_named" in record.getMessage()
    assert record.getMessage().count("Parallel") == 1
    assert "Install before the import" in record.getMessage()


def test_without_torchdata_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "torchdata"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    for function in (ringloader.install, ringloader.installed):
        with pytest.raises(ModuleNotFoundError, match=r"stateful=True, and torchdata.*not installed"):
            function(stateful=True)
    assert not stateful.is_put


def test_it_is_true_or_false() -> None:
    with pytest.raises(TypeError, match="stateful must be a bool, not 1"):
        ringloader.install(stateful=1)  # type: ignore[arg-type]


PROGRAM = """
import sys
before = list(sys.meta_path)
import torch.utils.data
assert "torchdata" not in sys.modules
from torchdata.stateful_dataloader import StatefulDataLoader
import ringloader, os
print(StatefulDataLoader is ringloader.StatefulDataLoader, os.environ["RINGLOADER_INSTALL"])
ringloader.uninstall()
print(sys.modules["torchdata.stateful_dataloader"].StatefulDataLoader is ringloader.StatefulDataLoader)
"""


RUN = ("-m", "ringloader", "run", "--stateful", "True", "--max-shared-bytes", "5")


@pytest.mark.skipif(importlib.util.find_spec("torchdata") is not None, reason="torchdata is installed")
def test_the_command_line_without_torchdata(real_torch: Python, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = real_torch.run(*RUN, "program.py", cwd=tmp_path)
    assert "torchdata, whose StatefulDataLoader it replaces, is not installed" in " ".join(
        done.stderr.split()
    )
    assert done.returncode == 2


def test_by_the_environment_and_the_command_line(real_torch: Python, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    write_torchdata(tmp_path)
    path = {"PYTHONPATH": str(tmp_path)}
    done = real_torch.run(*RUN, "program.py", cwd=tmp_path, **path)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["True max_shared_bytes=5,stateful=True", "False"]
    done = real_torch.run("program.py", install="stateful=True", cwd=tmp_path)
    assert (done.stdout.splitlines(), done.stderr) == (["True stateful=True", "False"], "")


def test_wrong_texts(fake_torch: Python, tmp_path: Path) -> None:
    (tmp_path / "program.py").touch()
    done = fake_torch.run("-m", "ringloader", "run", "--stateful", "yes", "program.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "stateful must be a bool, not 'yes'" in done.stderr
    done = fake_torch.run("-c", "import torch.utils.data.dataloader", install="stateful=yes")
    assert done.stderr == (
        "ringloader: RINGLOADER_INSTALL has no effect: TypeError: stateful must be a bool, not 'yes'\n"
    )
