"""The diff of docs/dev/first_change.md applies to the sources as they are, and what it adds works."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ringloader
from docs import blocks

ROOT = blocks.ROOT
PAGE = "docs/dev/first_change.md"
DIFF = "".join(block.code for block in blocks.read(ROOT / PAGE).of("diff"))
# Files and folders that the diff, `make generate` and the tests below use.
COPIED = ("python", "tests", "ci", "docs", "pyproject.toml", "ARCHITECTURE.md", "CHANGELOG.md")
GENERATED = (
    "python/ringloader/dataloader.py",
    "python/ringloader/stateful_dataloader.py",
    "python/ringloader/_patch/install.py",
    "python/ringloader/_patch/by_name.py",
    "docs/options.md",
)
# Tests of the diff, and tests that fail for an option without its rows.
TESTS = (
    "tests/features/nice/test_nice.py",
    "tests/features/test_rules.py::test_each_rule_has_a_case_and_names_of_its_own",
    "tests/features/test_rules.py::test_the_constructor_refuses[worker_nice without workers]",
    "tests/features/test_rules.py::test_the_constructor_refuses[worker_method with worker_nice]",
    "tests/core/test_stages.py::test_each_option_of_a_worker_has_a_place_of_its_own",
    "tests/features/test_made_anew.py::test_every_option_has_a_case",
    "tests/features/pools/test_options_in_pools.py::test_every_option_has_a_case",
    "tests/features/pools/test_options_in_pools.py::test_a_process_of_a_pool_is_as_before[worker_nice]",
    "tests/unit/test_maps.py::test_each_module_of_the_package_has_tests",
    "tests/unit/test_maps.py::test_folders_are_small",
)
PROGRAM = """\
import inspect
import multiprocessing
import os
import pathlib
import sys

import torch

import ringloader

assert pathlib.Path(ringloader.__file__).is_relative_to(pathlib.Path.cwd()), ringloader.__file__
# A program without a guard.
multiprocessing.set_start_method("fork")


class Niceness(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return os.getpriority(os.PRIO_PROCESS, 0)


def error_of(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


before = os.getpriority(os.PRIO_PROCESS, 0)
for cls in (ringloader.DataLoader, ringloader.StatefulDataLoader):
    assert inspect.signature(cls).parameters["worker_nice"].default is None
    assert set(cls(Niceness(), batch_size=None, num_workers=2, worker_nice=19)) == {19}
    found = error_of(cls, Niceness(), num_workers=2, worker_nice=20)
    assert found == "ValueError: worker_nice must be from -20 to 19, not 20"
    found = error_of(cls, Niceness(), num_workers=0, worker_nice=19)
    assert found.startswith("ValueError: worker_nice=19 and num_workers=0 do not go together"), found
assert "worker_nice: Niceness of worker processes" in inspect.getdoc(ringloader.DataLoader)
assert "``worker_nice`` without workers" in inspect.getdoc(ringloader.install)
loader = torch.utils.data.DataLoader(Niceness(), batch_size=None, num_workers=1)
without = torch.utils.data.DataLoader(Niceness(), batch_size=None)
with ringloader.installed(worker_nice=19):
    assert set(loader) == {19}
    assert set(without) == {before}
    assert "worker_nice" in str(ringloader.report(without))
found = error_of(ringloader.install, worker_nice="much")
assert found == "TypeError: worker_nice must be an int or None, not 'much'"
ringloader.install(worker_nice=19)
ringloader.uninstall()
print("all there", flush=True)

import pytest

sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""

pytestmark = pytest.mark.rings_only


def run(folder, *command):
    return subprocess.run(
        command,
        cwd=folder,
        # Git would take the files for those of a repository above.
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(folder / "python"),
            "GIT_CEILING_DIRECTORIES": str(folder.parent),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )


def copy(folder):
    """A copy of the sources, with the extension."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)
    for file in Path(ringloader.__file__).parent.glob("*.so"):
        (folder / "python/ringloader" / file.name).symlink_to(file)


def apply(folder):
    (folder / "change.diff").write_text(DIFF)
    applied = run(folder, "git", "apply", "change.diff")
    assert applied.returncode == 0, f"the sources have changed, and {PAGE} must follow them: {applied.stdout}"


@pytest.mark.limit(300)
def test_the_diff_of_the_page_makes_an_option_that_works(tmp_path):
    copy(tmp_path)
    apply(tmp_path)
    check = [sys.executable, "ci/generate.py", "--check"]
    assert run(tmp_path, *check).stdout == f"stale, run `make generate`: {', '.join(GENERATED)}\n"
    before = {name: (tmp_path / name).read_text() for name in GENERATED}
    assert not any("worker_nice" in text for text in before.values())
    generated = run(tmp_path, sys.executable, "ci/generate.py")
    assert (generated.returncode, generated.stdout) == (0, "")
    assert all("worker_nice" in (tmp_path / name).read_text() for name in GENERATED)
    again = run(tmp_path, *check)
    assert (again.returncode, again.stdout) == (0, "")
    (tmp_path / "program.py").write_text(PROGRAM)
    ran = run(tmp_path, sys.executable, "program.py", *TESTS)
    assert ran.stdout.startswith("all there\n") and ran.returncode == 0, ran.stdout
    assert " passed" in ran.stdout and "skipped" not in ran.stdout, ran.stdout


def test_a_page_that_does_not_fit_the_sources_is_found(tmp_path):
    copy(tmp_path)
    table = tmp_path / "python/ringloader/_features/table.py"
    text = table.read_text()
    assert text.count("    stats: bool = stats.STATS\n") == 1
    table.write_text(text.replace("    stats: bool = stats.STATS\n", "    statistics: bool = stats.STATS\n"))
    with pytest.raises(AssertionError, match=rf"{PAGE} must follow them: .*_features/table\.py"):
        apply(tmp_path)


def test_the_page_shows_no_file_that_is_generated():
    assert "--- a/python/ringloader/_features/table.py" in DIFF
    assert [name for name in GENERATED if f"+++ b/{name}" in DIFF] == []
