"""The diff of docs/dev/first_change.md applies to the code as it is, and does what the page says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ringloader
from docs import blocks

PAGE = blocks.ROOT / "docs/dev/first_change.md"


def changed(folder: Path) -> Path:
    """Returns a copy of the files that the diff names, with the change."""
    diff = "".join(block.code for block in blocks.read(PAGE).of("diff"))
    (folder / "change.diff").write_text(diff)
    shutil.copytree(
        blocks.ROOT / "python", folder / "python", ignore=shutil.ignore_patterns("__pycache__", "*.so")
    )
    for name in re.findall(r"^--- a/(.*)$", diff, re.M):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(blocks.ROOT / name, folder / name)
    # Elsewhere than in a repository, whose folder it would take for the files'.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    applied = subprocess.run(
        ["git", "apply", "change.diff"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert applied.returncode == 0, f"docs/dev/first_change.md: {applied.stdout}"
    return folder


def test_the_diff_applies(tmp_path):
    folder = changed(tmp_path)
    assert (folder / "python/ringloader/_options/nice.py").is_file()
    for name in ("table.py", "checks.py"):
        assert "worker_nice" in (folder / "python/ringloader/_options" / name).read_text()


@pytest.mark.slow
def test_the_tests_of_the_change_pass(tmp_path):
    folder = changed(tmp_path)
    for binary in Path(ringloader.__file__).parent.glob("_native*.so"):
        shutil.copy(binary, folder / "python/ringloader")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/test_nice.py"]
    environment = {**os.environ, "PYTHONPATH": str(folder / "python")}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout
